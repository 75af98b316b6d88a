"""Start a command that sees exactly the devices it was given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.launcher.environment import tell
from anyaccel.launcher.hold import DeviceLease, take
from anyaccel.launcher.start import make_start_error
from anyaccel.launcher.time_limit import Countdown, TimeLimit, check_early
from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.linux.mark import Mark
from anyaccel.linux.teardown import GRACE_SECONDS, Teardown, combine_finds, find_carriers, find_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Unpack

    from anyaccel.launcher.completed import Completed
    from anyaccel.launcher.options import RunOptions

_LONGEST_WAIT = 60.0
"""Seconds; the machine may sleep meanwhile."""
_TO_TELL = 1.0
"""Seconds after which a line on standard error is waited for no more."""


def run(request: str | Sequence[str], command: Sequence[str] | str, **options: Unpack[RunOptions]) -> Completed:
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
        options: ``avoid_busy``, ``unallocated`` and ``mask`` as of :func:`anyaccel.acquire`, and further options of
            :func:`subprocess.run`: ``cwd``, ``input``, ``capture_output``, ``text``, ``timeout``, ``check`` and so on.

    Returns:
        What :func:`subprocess.run` returns; its ``timed_out`` says whether ``time`` has ended the command.

    Raises:
        UsageError, RequestError, UnknownNameError: When the command or the request is wrong.
        UnknownOptionError: When there is no such option.
        NeverFitsError, NotFreeError, DeadlockError: When it cannot be served, or not in time.
        EnforcementError: When it must be confined, or held to ``memory``, and the kernel cannot.
        CommandNotFoundError, CommandNotRunnableError: When the command cannot be started.

    Examples:
        >>> program = "import anyaccel; print(anyaccel.current().devices[0].type)"
        >>> done = anyaccel.run("GPU:1", ["python3", "-c", program], machine="sim:H100:2", capture_output=True)
        >>> done.returncode, done.stdout.split()
        (0, [b'H100'])
    """
    from anyaccel.launcher.options import RunOptions, TakeOptions, check_options

    given: dict[str, Any] = {**options}
    program = _program(command, given)
    check_options("run", given, RunOptions.__annotations__)
    grace = given.pop("grace", GRACE_SECONDS)
    if not (isinstance(grace, (int, float)) and grace >= 0):
        raise UsageError(f"grace must be a number of seconds, 0 or more (got {grace!r:.60})")
    early = check_early(given.pop("signal", None), given.get("time"))
    terms: dict[str, Any] = {"bind": None}
    terms |= {name: given.pop(name) for name in TakeOptions.__annotations__ if name in given}
    with take(request, marks.draw, grouped=True, **terms) as hold:
        hold.begin_entry(program)
        mark = hold.lease.mark if hold.lease else ()
        ending = _Ending(TimeLimit.for_lease(hold.lease, terms.get("time"), grace, early), mark)
        status = None
        try:
            done = _complete(hold, command if isinstance(command, str) else list(command), ending, **given)
            status = done.returncode
        except OSError as error:
            if error.filename not in (None, program):
                raise
            raise make_start_error(program, error) from error
        finally:
            hold.finish_entry(status, timed_out=ending.timed_out)
        return done


def _program(command: Sequence[str] | str, options: Mapping[str, Any]) -> str:
    """Check a command, before anybody waits for devices, and name its program.

    Raises:
        UsageError: When it is none, or an option of :func:`subprocess.run` makes no sense with it.
    """
    if not command or (isinstance(command, (str, bytes, os.PathLike)) and not options.get("shell")):
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
    hold: DeviceLease,
    command: list[str] | str,
    ending: _Ending,
    *,
    check: bool = False,
    input: Any = None,  # noqa: A002 - as subprocess.run has it
    timeout: float | None = None,
    capture_output: bool = False,
    **options: Any,
) -> Completed:
    """What :func:`subprocess.run` does, with a process that is started by the plan of a hold, and ended in time."""
    import subprocess

    from anyaccel.launcher.completed import Completed

    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with hold.popen(command, **options) as running:
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
            tell(self._limit.message)

    def _watch(self, limit: TimeLimit, pid: int, started: int) -> None:
        countdown = Countdown(limit, self._mark, self._tell_soon)
        while left := countdown.step():
            if self._ended.wait(min(left, _LONGEST_WAIT)):
                return
        self.timed_out = True

        Teardown(combine_finds(find_carriers([self._mark]), find_tree({pid: started})), grace=limit.grace).run()

    def _tell_soon(self, text: str) -> None:
        """Write a line to standard error; one that takes no more does not keep the command from its end."""
        import threading

        telling = threading.Thread(target=tell, args=[text], name="anyaccel-time", daemon=True)
        telling.start()
        telling.join(_TO_TELL)
