"""Run a command with leased devices, and wait for the exit."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import UsageError
from anyaccel.launcher.environment import print_error
from anyaccel.launcher.hold import DeviceLease, take
from anyaccel.launcher.launch import RunOptions, TakeOptions, check_options
from anyaccel.launcher.start import make_start_error, require_program
from anyaccel.launcher.time_limit import Countdown, TimeLimit, check_early, describe_timeout, print_line
from anyaccel.linux import GRACE_SECONDS, Teardown, combine_finds, find_carriers, find_tree, process
from anyaccel.linux import mark as marks
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Unpack

_LONGEST_WAIT = 60.0
"""Seconds between two looks at the clock: the machine may sleep meanwhile."""


class Completed(subprocess.CompletedProcess[Any]):
    """A :class:`subprocess.CompletedProcess` with the outcome of the time limit.

    Attributes:
        timed_out: Whether the time limit ended the command, whatever its ``returncode`` is.
    """

    timed_out: bool = False


def run(request: str | Sequence[str], command: Sequence[str] | str, **options: Unpack[RunOptions]) -> Completed:
    """Run a command on accelerators and wait for the exit.

    Descendants of the command that still run then keep the devices until their own exit. The run goes into the journal,
    if one is kept.

    Args:
        request: The request, such as ``"GPU:2"`` or ``["GPU:1", "TPU:4"]``.
        command: The command and its arguments; a string with ``shell=True``.
        inventory: The machine's inventory, for programs that run many commands; if None, each call detects the machine,
            by means of the next two.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name; see :func:`anyaccel.declare`.
        environ: The environment to start from; that of this process if None.
        wait: Longest wait for the devices, in seconds or as a text such as ``"5m"``; 0 to take only what is free now,
            None for no limit.
        priority: A request of higher priority is served first.
        note: The purpose, shown to other users.
        time: Time limit, in seconds or as a text such as ``"1h30m"``. Then the command is ended with its descendants,
            and standard error says so, without an exception unless ``check`` refuses the exit status. Without effect
            for a request that falls back to the CPU. See :func:`anyaccel.acquire`.
        grace: Time between SIGTERM and SIGKILL at the time limit, in seconds or as a text.
        signal: A signal before the time limit, such as ``"USR1@60s"``: 60 seconds before, to each process of the
            command that catches the signal.
        on_wait: As for :func:`anyaccel.acquire`. By default, one sentence on standard error says that the call waits.
        cap: Whether PyTorch and TensorFlow are also capped at the command's share of memory.
        bind: Whether the command runs on the processors nearest to its devices, if the machine names them; None for
            whole devices only.
        memory: Limit of host memory for the command and its descendants, without swap: bytes, or a text such as
            ``"8GiB"``. A share of a device is limited to its memory likewise if the kernel can do so.
        enforce: Whether the kernel denies the command the device nodes of all other devices: True to insist, ``"try"``
            to go without if the kernel cannot. Do not combine it with a ``preexec_fn`` that ties the command's life to
            its parent's.
        options: ``avoid_busy``, ``unallocated`` and ``mask`` as for :func:`anyaccel.acquire`, and options of
            :func:`subprocess.run`: ``cwd``, ``input``, ``capture_output``, ``text``, ``timeout``, ``check`` and so on,
            but not ``env``: the environment is made from ``environ``.

    Returns:
        The result of :func:`subprocess.run`, with ``timed_out``: whether ``time`` ended the command.

    Raises:
        UsageError, RequestError, UnknownNameError: If the command, the request or the value of an option is invalid, if
            ``env`` is given, or if there is no such machine.
        UnknownOptionError: If there is no such option.
        NeverFitsError, NotFreeError, DeadlockError: If the request cannot be served, or not in time.
        LedgerError: If leases cannot be kept on this machine, or the request was cancelled.
        EnvConflictError, PluginError: If the environment cannot be made, or a vendor cannot change the devices.
        EnforcementError: If the kernel cannot apply ``enforce`` or ``memory``.
        CommandNotFoundError, CommandNotRunnableError: If the command cannot be started.
        OSError: If the start fails because of another file, such as a missing ``cwd``.
        subprocess.TimeoutExpired, subprocess.CalledProcessError: As for :func:`subprocess.run`.

    Examples:
        >>> program = "import anyaccel; print(anyaccel.current().devices[0].type)"
        >>> done = anyaccel.run("GPU:1", ["python3", "-c", program], machine="sim:H100:2", capture_output=True)
        >>> done.returncode, done.stdout.split()
        (0, [b'H100'])
    """
    given: dict[str, Any] = {**options}
    program = _check_command(command, given)
    check_options("run", given, RunOptions.__annotations__)
    for name in given.keys() & {"time", "timeout"}:
        given[name] = read_seconds(name, given[name])
    to_end: Duration = given.pop("grace", GRACE_SECONDS)
    grace = read_seconds("grace", to_end)
    early = check_early(given.pop("signal", None), given.get("time"))
    terms: dict[str, Any] = {"bind": None}  # whole devices are bound by default: the command is started by us
    terms |= {name: given.pop(name) for name in TakeOptions.__annotations__ if name in given}
    check = given.pop("check", False)
    if not given.get("shell"):
        require_program(given.get("executable") or program, terms.get("environ"), given.get("cwd"))
    with take(request, marks.draw, grouped=True, **terms) as lease:
        lease.begin_entry(program)
        limit = TimeLimit.for_lease(lease.lease, terms.get("time"), grace, early)
        ending = _TimedEnd(limit, lease.mark)
        status = None
        try:
            done = _complete(lease, command, ending, **given)
            status = done.returncode
        except OSError as error:
            if error.filename not in (None, program):  # such as a missing cwd: the error names it already
                raise
            raise make_start_error(program, error) from error
        finally:
            lease.finish_entry(status, timed_out=ending.timed_out)
    if check:
        done.check_returncode()
    return done


def _check_command(command: Sequence[str] | str, options: Mapping[str, Any]) -> str:
    """Check a command before the wait for devices; name the program: ``sh`` for a string, else the first word.

    Raises:
        UsageError: If there is no command, a string comes without ``shell=True``, ``env`` is given (``environ``
            takes its place), ``input`` comes with ``stdin``, or ``capture_output`` with ``stdout`` or ``stderr``.
    """
    text = isinstance(command, (str, bytes, os.PathLike))
    if not command or (text and not options.get("shell")) or not (text or isinstance(command, Sequence)):
        words = repr(command.split()) if command and isinstance(command, str) else "['python', 'train.py']"
        way_out = f"a list, such as {words:.200}, or a string with shell=True"
        raise UsageError(f"command must be {way_out} (got {shown(command)})")
    if "env" in options:
        raise UsageError("env is made by anyaccel: give what it is to start from as environ")
    if options.get("input") is not None and options.get("stdin") is not None:
        raise UsageError("stdin and input are the same: give one of them")
    if options.get("capture_output") and (options.get("stdout"), options.get("stderr")) != (None, None):
        raise UsageError("capture_output says where stdout and stderr go: leave these out")
    return "sh" if text else os.fsdecode(command[0])


def _complete(
    lease: DeviceLease,
    command: Sequence[str] | str,
    ending: _TimedEnd,
    *,
    input: Any = None,  # noqa: A002 - as subprocess.run has it
    timeout: float | None = None,
    capture_output: bool = False,
    **options: Any,
) -> Completed:
    """Run a command like :func:`subprocess.run`, by the plan and the time limit of a lease.

    ``input`` replaces ``stdin``, and ``capture_output`` replaces ``stdout`` and ``stderr``, without an error.

    Returns:
        The outcome; ``timed_out`` tells whether ``ending`` ended the command at the time limit of the lease.

    Raises:
        OSError: If the command cannot be started.
        EnforcementError: If the command cannot be confined.
        subprocess.TimeoutExpired: After ``timeout``; the command, without its descendants, is killed, as by any
            exception.
        RuntimeError: If no thread can be started for the time limit; the command is killed.
    """
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with lease.popen(command, **options) as running:
        try:
            ending.begin(running.pid)
            out, err = running.communicate(input, timeout=timeout)
        except BaseException as error:
            running.kill()  # as subprocess.run() does, also after an interrupt
            if isinstance(error, subprocess.TimeoutExpired):
                error.cmd = command  # without the program that put the mark on the command
            raise
        finally:
            ending.finish()
    done = Completed(command, running.returncode, out, err)
    done.timed_out = ending.timed_out
    return done


class _TimedEnd:
    """Ends a command and every carrier of the mark at the time limit: SIGTERM, grace, SIGKILL.

    A thread does so. A loop of ``communicate(timeout=...)`` could not: after a timeout, Python 3.11 to 3.13 loses the
    input that the command has not read yet.

    Args:
        limit: The time limit; None for none.
        mark: The mark of the command.

    Attributes:
        timed_out: Whether the time limit ended the command.
    """

    def __init__(self, limit: TimeLimit | None, mark: marks.Mark) -> None:
        self.timed_out = False
        self._limit = limit
        self._mark = mark
        self._exited = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, pid: int) -> None:
        """Start to watch the command with a process id, in a thread; does nothing without a time limit."""
        if self._limit is not None:
            what = self._limit, pid, process.start_time(pid) or 0
            self._thread = threading.Thread(target=self._watch, args=what, name="anyaccel-time", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Stop watching, after the exit of the command or an error; the watching thread ends soon after the return.

        If the time limit ended the command, wait for the teardown of the descendants, too, and print the message about
        the limit.
        """
        self._exited.set()
        if self._limit is not None and self._thread is not None and self.timed_out:
            self._thread.join()
            print_error(describe_timeout(self._limit.seconds))

    def _watch(self, limit: TimeLimit, pid: int, started: int) -> None:
        """Send the early signal in time; at the limit, set :attr:`timed_out` and end the processes.

        Return early if :meth:`finish` is called before the limit; later the teardown goes on to its end.
        """
        countdown = Countdown(limit, self._mark, print_line)
        while left := countdown.step():
            if self._exited.wait(min(left, _LONGEST_WAIT)):
                return
        self.timed_out = True
        Teardown(combine_finds(find_carriers([self._mark]), find_tree({pid: started})), grace=limit.grace).run()
