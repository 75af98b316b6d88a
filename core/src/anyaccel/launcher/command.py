"""Start a command that sees exactly the devices it was given."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial

from anyaccel.errors import CommandNotFoundError, CommandNotRunnableError, UsageError
from anyaccel.launcher.bind import Bind, bound, put
from anyaccel.launcher.environment import Group, WorkerEnvironment
from anyaccel.launcher.hold import take
from anyaccel.launcher.launch import Launch
from anyaccel.launcher.sandbox import Enforce, Sandbox, confines, sandbox_for
from anyaccel.launcher.start import becoming, check_program, start_marked
from anyaccel.launcher.time_limit import Countdown, TimeLimit, check_early
from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.linux.mark import Mark
from anyaccel.linux.teardown import GRACE_SECONDS, Teardown, find_all, find_carriers, find_tree
from anyaccel.vendors import close as close_vendors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from anyaccel.launcher.completed import Completed
    from anyaccel.ledger import OnWait

_LONGEST_WAIT = 60.0
"""Seconds; the machine may sleep meanwhile."""
_TO_TELL = 1.0
"""Seconds after which a line on standard error is waited for no more."""


def run(
    request: str | Sequence[str],
    command: Sequence[str] | str,
    *,
    machine: str | None = None,
    declare: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    wait: float | None = None,
    priority: int = 0,
    note: str = "",
    time: float | None = None,
    grace: float = GRACE_SECONDS,
    signal: str | None = None,
    on_wait: OnWait | None = None,
    cap: bool = False,
    bind: Bind = None,
    memory: int | str | None = None,
    enforce: Enforce = False,
    **options: Any,
) -> Completed:
    """Run a command on accelerators and wait for it.

    Args:
        request: What it needs, such as ``"GPU:2"`` or ``["GPU:1", "TPU:4"]``.
        command: The command and its arguments; a string with ``shell=True``.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name whatever is found; see :func:`anyaccel.declare`.
        environ: The environment to start from; that of this process when None.
        wait: Seconds to wait for the devices; 0 to take what is free now or fail, None to wait as long as it takes.
        priority: The higher, the earlier.
        note: What it is for, for people to read.
        time: Seconds for which it may run at most; then it is ended with all that it started, which is told on
            standard error. See :func:`anyaccel.acquire`.
        grace: Seconds between SIGTERM and SIGKILL when its time is over.
        signal: A signal to send before its time is over, such as ``"USR1@60s"``: 60 seconds before, to each process
            of the command that catches it.
        on_wait: As of :func:`anyaccel.acquire`: by default, one sentence on standard error says that it waits.
        cap: Whether PyTorch and TensorFlow are capped at the command's share of memory as well.
        bind: Whether the command runs on the processors that are nearest to its devices, as far as the machine tells;
            None for whole devices.
        memory: How much of the host's memory the kernel leaves the command and all that it starts, without swap: bytes,
            or a text such as ``"8GiB"``. A share of a device is held to its memory likewise where the kernel can.
        enforce: Whether the kernel refuses the command the device nodes of all other devices: True to insist, ``"try"``
            to do without where the kernel cannot. Do not combine it with a ``preexec_fn`` that ties the command's life
            to its parent's.
        options: Further options of :func:`subprocess.run`: ``cwd``, ``input``, ``capture_output``, ``text``,
            ``timeout``, ``check`` and so on.

    Returns:
        What :func:`subprocess.run` returns; its ``timed_out`` says whether ``time`` has ended the command.

    Raises:
        UsageError, RequestError, UnknownNameError: When the command or the request is wrong.
        NeverFitsError, NotFreeError, DeadlockError: When it cannot be served, or not in time.
        EnforcementError: When it must be confined, or held to ``memory``, and the kernel cannot.
        CommandNotFoundError, CommandNotRunnableError: When the command cannot be started.

    Examples:
        >>> program = "import anyaccel; print(anyaccel.current().devices[0].type)"
        >>> done = anyaccel.run("GPU:1", ["python3", "-c", program], machine="sim:H100:2", capture_output=True)
        >>> done.returncode, done.stdout.split()
        (0, [b'H100'])
    """
    program = _program(command, **options)
    given: object = grace  # what callers without a type checker may pass
    if not (isinstance(given, (int, float)) and given >= 0):
        raise UsageError(f"grace must be a number of seconds, 0 or more (got {grace!r:.60})")
    early = check_early(signal, time)
    confined = confines(enforce)
    terms: dict[str, Any] = {"wait": wait, "priority": priority, "note": note, "time": time, "confined": confined}
    terms["on_wait"] = on_wait
    where: dict[str, Any] = {"machine": machine, "declare": declare, "environ": environ}
    with take(request, marks.draw, cap=cap, bind=bind, memory=memory, limit=True, **where, **terms) as hold:
        sandbox = sandbox_for(hold.allocation, hold.launch.inventory, enforce=enforce)
        # The command has the descriptors and the mark: should this process die, the devices are the command's.
        options["pass_fds"] = (*hold.fds, *options.get("pass_fds", ()))
        options["env"] = dict(hold.environ)
        mark = hold.lease.mark if hold.lease else ()
        use, status = hold.usage(program), None
        ending = _Ending(TimeLimit.of(hold.lease, time, grace, early), mark)
        try:
            done = _complete(
                command if isinstance(command, str) else list(command),
                mark,
                sandbox,
                hold.launch.environment,
                ending,
                **options,
            )
            status = done.returncode
        except OSError as error:
            if error.filename not in (None, program):
                raise
            raise not_started(program, error) from error
        finally:
            if hold.lease:
                hold.lease.leave_to(mark)  # to what the command has left behind
                use.ended(status, timed_out=ending.timed_out)
        return done


def _program(command: Sequence[str] | str, *, shell: bool = False, **options: Any) -> str:
    """Check a command, before anybody waits for devices, and name its program.

    Raises:
        UsageError: When it is none, or an option of :func:`subprocess.run` makes no sense with it.
    """
    if not command or (isinstance(command, (str, bytes, os.PathLike)) and not shell):
        words = repr(command.split()) if command and isinstance(command, str) else "['python', 'train.py']"
        way_out = f"a list, such as {words:.200}, or a string with shell=True"
        raise UsageError(f"command must be {way_out} (got {command!r:.60})")
    if "env" in options:
        raise UsageError("env is made by anyaccel: give what it is to start from as environ")
    if options.get("input") is not None and options.get("stdin") is not None:
        raise UsageError("stdin and input are the same: give one of them")
    if options.get("capture_output") and (options.get("stdout"), options.get("stderr")) != (None, None):
        raise UsageError("capture_output says where stdout and stderr go: leave these out")
    return "sh" if isinstance(command, str) else os.fspath(command[0])


def _complete(
    command: list[str] | str,
    mark: Mark,
    sandbox: Sandbox | None,
    environment: WorkerEnvironment,
    ending: _Ending,
    *,
    check: bool = False,
    input: Any = None,  # noqa: A002 - as subprocess.run has it
    timeout: float | None = None,
    capture_output: bool = False,
    **options: Any,
) -> Completed:
    """What :func:`subprocess.run` does, with a process that carries a mark, is bound, confined, and ended in time."""
    import subprocess

    from anyaccel.launcher.completed import Completed

    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    popen = partial(start_marked, command, mark, environment.group, **options)
    with bound(environment.allocation.processors):
        started = popen() if sandbox is None else sandbox.start(popen)
    with started as running:
        ending.begin(running.pid)
        try:
            out, err = running.communicate(input, timeout=timeout)
        except BaseException as error:
            running.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                error.cmd = command  # without the program that marked it
            raise
        finally:
            ending.call_off()
    done = Completed(command, running.returncode, out, err)
    done.timed_out = ending.timed_out
    if check:
        done.check_returncode()
    return done


class _Ending:
    """Ends a command, and all that carries its mark, when its time is over: TERM, grace, KILL.

    Args:
        limit: The time limit; None for none.
        mark: The mark.

    Attributes:
        timed_out: Whether it has ended the command.
    """

    def __init__(self, limit: TimeLimit | None, mark: Mark) -> None:
        import threading

        self.timed_out = False
        self._limit = limit
        self._mark = mark
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, pid: int) -> None:
        """Watch over a process that carries the mark."""
        import threading

        if self._limit is not None:
            what = self._limit, pid, process.start_time(pid) or 0
            self._thread = threading.Thread(target=self._watch, args=what, name="anyaccel-time", daemon=True)
            self._thread.start()

    def call_off(self) -> None:
        """Take note that the command has ended; where its time was over, wait for the end of what it left behind."""
        self._ended.set()
        if self._limit is not None and self._thread is not None and self.timed_out:
            self._thread.join()
            _tell(self._limit.message)

    def _watch(self, limit: TimeLimit, pid: int, started: int) -> None:
        countdown = Countdown(limit, self._mark, self._tell_soon)
        while left := countdown.step():
            if self._ended.wait(min(left, _LONGEST_WAIT)):
                return
        self.timed_out = True

        Teardown(find_all(find_carriers([self._mark]), find_tree({pid: started})), grace=limit.grace).run()

    def _tell_soon(self, text: str) -> None:
        """Write a line to standard error; one that takes no more does not keep the command from its end."""
        import threading

        telling = threading.Thread(target=_tell, args=[text], name="anyaccel-time", daemon=True)
        telling.start()
        telling.join(_TO_TELL)


def _tell(text: str) -> None:
    """Write a line to standard error, if this program has one."""
    import sys

    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or the reader has gone
            print(f"anyaccel: {text}", file=sys.stderr, flush=True)


def replace_process(launch: Launch, command: Sequence[str], sandbox: Sandbox | None = None) -> NoReturn:
    """Become the command: terminal, signals, exit status and process id are its own from here on.

    Args:
        launch: What was prepared for it.
        command: The command and its arguments.
        sandbox: What it may not open; None when it is not confined.

    Raises:
        EnforcementError: When it cannot be confined.
        CommandNotFoundError, CommandNotRunnableError: When the command cannot be started.
    """
    close_vendors()  # nothing of ours is left beside the command
    if sandbox is not None:
        sandbox.apply()
    put(launch.environment.allocation.processors)
    environ = dict(launch.environment.values)
    become([*entering(command[0], launch.environment.group, environ), *command], environ)


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
        raise not_started(command[0], error) from error


def entering(program: str, group: Group | None, environ: Mapping[str, str]) -> list[str]:
    """What a command of this process begins with to be in a group from its first instruction on; empty for no group.

    Raises:
        CommandNotFoundError, CommandNotRunnableError: When there is a group, and the program cannot be run: else only
            what comes first would say so.
    """
    if group is None:
        return []
    try:
        check_program(program, environ)
    except OSError as error:
        raise not_started(program, error) from error
    return becoming(program, (), group)


def not_started(program: str, error: OSError) -> CommandNotFoundError | CommandNotRunnableError:
    """The error of a command that the kernel would not start."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CommandNotFoundError(f"the command {program!r} was not found; check its name and PATH")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return CommandNotRunnableError(f"the command {program!r} cannot be run: {reason}; check that it is executable")
