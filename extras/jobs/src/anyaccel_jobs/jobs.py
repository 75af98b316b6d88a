"""Jobs: commands that run without the terminal and the shell that started them, and their records.

There is no daemon: each job has a supervisor process (:mod:`anyaccel_jobs.supervisor`), which writes a record to a
directory of the user: ``$XDG_STATE_HOME/anyaccel/jobs``, or ``~/.local/state/anyaccel/jobs``. A job whose supervisor
ended without recording an end, because of SIGKILL or a reboot, is lost; as with every lease, its devices are free once
none of its processes runs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import signal
import stat
import time
from collections.abc import Mapping

from anyaccel.configuration import user_directory
from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import AnyaccelError, JobNotFoundError, JobStateError, LeaseNotFoundError, UsageError
from anyaccel.ledger import Ledger, boot
from anyaccel.linux import GRACE_SECONDS, pid_namespace, process, write_whole
from anyaccel.model import Value, decode, encode, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STATES = ("waiting", "running", "done", "failed", "timeout", "cancelled", "lost")
LIVE = ("waiting", "running")
"""States of jobs that have not ended."""

_RECORD, _LOG = "job.json", "log"
_LIMIT, _ROOM = 1 << 20, 1 << 16
_BLOCK = 512
"""Unit of the size on a disk, as ``stat(2)`` gives it."""
_TO_END = 10.0
_LOOK_SECONDS = 60.0
"""Longest wait for the end of a process: later its number may belong to another process."""
_NOT_WRITTEN = {"id": "", "here": True, "path": ""}
"""Attributes that are not written: they follow from the record's place and its reader."""


class DependencyError(AnyaccelError):
    """Raised when an earlier job, needed by another job, did not succeed."""

    code = "dependency"


class Job(Value):
    """Record of a job, written by the job's supervisor.

    Attributes:
        id: Number of the job, unique for its user.
        state: ``waiting`` for its devices, ``running``, ``done`` (exit status 0), ``failed`` (another), ``timeout``
            (its time limit has ended it), ``cancelled``, or ``lost``: its supervisor has ended without a word.
        request: The request for devices.
        note: Purpose of the job.
        command: The command and its arguments.
        arguments: The command line of ``anyaccel`` that submitted it.
        after: Jobs that must end before it starts.
        after_ok: Jobs that must succeed before it starts.
        begins: Time before which it does not start, in seconds since 1970; None for at once.
        notify: The user's command to run after its end; empty for none.
        directory: Its working directory.
        devices: Names of its devices, such as ``acme/3``.
        lease: Identity of its lease; empty before it has one, and for a job without devices.
        created: When it was submitted, in seconds since 1970; like the next two.
        started: When it got its devices; None before.
        ended: When it ended; None before, and for a lost job.
        status: Its exit status, 128 and the number of the signal that ended it; None before, and for a lost job.
        reason: The error, the cancellation, or the loss that ended it; empty where its command or its time limit did.
        job_log: Path of the job log of a sweep that has begun; empty for another job.
        commands: Number of commands of such a sweep.
        time_limit: Its time limit in seconds; None for no limit, and before it has its devices.
        grace: Seconds between SIGTERM and SIGKILL.
        pid: Process id of its supervisor.
        start: Start time of the supervisor, in ticks since the boot.
        boot: Tag of the boot during which it was submitted.
        host: Name of its machine.
        namespace: Number of the namespace of process ids.
        here: Whether it belongs to this machine and namespace; if not, its state is the last one that was written.
        path: Directory of its record and log.
    """

    id: str
    state: str
    request: str = ""
    note: str = ""
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    after_ok: tuple[str, ...] = ()
    begins: float | None = None
    notify: str = ""
    directory: str = ""
    devices: tuple[str, ...] = ()
    lease: str = ""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    status: int | None = None
    reason: str = ""
    job_log: str = ""
    commands: int = 0
    time_limit: float | None = None
    grace: float = GRACE_SECONDS
    pid: int = 0
    start: int = 0
    boot: str = ""
    host: str = ""
    namespace: int = 0
    here: bool = True
    path: str = ""

    @property
    def log(self) -> str:
        """Path of the job's output."""
        return f"{self.path}/{_LOG}"

    @property
    def live(self) -> bool:
        """Return whether the job waits or runs."""
        return self.state in LIVE

    @property
    def exit_status(self) -> int | None:
        """Exit status to show; None for a job without one, and for a job that was cancelled before it ran."""
        return None if self.state == "cancelled" and self.started is None else self.status

    @property
    def took(self) -> float | None:
        """Seconds for which the job has run; None for a job that did not start, or is lost."""
        if self.started is None or (self.ended is None and not self.live):
            return None
        return max(0.0, (self.ended or time.time()) - self.started)


def directory() -> str:
    """Return the directory of this user's jobs, which need not exist."""
    # Without HOME, as under cron or sudo, the password file knows the directory.
    own = {**os.environ, "HOME": os.environ.get("HOME") or _home()}
    return f"{user_directory('XDG_STATE_HOME', '.local/state', own)}/jobs"


def jobs(*, since: float = 0.0) -> tuple[Job, ...]:
    """Return the jobs of this user, oldest first, without records that are damaged or belong to another user.

    Args:
        since: Leave out jobs that ended before, in seconds since 1970. Lost jobs are never left out.

    Raises:
        JobStateError: When the directory belongs to another user, or other users may write to it.
    """
    path = directory()
    return tuple(job for number in _list_numbers(path) if (job := _read(f"{path}/{number}", since)))


def _list_numbers(path: str) -> list[int]:
    """Return the numbers of the jobs in a directory, in order; none if the directory is missing.

    Raises:
        JobStateError: When the directory belongs to another user, or other users may write to it.
    """
    return sorted(int(name) for name in os.listdir(path) if is_id(name)) if trusted(path) else []


def active_jobs() -> tuple[Job, ...]:
    """Return the jobs of this user that wait or run on this machine.

    A directory that cannot be trusted counts as empty: 'anyaccel jobs' reports it.
    """
    try:
        return tuple(job for job in jobs(since=math.inf) if job.live and job.here)
    except AnyaccelError:
        return ()


def list_ids(**_: object) -> list[str]:
    """Return the numbers of all jobs of this user, for a shell that completes a command line."""
    return [str(number) for number in _list_numbers(directory())]  # no record is read: there may be thousands


def find(job_id: str) -> Job:
    """Return a job by number.

    Raises:
        JobNotFoundError: When there is no such job.
        JobStateError: When the directory cannot be trusted.
    """
    path = directory()
    job = _read(f"{path}/{int(job_id)}") if is_id(job_id) and trusted(path) else None
    if job is None:
        raise JobNotFoundError(f"there is no job {job_id!r} in {path}", hint="'anyaccel jobs --all' lists your jobs")
    return job


def is_id(text: str) -> bool:
    """Return whether a text can be a job's number; identities of leases and tickets are longer."""
    return text.isascii() and text.isdigit() and len(text) < 10  # noqa: PLR2004


def wait(job: Job, *, timeout: Duration | None = None) -> Job:
    """Wait until a job and the supervisor have ended: the devices are freed with the supervisor.

    Args:
        job: The job.
        timeout: Longest wait; None for no limit.

    Returns:
        The job's new record; it is still live after the timeout.

    Raises:
        UsageError: When it belongs to another machine.
    """
    check_here(job)
    seconds = read_seconds("timeout", timeout, least=-math.inf)
    until = math.inf if seconds is None else time.monotonic() + seconds
    job = _again(job)
    while (job.live or not process.gone(job.pid, job.start)) and (left := until - time.monotonic()) > 0:
        # The record is read again after each wait: a supervisor writes it before it ends.
        process.wait_for_end([job.pid], min(left, _LOOK_SECONDS))
        job = _again(job)
    return job


def cancel(job: Job, *, grace: Duration | None = None) -> Job:
    """End a job with every process, or cancel the wait for devices.

    Processes get SIGTERM, and SIGKILL after the grace. Processes that a lost job left running with its devices are
    ended, too.

    Args:
        job: The job.
        grace: Time between SIGTERM and SIGKILL; None for that of the job.

    Returns:
        The job's new record.

    Raises:
        UsageError: When it belongs to another machine.
        AnyaccelError: When its processes do not end.
    """
    check_here(job)
    job = _again(job)
    to_end = read_seconds("grace", job.grace if grace is None else grace)
    if job.live:
        # The first signal asks the command to end, the second one kills.
        for seconds in (to_end, _TO_END):
            if not _ask(job):
                break
            job = wait(job, timeout=seconds)
            if not job.live:
                return job
        job = _again(job)
        if job.live:
            raise AnyaccelError(
                f"job {job.id} does not end: process {job.pid} supervises it",
                hint=f"'kill -KILL {job.pid}' gives it up; 'anyaccel cancel {job.id}' then ends what is left of it",
            )
    # A lease of an earlier boot has ended with that boot.
    if job.state == "lost" and job.lease and job.boot == boot():
        # The lease may have ended in the meantime.
        with contextlib.suppress(LeaseNotFoundError):
            Ledger.open().end_lease(job.lease, grace=to_end, force=True)
    return job


def create(job: Job) -> Job:
    """Assign a number and a directory to a job, and write the record.

    Raises:
        JobStateError: When no trusted directory for jobs can be made, or the record cannot be written.
    """
    path = directory()
    _make(path)
    try:
        return _create(job, path)
    except OSError as error:
        raise JobStateError(
            f"the job cannot be recorded in {path}: {error.strerror}",
            hint="make room there, or set XDG_STATE_HOME to another place of your own",
        ) from error


def _create(job: Job, path: str) -> Job:
    """Assign a number and a directory to a job, and write the record; OSError passes, and leaves no directory."""
    # Numbers count up, so that a number in a shell history never means a later job.
    number = 1 + max(_list_numbers(path), default=0)
    while True:
        try:
            # mkdir is exclusive: of two jobs submitted at once each gets a number of its own.
            os.mkdir(f"{path}/{number}", 0o700)
        except FileExistsError:  # another job has it since
            number += 1
        else:
            break
    job = replace(job, id=str(number), path=f"{path}/{number}")
    try:
        write(job)
    except OSError:
        os.rmdir(job.path)
        raise
    return job


def write(job: Job) -> None:
    """Write the record of a job. On a full disk, which the job may have filled, the old record is overwritten.

    Raises:
        OSError: When the record cannot be written; the old one stays.
    """
    path, text = f"{job.path}/{_RECORD}", json.dumps(encode(replace(job, **_NOT_WRITTEN)))
    try:
        write_whole(path, text, mode=0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _overwrite(path, text.encode()):
            raise


def _overwrite(path: str, data: bytes) -> bool:
    """Overwrite a file in the space that it has.

    Returns:
        False, with the file unchanged, if there is no such file, or the data need more space.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or len(data) > found.st_blocks * _BLOCK:
            return False
        os.pwrite(descriptor, data.ljust(found.st_size), 0)  # blanks after JSON say nothing
    finally:
        os.close(descriptor)
    return True


def remove(job: Job) -> None:
    """Remove the record, the log and the directory of a job."""
    with contextlib.suppress(OSError):
        os.unlink(f"{job.path}/{_RECORD}")
        os.unlink(job.log)
        os.rmdir(job.path)


def _read(path: str, since: float = 0.0) -> Job | None:
    """Read a record as :func:`_read_record` does. A live job without a supervisor is lost."""
    job = _read_record(path, since)
    if job is None or not (job.here and job.live) or _supervised(job):
        return job
    job = _read_record(path)  # the last word may have come right before the end
    return _lost(job) if job is not None and job.live else job


def _ended_before(words: Mapping[str, Any], since: float) -> bool:
    """Return whether a record that was not checked yet says that its job ended before a time.

    A check of all values takes three times as long as the parsing, and most jobs have ended long ago.

    Raises:
        TypeError: When a time in it is no number.
    """
    ended = words.get("ended") or words.get("started") or words.get("created") or 0.0
    return words.get("state") not in LIVE and ended < since


def _lost(job: Job) -> Job:
    """Return the record of a job whose supervisor has ended without a word."""
    reason = "its supervisor was killed" if job.boot == boot() else "the machine was rebooted"
    return replace(job, state="lost", reason=reason)


def _read_record(path: str, since: float = 0.0) -> Job | None:
    """Read a record; None if it does not exist, is damaged, belongs to another user, or ended before ``since``."""
    try:
        # O_NOFOLLOW and O_NONBLOCK: a link or a FIFO in place of the record must neither be followed nor
        # block.
        descriptor = os.open(f"{path}/{_RECORD}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > _LIMIT:
            return None
        # With room, as a full disk makes a writer lengthen a record in its place; not with room for the longest record:
        # the kernel would have to map so much for each of thousands.
        words = json.loads(os.read(descriptor, found.st_size + _ROOM))
        words = {**words, "id": os.path.basename(path), "path": path, "here": True}
        job = None if _ended_before(words, since) else decode(Job, words)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    if job is None or job.state not in STATES:
        return None
    # The home directory may be shared between machines and containers.
    if (job.host, job.namespace) != (os.uname().nodename, pid_namespace()):
        return replace(job, here=False)
    return job


def _again(job: Job) -> Job:
    return _read(job.path) or replace(job, state="lost", reason="its record is gone")


def _supervised(job: Job) -> bool:
    """Return whether the supervisor of a record still runs."""
    return job.boot == boot() and not process.gone(job.pid, job.start) and process.user(job.pid) == os.getuid()


def _ask(job: Job) -> bool:
    """Send SIGTERM and SIGCONT to a job's supervisor; return whether the supervisor exists."""
    # A stopped supervisor handles SIGTERM once SIGCONT has come.
    return _supervised(job) and all(process.send(job.pid, job.start, each) for each in (signal.SIGTERM, signal.SIGCONT))


def append_line(text: str, path: str) -> None:
    """Append a line with the prefix ``anyaccel:`` to a log; an unfinished line before gets a line break.

    Errors are ignored: a log that is missing, or is a link, gets no line.
    """
    # O_NOFOLLOW: the log is in a directory to which the job itself can write.
    with contextlib.suppress(OSError):
        log = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(log).st_size
            if size and os.pread(log, 1, size - 1) != b"\n":
                os.write(log, b"\n")
            os.write(log, f"anyaccel: {text}\n".encode(errors="replace"))
        finally:
            os.close(log)


def check_success(job: Job) -> None:
    """Check a job that has ended, and that has to succeed before another one starts.

    Raises:
        DependencyError: When it did not succeed.
    """
    if job.state != "done":
        raise DependencyError(
            f"job {job.id} did not succeed ({job.state}), and this job needs its success",
            hint=f"'anyaccel redo {job.id}' runs it again; --after does not ask for its success",
        )


def check_here(job: Job) -> None:
    """Check that a job belongs to this machine and this namespace of processes.

    Raises:
        UsageError: When it does not.
    """
    if not job.here:
        raise UsageError(
            f"job {job.id} belongs to {job.host}, or to another container there; this is {os.uname().nodename}",
            hint="give the command where the job runs",
        )


def trusted(path: str) -> bool:
    """Return whether the directory of jobs exists.

    Raises:
        JobStateError: When other users own it or may write to it.
    """
    try:
        found = os.stat(path)
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise JobStateError(
            f"{path} is not used for jobs: it must be a directory of this user's own that other users cannot write to",
            hint="set XDG_STATE_HOME, or HOME, to a place of your own (sudo keeps them from the user before: sudo -H)",
        )
    return True


def _make(path: str) -> None:
    """Make the directory of jobs.

    Raises:
        JobStateError: When it cannot be made, or other users may write to it.
    """
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise JobStateError(
            f"{path}, where jobs lie, cannot be made: {reason}", hint="set XDG_STATE_HOME to a place of your own"
        ) from error
    trusted(path)


def _home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"
