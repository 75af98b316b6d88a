"""Start a command that carries a mark, and is in a cgroup of its own where one was made, from its first instruction on.

A ``preexec_fn`` could see to both, but makes :mod:`subprocess` fork a parent that may be large and have threads. So a
small program does it and becomes the command: ``prlimit(1)`` for the mark alone, else this interpreter.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from anyaccel.errors import CommandNotFoundError, CommandNotRunnableError
from anyaccel.linux.mark import Mark, limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, NoReturn

    from anyaccel.launcher.environment import WorkerGroup

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
    """Start a command like :class:`subprocess.Popen`, so that it carries a mark with all that it starts.

    Args:
        command: The command and its arguments.
        mark: The mark; empty for none.
        group: The cgroup in which it is to run; None for that of this process.
        options: As of :class:`subprocess.Popen`.

    Raises:
        OSError: When the command cannot be started.
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
    before = prelude(program or arguments[0], mark, group, *where, named=named)
    return subprocess.Popen([*before, *arguments], **options)


def prelude(
    program: str,
    mark: Mark,
    group: WorkerGroup | None,
    environ: Mapping[str, str] | None = None,
    directory: str | None = None,
    *,
    named: bool = True,
) -> list[str]:
    """What stands before the arguments of a program, so that it is marked and in a group; empty where nothing must.

    Args:
        program: The program.
        mark: The mark; empty for none, or where it is on this process already.
        group: The cgroup; None for none.
        environ: The environment in which the program is looked for; that of this process when None.
        directory: Where it is started; where this process is when None.
        named: Whether its first argument is the program.

    Raises:
        OSError: When there is something to do, and the program cannot be started: else only what comes first would
            say so.
    """
    if not mark and group is None:
        return []
    check_program(program, environ, directory)
    if (tool := _prlimit()) and named and group is None:
        value = limit(mark)
        return [tool, f"--locks={value}:{value}", "--"]
    there, path = ((), "") if group is None else (group.before, group.path)
    number = str(limit(mark)) if mark else ""
    return [*there, sys.executable, "-I", "-S", "-c", _BECOME, number, path, os.fsdecode(program)]


@cache
def _prlimit() -> str | None:
    import shutil

    return shutil.which("prlimit")


def check_program(program: str, environ: Mapping[str, str] | None = None, directory: str | None = None) -> None:
    """Raise what :class:`subprocess.Popen` would raise for a program that cannot be started.

    Raises:
        OSError: When it is not there, or not executable.
    """
    name = os.fsdecode(program)
    paths = [""] if "/" in name else os.get_exec_path(environ)
    found = [os.path.join(directory or "", path, name) for path in paths]
    if any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        return
    code = errno.EACCES if any(os.path.exists(path) for path in found) else errno.ENOENT
    raise OSError(code, os.strerror(code), program)


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become a command, with this environment.

    Raises:
        CommandNotFoundError, CommandNotRunnableError: When it cannot be started.
    """
    # Python ignores these two, and what is ignored stays ignored in the command.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))
    except OSError as error:
        raise make_start_error(command[0], error) from error


def make_start_error(program: str, error: OSError) -> CommandNotFoundError | CommandNotRunnableError:
    """The error of a command that the kernel would not start."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CommandNotFoundError(f"the command {program!r} was not found; check its name and PATH")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return CommandNotRunnableError(f"the command {program!r} cannot be run: {reason}; check that it is executable")
