"""Jobs: commands that go on without the terminal and the shell that started them, as their records tell of them.

There is no daemon: each job has a process of its own, its supervisor (:mod:`anyaccel_jobs.supervisor`), which
writes down what happens, in a directory of the user's own: ``$XDG_STATE_HOME/anyaccel/jobs``, or
``~/.local/state/anyaccel/jobs``. A job whose supervisor has ended without a last word, by SIGKILL or a reboot, is lost;
its devices are free once nothing that it started runs any more, as with every lease.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import stat
import time
from functools import partial

from anyaccel.configuration import user_directory
from anyaccel.errors import AnyaccelError, JobNotFoundError, JobStateError, LeaseNotFoundError, UsageError
from anyaccel.ledger import Ledger, boot
from anyaccel.linux import GRACE_SECONDS, pid_namespace, process, write_whole
from anyaccel.model import Value, decode, encode, replace

STATES = ("waiting", "running", "done", "failed", "timeout", "cancelled", "lost")
LIVE = ("waiting", "running")
"""States of jobs that have not ended."""

_RECORD, _LOG = "job.json", "log"
_LIMIT = 1 << 20
_TO_END = 10.0
_LOOK_SECONDS = 60.0
"""Longest wait for the end of a process: by then its number may be another process's."""
_NOT_WRITTEN = {"id": "", "here": True, "path": ""}
"""Attributes that follow from where a record lies and who reads it."""


class Job(Value):
    """One job, as its supervisor wrote it down.

    Attributes:
        id: Its number, which no other job of the user has.
        state: ``waiting`` for its devices, ``running``, ``done`` (exit status 0), ``failed`` (another), ``timeout``
            (its time limit has ended it), ``cancelled``, or ``lost``: its supervisor has ended without a word.
        request: What it asked for.
        note: What it is for.
        command: The command and its arguments.
        directory: Where it runs.
        devices: Names of the devices that it got, such as ``acme/3``.
        lease: Identity of its lease; empty before it has one, and where it takes none.
        created: When it was submitted, in seconds since 1970; like the next two.
        started: When it got its devices; None before.
        ended: When it ended; None before, and where nobody knows.
        status: Its exit status, 128 and the number of the signal that ended it; None before, and where nobody knows.
        time_limit: Seconds for which it may run; None for no limit, and before it has its devices.
        grace: Seconds between asking it to end and killing it.
        pid: Its supervisor.
        start: Start time of the supervisor, in ticks since the boot.
        boot: Tag of the boot in which it was submitted.
        host: Name of the machine on which it was.
        namespace: Number of the namespace of process ids.
        here: Whether it belongs to this machine and namespace; its state is what was written last where it does not.
        path: Directory of its record and of its log.
    """

    id: str
    state: str
    request: str = ""
    note: str = ""
    command: tuple[str, ...] = ()
    directory: str = ""
    devices: tuple[str, ...] = ()
    lease: str = ""
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    status: int | None = None
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
        """Path of what it has printed."""
        return f"{self.path}/{_LOG}"

    @property
    def live(self) -> bool:
        """Whether it waits or runs."""
        return self.state in LIVE

    @property
    def took(self) -> float | None:
        """Seconds that it has run; None where nobody knows."""
        if self.started is None or (self.ended is None and not self.live):
            return None
        return max(0.0, (self.ended or time.time()) - self.started)


def directory() -> str:
    """Where the jobs of this user lie; it need not exist, and ``XDG_STATE_HOME`` may name another place."""
    own = {**os.environ, "HOME": os.environ.get("HOME") or _home()}
    return f"{user_directory('XDG_STATE_HOME', '.local/state', own)}/jobs"


def jobs() -> tuple[Job, ...]:
    """The jobs of this user, oldest first; what is damaged or belongs to somebody else is left out.

    Raises:
        JobStateError: When the directory belongs to another user, or others may write to it.
    """
    path = directory()
    if not trusted(path):
        return ()
    numbers = sorted(int(name) for name in os.listdir(path) if name.isascii() and name.isdigit())
    return tuple(job for number in numbers if (job := _read(f"{path}/{number}")))


def active_jobs() -> tuple[Job, ...]:
    """Return the jobs of this user that wait or run on this machine.

    There are none where the directory of jobs cannot be trusted: 'anyaccel jobs' says so.
    """
    try:
        return tuple(job for job in jobs() if job.live and job.here)
    except AnyaccelError:
        return ()


def list_ids(**_: object) -> list[str]:
    """Return the numbers of all jobs of this user, for a shell that completes a command line."""
    return [job.id for job in jobs()]


def find(job_id: str) -> Job:
    """The job of this number.

    Raises:
        JobNotFoundError: When there is none.
        JobStateError: When the directory cannot be trusted.
    """
    path = directory()
    job = _read(f"{path}/{int(job_id)}") if is_id(job_id) and trusted(path) else None
    if job is None:
        raise JobNotFoundError(f"there is no job {job_id!r} in {path}", hint="'anyaccel jobs --all' lists your jobs")
    return job


def is_id(text: str) -> bool:
    """Whether a text can be the number of a job; identities of leases and tickets are longer."""
    return text.isascii() and text.isdigit() and len(text) < 10  # noqa: PLR2004


def wait(job: Job, *, timeout: float | None = None) -> Job:
    """Wait until a job has ended, and the process that supervises it: the devices go with that.

    Args:
        job: The job.
        timeout: Seconds to wait; None for as long as it takes.

    Returns:
        The job as it is then; it still lives when the time is over.

    Raises:
        UsageError: When it belongs to another machine.
    """
    _must_be_here(job)
    until = math.inf if timeout is None else time.monotonic() + timeout
    job = _again(job)
    while (job.live or not process.gone(job.pid, job.start)) and (left := until - time.monotonic()) > 0:
        process.wait_for_end([job.pid], min(left, _LOOK_SECONDS))
        job = _again(job)
    return job


def cancel(job: Job, *, grace: float | None = None) -> Job:
    """End a job, and all that it has started.

    Its processes are asked to end (SIGTERM) and killed after a while. A job that waits leaves the line. What a lost job
    has left running with its devices is ended, too.

    Args:
        job: The job.
        grace: Seconds between asking and killing; None for those that the job was given.

    Returns:
        The job as it is then.

    Raises:
        UsageError: When it belongs to another machine.
        AnyaccelError: When it does not end, or a lost one has left something running that does not.
    """
    _must_be_here(job)
    job = _again(job)
    grace = job.grace if grace is None else grace
    if job.live:
        for seconds in (grace, _TO_END):
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
    if job.state == "lost" and job.lease and job.boot == boot():
        with contextlib.suppress(LeaseNotFoundError):
            Ledger.open().end_lease(job.lease, grace=grace, force=True)
    return job


def create(job: Job) -> Job:
    """Give a job its number and its directory, and write it down.

    Raises:
        JobStateError: When there is no directory for jobs that can be trusted.
    """
    path = directory()
    _make(path)
    number = 1 + max((int(name) for name in os.listdir(path) if is_id(name)), default=0)
    while True:
        try:
            os.mkdir(f"{path}/{number}", 0o700)
        except FileExistsError:  # another job has it since
            number += 1
        else:
            break
    job = replace(job, id=str(number), path=f"{path}/{number}")
    write(job)
    return job


def write(job: Job) -> None:
    """Write the record of a job."""
    write_whole(f"{job.path}/{_RECORD}", json.dumps(encode(replace(job, **_NOT_WRITTEN))), mode=0o600)


def remove(job: Job) -> None:
    """Remove the record and the log of a job, and its directory."""
    with contextlib.suppress(OSError):
        os.unlink(f"{job.path}/{_RECORD}")
        os.unlink(job.log)
        os.rmdir(job.path)


def _read(path: str) -> Job | None:
    """Read a job of our own, which is lost where its supervisor has ended without a last word; None as of a record."""
    job = _read_record(path)
    if job is None or not (job.here and job.live) or _supervised(job):
        return job
    job = _read_record(path)  # the last word may have come right before the end
    return replace(job, state="lost") if job is not None and job.live else job


def _read_record(path: str) -> Job | None:
    """Read a record of our own; None where there is none, or it is damaged or another user's."""
    try:
        descriptor = os.open(f"{path}/{_RECORD}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > _LIMIT:
            return None
        words = json.loads(os.read(descriptor, _LIMIT))
        job = decode(Job, {**words, "id": os.path.basename(path), "path": path, "here": True})
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    if job.state not in STATES:
        return None
    if (job.host, job.namespace) != (os.uname().nodename, pid_namespace()):
        return replace(job, here=False)
    return job


def _again(job: Job) -> Job:
    return _read(job.path) or replace(job, state="lost")


def _supervised(job: Job) -> bool:
    """Whether a job's supervisor lives: the very process that wrote the record."""
    return job.boot == boot() and not process.gone(job.pid, job.start) and process.user(job.pid) == os.getuid()


def _ask(job: Job) -> bool:
    """Send SIGTERM to a job's supervisor, also when it is stopped: whether there is one."""
    still = partial(_supervised, job)
    return process.send(job.pid, signal.SIGTERM, still) and process.send(job.pid, signal.SIGCONT, still)


def _must_be_here(job: Job) -> None:
    if not job.here:
        raise UsageError(
            f"job {job.id} belongs to {job.host}, or to another container there; this is {os.uname().nodename}",
            hint="give the command where the job runs",
        )


def trusted(path: str) -> bool:
    """Whether there is a directory of jobs.

    Raises:
        JobStateError: When it is not ours alone.
    """
    try:
        found = os.stat(path)
    except OSError:
        return False
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise JobStateError(
            f"{path} is not used for jobs: it must be a directory of this user's own that nobody else may write to",
            hint="set XDG_STATE_HOME, or HOME, to a place of your own (sudo keeps them from the user before: sudo -H)",
        )
    return True


def _make(path: str) -> None:
    """Make the directory of jobs.

    Raises:
        JobStateError: When it cannot be made, or is not ours alone.
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
