"""Start processes: commands with a mark and in a cgroup from the first instruction on, and children of this process.

A ``preexec_fn`` could set mark and cgroup, but makes :mod:`subprocess` fork a parent that may be large and have
threads. So a small program does both and then becomes the command: ``prlimit(1)`` for the mark alone, else this
interpreter. Measured on a busy machine: ``prlimit`` takes 9 ms, the interpreter 116 ms.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from anyaccel.errors import AnyaccelError, CommandNotFoundError, CommandNotRunnableError
from anyaccel.linux import Mark, process, signal
from anyaccel.linux import mark as marks

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, NoReturn

    from anyaccel.linux import WorkerGroup

JOB_NAME = "anyaccel-job"
"""Process name of the supervisor of a detached command; the command is its only child."""
# Python source for another interpreter: -I and -S keep the user's variables and site packages out of it.
_BECOME = (
    "import os,resource,signal,sys\n"
    "mark,group,program=sys.argv[1:4]\n"
    "if mark: resource.setrlimit(10,(int(mark),int(mark)))\n"
    "if group:\n"
    " own=str(os.getpid())\n"
    " try:\n"
    "  with open(group+'/cgroup.procs','w') as file: file.write(own)\n"
    "  with open(group+'/cgroup.procs') as file: there=own in file.read().split()\n"
    " except OSError as error: there=False\n"
    " if not there:\n"
    "  os.write(2,f'anyaccel: the command was not started: it cannot enter the cgroup {group}\\n'.encode())\n"
    "  os._exit(126)\n"
    "for number in (signal.SIGPIPE,signal.SIGXFSZ): signal.signal(number,signal.SIG_DFL)\n"
    "try: os.execvp(program,sys.argv[4:])\n"
    "except OSError as error:\n"
    " os.write(2,f'{program}: {error.strerror}\\n'.encode())\n"
    " os._exit(127 if error.errno==2 else 126)\n"
)


def start_marked(
    command: Sequence[str] | str, mark: Mark, group: WorkerGroup | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a command like :class:`subprocess.Popen`, with a mark on the command and its descendants.

    A wrapper program sets the mark, enters the group, and becomes the command, with the same process id. Without mark
    and group, the command is started directly.

    Args:
        command: The command and its arguments.
        mark: The mark; empty for none.
        group: The cgroup of the command; None for that of this process.
        options: Options of :class:`subprocess.Popen`; ``executable`` and ``shell`` work through the wrapper, too.

    Returns:
        The process. A wrapper that cannot enter the group, or become the command, prints a message and exits with
        status 126 or 127.

    Raises:
        OSError: If the command cannot be started; see :func:`check_program`.
    """
    import subprocess

    if not mark and group is None:
        return subprocess.Popen(command, **options)
    arguments = [os.fspath(command)] if isinstance(command, (str, bytes, os.PathLike)) else list(command)
    program = options.pop("executable", None)
    if options.pop("shell", False):
        program, arguments = program or "/bin/sh", ["/bin/sh", "-c", *arguments]
    named = program in (None, arguments[0])
    where = options.get("env"), options.get("cwd")
    before = make_wrapper(program or arguments[0], mark, group, *where, named=named)
    return subprocess.Popen([*before, *arguments], **options)


def make_wrapper(
    program: str,
    mark: Mark,
    group: WorkerGroup | None,
    environ: Mapping[str, str] | None = None,
    directory: str | bytes | os.PathLike[Any] | None = None,
    *,
    named: bool = True,
) -> list[str]:
    """Return the words of a wrapper to mark a program and put the program into a cgroup; empty if not needed.

    The wrapper is ``prlimit(1)`` if that is installed and enough, without a group and with ``named``; else this
    interpreter, after the group's own words. The words go in front of the command's arguments, the first included.

    Args:
        program: The program.
        mark: The mark; empty for none. Give none if this process carries the mark already.
        group: The cgroup; None for none.
        environ: The environment whose ``PATH`` finds the program; that of this process if None.
        directory: The working directory of the program; that of this process if None.
        named: Whether the first argument is the program itself.

    Raises:
        OSError: If words are needed, and the program cannot be started: the wrapper would report that too late.
    """
    if not mark and group is None:
        return []
    check_program(program, environ, directory)  # else the wrapper would fail after the fork, with its own message
    if (tool := _prlimit()) and named and group is None:
        value = marks.limit(mark)
        return [tool, f"--locks={value}:{value}", "--"]
    there, path = ((), "") if group is None else (group.before, group.path)
    number = str(marks.limit(mark)) if mark else ""
    return [*there, sys.executable, "-I", "-S", "-c", _BECOME, number, path, os.fsdecode(program)]


@cache
def _prlimit() -> str | None:
    """Return the path of ``prlimit(1)``, searched for once; None if not installed."""
    import shutil

    return shutil.which("prlimit")


def check_program(
    program: str, environ: Mapping[str, str] | None = None, directory: str | bytes | os.PathLike[Any] | None = None
) -> None:
    """Raise the error of :class:`subprocess.Popen` if a program does not exist, or is not executable.

    Other obstacles, such as an unknown file format, are not noticed.

    Args:
        program: The program; a name without a slash is searched for.
        environ: The environment whose ``PATH`` is searched; that of this process if None.
        directory: The directory for relative paths; the working directory if None.

    Raises:
        OSError: ENOENT if no such file exists, EACCES if none is an executable file.
    """
    name = os.fsdecode(program)
    paths = [""] if "/" in name else os.get_exec_path(environ)
    found = [os.path.join(os.fsdecode(directory or ""), path, name) for path in paths]
    if any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        return
    code = errno.EACCES if any(os.path.exists(path) for path in found) else errno.ENOENT
    raise OSError(code, os.strerror(code), name)


def require_program(
    program: str, environ: Mapping[str, str] | None = None, directory: str | bytes | os.PathLike[Any] | None = None
) -> None:
    """Check a program like :func:`check_program`, before a command waits for devices.

    Raises:
        CommandNotFoundError, CommandNotRunnableError: If the program does not exist, or is not executable.
    """
    try:
        check_program(program, environ, directory)
    except OSError as error:
        raise make_start_error(os.fsdecode(program), error) from error


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by a command with an environment, which also finds the program by its ``PATH``.

    SIGPIPE and SIGXFSZ get their default action, also if the command cannot be started. Call it in the main thread.

    Raises:
        CommandNotFoundError, CommandNotRunnableError: If the command cannot be started.
        ValueError: In another thread than the main one.
    """
    # Python ignores these two signals, and exec keeps a signal ignored.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        if not command[0]:  # a ValueError of execvpe
            check_program(command[0], environ)
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        raise make_start_error(command[0], error) from error


def make_start_error(program: str, error: OSError) -> CommandNotFoundError | CommandNotRunnableError:
    """Make the error of a failed start: not found if the file or a directory is missing, else not runnable."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CommandNotFoundError(f"the command {program!r} was not found", hint="check its name and PATH")
    reason = os.strerror(error.errno) if error.errno else str(error)
    message = f"the command {program!r} cannot be run: {reason}"
    return CommandNotRunnableError(message, hint="check that it is executable")


def fork_child(body: Callable[[], int]) -> int:
    """Run a function in a forked child, and return the child's process id at once; the caller reaps the child.

    No other code of the caller runs there, exit handlers included, and buffers of open files are not flushed.

    Args:
        body: The function; returns the exit status of the child. The child prints an exception on standard error.

    Raises:
        OSError: If no process can be made.
    """
    child = os.fork()
    if not child:
        os._exit(_run(body))
    return child


def start_helper(body: Callable[[int], int]) -> tuple[int, int]:
    """Start a child that the kernel kills with the calling thread, until the child calls :func:`process.live_on`.

    The caller reaps the child, and closes the descriptor.

    Args:
        body: As for :func:`fork_child`; called with the descriptor for a report.

    Returns:
        The process id, and the descriptor from which to read the report.

    Raises:
        OSError: If no process can be made, or no descriptor is free.
    """
    parent = os.getpid()
    report, reporting = os.pipe()

    def run() -> int:
        os.close(report)
        process.die_with_parent(parent)
        return body(reporting)

    try:
        return fork_child(run), report
    except OSError:
        os.close(report)
        raise
    finally:
        os.close(reporting)


def start_detached(body: Callable[[int], int]) -> tuple[bytes, int]:
    """Start a helper in a new session, and wait for the report or the exit.

    A helper that has reported runs on, and is not reaped; without :func:`process.live_on`, the kernel kills the helper
    with the calling thread. A helper that closes the descriptor without a report is awaited and reaped.

    Args:
        body: As for :func:`start_helper`; a report is one write of 64 bytes at most.

    Returns:
        The report and 0; if the helper exited without a report, nothing and the exit status: 128 plus the number of a
        signal that killed the helper.

    Raises:
        OSError: If no process can be made, or no descriptor is free.
    """

    def run(reporting: int) -> int:
        os.setsid()  # so that no terminal ends or stops the helper
        return body(reporting)

    child, report = start_helper(run)
    try:
        told = os.read(report, 64)  # returns at once if the helper dies: its end of the pipe is closed then
    finally:
        os.close(report)  # after an interrupt, the helper must not report to a caller that reads no more
    return (told, 0) if told else (b"", process.reap(child))


def _run(body: Callable[[], int]) -> int:
    """Call the function of a child, and return the exit status; print an exception on standard error.

    Returns:
        The result of the function; 130 after an interrupt, without a message; the error's own status after an
        AnyaccelError, with text and hint as message; 1 after any other exception, SystemExit included, with the
        traceback as message. A message that cannot be written is lost.
    """
    try:
        return body()
    except KeyboardInterrupt:
        return 130
    except AnyaccelError as error:
        told = "".join(f"anyaccel: {line}\n" for line in (str(error), *error.hint.splitlines()))
        status = error.exit_code
    except BaseException:  # noqa: BLE001 - the child must not go on as a second copy of the caller
        import traceback

        told, status = traceback.format_exc(), 1
    with contextlib.suppress(OSError):
        os.write(2, told.encode(errors="replace"))
    return status
