"""The supervisor: the process of a job, which outlives the terminal and the shell that started it.

It waits for the devices, starts the command, waits for its end and writes the record of :mod:`anyaccel_jobs.jobs`.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from functools import partial

from anyaccel.errors import AnyaccelError, LeaseCancelledError
from anyaccel.launcher import JOB_NAME, fork_child, start_detached, time_limit
from anyaccel.ledger import boot
from anyaccel.linux import (
    Teardown,
    combine_finds,
    describe_left,
    find_carriers,
    find_tree,
    list_descriptors,
    pid_namespace,
    process,
)
from anyaccel.linux import mark as marks
from anyaccel.model import replace

from anyaccel_jobs import jobs
from anyaccel_jobs.jobs import DependencyError, Job
from anyaccel_jobs.notifier import start_notifier

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel.linux import Visit

_ASKED = frozenset({signal.SIGTERM, signal.SIGINT})
"""Signals that cancel the job."""
_LOOK_SECONDS = 1.0


class Supervisor:
    """The supervisor's side of a job. Made by :func:`detach`, in the supervisor's process.

    Args:
        job: What is known of the job before it starts.
        report: Descriptor that tells the submitting process the job's number.
    """

    def __init__(self, job: Job, report: int) -> None:
        self.job = job
        self._report = report
        # Now, before there are devices: see start_notifier.
        self._notifier = start_notifier(job.notify) if job.notify else None

    def record(self, state: str, **known: Any) -> None:
        """Write the record of the job.

        The first call also detaches from the submitting process, and tells it the number.

        Args:
            state: ``waiting`` or ``running``.
            known: Attributes of the job that have changed.
        """
        if state == "running":
            known["started"] = time.time()
        self.job = replace(self.job, state=state, **known)
        if self.job.id:
            jobs.write(self.job)
        else:
            # Before the record: a process that died with its caller in between would leave a part of it, or a lost job.
            process.live_on()
            self.job = jobs.create(self.job)
            self._detach()

    def hold_back(self, grace: float) -> None:
        """Wait for earlier jobs and for the begin. The job is recorded as waiting meanwhile.

        Args:
            grace: Seconds between SIGTERM and SIGKILL, for the record.

        Raises:
            DependencyError: When a job that had to succeed did not.
        """
        if not (self.job.after or self.job.after_ok or self.job.begins):
            return
        self.record("waiting", grace=grace)
        for number in self.job.after:
            jobs.wait(jobs.find(number))
        for number in self.job.after_ok:
            jobs.check_success(jobs.wait(jobs.find(number)))
        while (left := (self.job.begins or 0.0) - time.time()) > 0:
            time.sleep(min(left, _LOOK_SECONDS))  # in steps: the clock may be set, and the machine may sleep

    def finish(self, status: int, *, state: str = "", reason: str = "") -> None:
        """Record the end of the job, unless there is no record yet.

        Args:
            status: Its exit status.
            state: ``cancelled`` or ``timeout``; empty for the state that follows from the exit status.
            reason: The error or the cancellation that ended the job; empty where the command's end did.
        """
        if self.job.id:
            if state == "timeout":
                jobs.append_line(time_limit.describe_timeout(self.job.time_limit or 0.0), self.job.log)
            state = state or ("failed" if status else "done")
            self.job = replace(self.job, state=state, status=status, reason=reason, ended=time.time())
            jobs.write(self.job)

    def supervise(
        self, become: Callable[[], int], mark: marks.Mark, limit: time_limit.TimeLimit | None = None
    ) -> tuple[int, str]:
        """Run a command in a child, and wait for its end.

        SIGTERM and SIGINT cancel the job: the command's process group gets SIGTERM, and so do its other processes once
        the command has ended; a second signal kills all of them. Orphans of the command become children of this
        process. That tells them from processes of other users that have copied the mark, and this process waits for its
        own only.

        Args:
            become: Called in the child, the leader of a process group; it replaces the child, or returns its status.
            mark: The mark of the job's lease; empty without one.
            limit: The time limit, after which the command gets SIGTERM, and SIGKILL after its grace; None for no limit.

        Returns:
            The exit status, and the state for :meth:`finish`.
        """
        with contextlib.suppress(OSError):
            process.adopt_orphans()
        # After adopt_orphans: a child that forks and exits at once must leave its child to this process.
        child = _start(become)
        status: int | None = None
        asked, state = False, ""
        everything = combine_finds(find_carriers([mark]), find_tree(dict([process.me()])))

        def find(tell: Visit) -> bool:
            def tell_its_own(pid: int, start: int) -> None:
                # What has left its process group is the command's to end.
                if status is not None or rest.killing or process.group_of(pid) == child:
                    tell(pid, start)

            return everything(tell_its_own)

        rest = Teardown(find, grace=math.inf)  # until the command has ended, its time is over, or a second signal comes
        tell = partial(jobs.append_line, path=self.job.log)
        countdown = time_limit.Countdown(limit, mark, tell)
        while True:
            # WNOWAIT leaves the zombie, so that the process id is not reused before reap() has read the
            # status.
            if status is None and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                status = process.reap(child)
                # The command has ended: its other processes get the rest of the grace.
                rest.allow(self.job.grace)
            process.reap_children([child] if status is None else ())
            if limit is not None and not countdown.step():
                countdown = time_limit.Countdown(None, mark, tell)
                rest.allow(0.0 if asked else limit.grace)
                asked, state = True, state or "timeout"
            pause = rest.step() if asked else None
            if status is not None and pause is None:
                self._tell(rest)
                return status, state
            pause = min(_LOOK_SECONDS if pause is None else pause, countdown.step())
            # The signals are blocked and taken here: no handler runs in the middle of a step.
            came = signal.sigtimedwait({*_ASKED, signal.SIGCHLD}, pause)
            if came is not None and came.si_signo in _ASKED:
                if asked:
                    rest.kill()
                asked, state = True, state or "cancelled"

    def _tell(self, rest: Teardown) -> None:
        """Name in the job's log the processes that were not ended."""
        told = "".join(f"anyaccel: {line}\n" for line in describe_left(rest, f"job {self.job.id}"))
        with contextlib.suppress(OSError):
            os.write(2, told.encode(errors="replace"))

    def _detach(self) -> None:
        """Close the caller's streams, and tell the caller the number of the job."""
        log = os.open(self.job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for descriptor, target in ((null, 0), (log, 1), (log, 2)):
            # From here on messages go to the log.
            os.dup2(descriptor, target)
        os.close(log)
        os.close(null)
        try:
            os.write(self._report, self.job.id.encode())
        except BrokenPipeError:  # the submitting process was ended: no user has seen the number
            jobs.remove(self.job)
            os._exit(1)
        os.close(self._report)
        if self._notifier is not None:
            os.write(self._notifier, self.job.id.encode())
            os.close(self._notifier)


class Cancelled(BaseException):
    """Raised in a supervisor when the job is cancelled before the command starts."""


def detach(
    body: Callable[[Supervisor], int],
    tell: Callable[[AnyaccelError, bool], object],
    **known: Any,
) -> tuple[Job | None, int]:
    """Run a function as a job, in a new process.

    The process keeps the standard streams until its first :meth:`Supervisor.record`, so that the caller's user sees
    earlier errors. Until then it dies with the caller.

    Args:
        body: Called in the process, with the supervisor; returns an exit status.
        tell: Called in the process with an error, and whether the job has a number by then.
        known: Attributes of the job that are known from the command line.

    Returns:
        The job and 0; None and the exit status if it ended before its first record.
    """
    jobs.trusted(jobs.directory())

    def supervised(report: int) -> int:
        pid, start = process.me()
        job = Job(
            id="", state="waiting", directory=_here(), created=time.time(), pid=pid, start=start, boot=boot(),
            host=os.uname().nodename, namespace=pid_namespace(), **known,
        )  # fmt: skip
        return _run(body, tell, Supervisor(job, report))

    told, status = start_detached(supervised)
    return (jobs.find(told.decode()), 0) if told else (None, status)


def _run(
    body: Callable[[Supervisor], int], tell: Callable[[AnyaccelError, bool], object], supervisor: Supervisor
) -> int:
    """Body of the supervisor's process."""
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # what a shell has a job in its background ignore
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _cancel)
    _close_inherited()
    process.set_name(JOB_NAME)
    try:
        return body(supervisor)
    except Cancelled:
        # 143 is 128 and SIGTERM, as a shell returns it.
        supervisor.finish(143, state="cancelled", reason="cancelled by 'anyaccel cancel', or SIGTERM")
        return 143
    except AnyaccelError as error:
        # Before the first record the user still sees standard error; later the message goes to the log.
        tell(error, bool(supervisor.job.id))
        supervisor.finish(
            error.exit_code,
            state="cancelled" if isinstance(error, (LeaseCancelledError, DependencyError)) else "",
            reason=str(error),
        )
        return error.exit_code
    except BaseException:
        supervisor.finish(1)
        raise


def _cancel(*_: object) -> None:
    raise Cancelled


def _close_inherited() -> None:
    """Close inherited descriptors: a reader of an inherited pipe would wait for this process."""
    for descriptor in list_descriptors():
        with contextlib.suppress(OSError):  # that of the listing itself
            if descriptor > 2 and os.get_inheritable(descriptor):  # noqa: PLR2004
                os.close(descriptor)


def _start(become: Callable[[], int]) -> int:
    """Start a child as leader of a process group.

    The signals of this process are blocked until :meth:`Supervisor.supervise` waits for them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ASKED, signal.SIGCHLD})

    def run() -> int:
        os.setpgid(0, 0)
        for number in _ASKED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_ASKED, signal.SIGCHLD})
        return become()

    child = fork_child(run)
    with contextlib.suppress(OSError):  # it has done so itself, or has ended
        os.setpgid(child, child)
    return child


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
