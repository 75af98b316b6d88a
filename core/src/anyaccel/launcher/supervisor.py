"""The supervisor: the process of a job, which outlives the terminal and the shell that started it.

It waits for the devices, starts the command, waits for its end and writes down what happened; see
:mod:`anyaccel.launcher.jobs` for who reads that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from anyaccel.errors import AnyaccelError, LeaseCancelledError
from anyaccel.launcher import jobs
from anyaccel.launcher.jobs import Job
from anyaccel.launcher.signals import GRACE_SECONDS, reap, signal_group
from anyaccel.ledger import process
from anyaccel.ledger.mark import Mark
from anyaccel.ledger.names import boot
from anyaccel.ledger.record import pid_namespace
from anyaccel.ledger.teardown import Teardown, find_carriers, tell_left
from anyaccel.model import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "anyaccel-job"
"""What lists of processes call a supervisor."""

_ASKED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGALRM})
"""Signals by which a supervisor is asked to end the command."""
_LOOK_SECONDS = 1.0


class Supervisor:
    """What a supervisor knows of its job, and writes down. Made by :func:`detach`, in that process.

    Args:
        job: What is known of the job.
        report: Descriptor on which whoever submits it waits for its number.
    """

    def __init__(self, job: Job, report: int) -> None:
        self.job = job
        self._report = report

    def begin(self, state: str, **known: Any) -> None:
        """Write the job down and tell its number to whoever submits it; from then on nothing of the caller is in use.

        Called a second time, it writes down what has changed.

        Args:
            state: ``waiting`` or ``running``.
            known: Attributes of the job that are known by now.
        """
        if state == "running":
            known["started"] = time.time()
        self.job = replace(self.job, state=state, **known)
        if self.job.id:
            jobs.write(self.job)
        else:
            self.job = jobs.create(self.job)
            self._detach()

    def end(self, status: int, *, cancelled: bool = False) -> None:
        """Write down how the job has ended; does nothing for one that never began.

        Args:
            status: Its exit status.
            cancelled: Whether somebody ended it.
        """
        if self.job.id:
            state = "cancelled" if cancelled else "failed" if status else "done"
            self.job = replace(self.job, state=state, status=status, ended=time.time())
            jobs.write(self.job)

    def supervise(self, become: Callable[[], int], mark: Mark, seconds: float | None = None) -> tuple[int, bool]:
        """Run a function that becomes the command in a child, and wait for its end.

        SIGTERM and SIGINT are passed on to the command's process group and mean that the job is cancelled; the second
        one kills all that it has started. Orphans of the command become children of this process, which tells them from
        other users' processes that have copied the mark; it waits for these no longer than for its own.

        Args:
            become: Called in the child, the leader of a process group; it replaces the child, or returns its status.
            mark: The mark of the job's lease; empty where there is none.
            seconds: Time after which the command is asked to end, and killed after a while; None for no limit.

        Returns:
            The exit status, and whether the job was cancelled.
        """
        with contextlib.suppress(OSError):
            process.adopt_orphans()
        child = _start(become)
        status, told, cancelled = None, 0, False
        rest, pause = Teardown(find_carriers([mark]), grace=GRACE_SECONDS), _LOOK_SECONDS
        signal.setitimer(signal.ITIMER_REAL, seconds or 0.0, GRACE_SECONDS)
        while True:
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) if status is None else None
            if ended is not None:
                if told > 1:
                    signal_group(child, signal.SIGKILL)  # before it is reaped
                status = reap(child)
            _reap_orphans(child)
            if status is not None:
                left = rest.step() if told else None
                if left is None:
                    self._tell(rest)
                    return status, cancelled
                pause = left
            came = signal.sigtimedwait({*_ASKED, signal.SIGCHLD}, pause)
            if came is not None and came.si_signo in _ASKED:
                told += 1
                cancelled = cancelled or came.si_signo != signal.SIGALRM
                if status is None:
                    signal_group(child, signal.SIGTERM if told == 1 else signal.SIGKILL)
                if told > 1:
                    rest.kill()
                    rest.step()

    def _tell(self, rest: Teardown) -> None:
        """Name in the log of the job what was not ended with it."""
        told = "".join(f"anyaccel: {line}\n" for line in tell_left(rest, f"job {self.job.id}"))
        with contextlib.suppress(OSError):
            os.write(2, told.encode(errors="replace"))

    def _detach(self) -> None:
        """Let go of all that was the caller's, and tell it the number of the job."""
        log = os.open(self.job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for descriptor, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        os.close(log)
        os.close(null)
        process.live_on()
        try:
            os.write(self._report, self.job.id.encode())
        except BrokenPipeError:  # whoever submitted it was killed: nobody knows of it
            jobs.remove(self.job)
            os._exit(1)
        os.close(self._report)


class Cancelled(BaseException):
    """Raised in a supervisor when its job is cancelled before the command was started."""


def detach(
    body: Callable[[Supervisor], int],
    tell: Callable[[AnyaccelError, bool], object],
    *,
    request: str,
    command: Sequence[str],
    note: str = "",
) -> tuple[Job | None, int]:
    """Have a process of its own do something as a job.

    The process has the standard streams until it calls :meth:`Supervisor.begin`: what goes wrong before is the caller's
    to see. It dies with this process until then.

    Args:
        body: Called there, with the supervisor; returns an exit status.
        tell: Called there with what goes wrong, and whether the job had begun by then.
        request: What it asks for, for people to read.
        command: What it runs, for people to read.
        note: What it is for.

    Returns:
        The job and 0; None and the exit status where it ended before it began.
    """
    jobs.trusted(jobs.directory())

    def supervised(report: int) -> int:
        pid, start = process.me()
        job = Job(
            id="", state="waiting", request=request, command=tuple(command), note=note, directory=_here(),
            created=time.time(), pid=pid, start=start, boot=boot(), host=os.uname().nodename,
            namespace=pid_namespace(),
        )  # fmt: skip
        return _run(body, tell, Supervisor(job, report))

    told, status = apart(supervised)
    return (jobs.find(told.decode()), 0) if told else (None, status)


def apart(body: Callable[[int], int]) -> tuple[bytes, int]:
    """Run a function in a process of its own, in a session of its own, until it reports something or has ended.

    The process dies with this one, until it calls :func:`anyaccel.ledger.process.live_on`.

    Args:
        body: Called there, with the descriptor to which it writes its report; returns an exit status.

    Returns:
        The report and 0; nothing and the exit status where it ended without one.
    """
    parent = os.getpid()
    report, reporting = os.pipe()

    def run() -> int:
        os.close(report)
        process.die_with_parent(parent)
        os.setsid()  # no terminal ends or stops it any more
        return body(reporting)

    child = os.fork()
    if not child:
        os._exit(_status_of(run))
    os.close(reporting)
    told = os.read(report, 64)
    os.close(report)
    if told:
        return told, 0
    return b"", reap(child)


def _run(
    body: Callable[[Supervisor], int], tell: Callable[[AnyaccelError, bool], object], supervisor: Supervisor
) -> int:
    """What the process does that supervises a job."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # what a shell has a job in its background ignore
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _cancel)
    _close_inherited()
    process.set_name(NAME)
    try:
        return body(supervisor)
    except Cancelled:
        supervisor.end(143, cancelled=True)
        return 143
    except AnyaccelError as error:
        tell(error, bool(supervisor.job.id))
        supervisor.end(error.exit_code, cancelled=isinstance(error, LeaseCancelledError))
        return error.exit_code
    except BaseException:
        supervisor.end(1)
        raise


def _cancel(*_: object) -> None:
    raise Cancelled


def _close_inherited() -> None:
    """Close what the caller has open beside the standard streams: whoever reads it to the end must not wait for us."""
    for descriptor in process.descriptors():
        with contextlib.suppress(OSError):  # that of the listing itself
            if descriptor > 2 and os.get_inheritable(descriptor):  # noqa: PLR2004
                os.close(descriptor)


def _start(become: Callable[[], int]) -> int:
    """Run a function in a child that leads a process group; signals wait in this process until they are asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ASKED, signal.SIGCHLD})
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        for number in _ASKED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ASKED, signal.SIGCHLD})
        os._exit(_status_of(become))
    with contextlib.suppress(OSError):  # it has done so itself, or has ended
        os.setpgid(child, child)
    return child


def _status_of(function: Callable[[], int]) -> int:
    """Call what a child is for; the exit status where that returns or raises, which is told on standard error."""
    try:
        return function()
    except KeyboardInterrupt:
        return 130
    except AnyaccelError as error:
        told = "".join(f"anyaccel: {line}\n" for line in (str(error), *error.hint.splitlines()))
        status = error.exit_code
    except BaseException:  # noqa: BLE001 - it must not go on as a second caller
        import traceback

        told, status = traceback.format_exc(), 1
    with contextlib.suppress(OSError):
        os.write(2, told.encode(errors="replace"))
    return status


def _reap_orphans(child: int) -> None:
    """Reap the orphans that have ended, until the command has: that one is reaped when it is asked for."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == child:
                return
            os.waitpid(ended.si_pid, 0)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
