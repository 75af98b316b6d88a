"""Jobs: commands that go on without the terminal and the shell that started them, each with one process that keeps it.

There is no daemon. The keeper waits for the devices, starts the command, waits for its end and writes down what
happened, in a directory of the user's own: ``$XDG_STATE_HOME/anyaccel/jobs``, or ``~/.local/state/anyaccel/jobs``. A
job whose keeper has ended without a last word, by SIGKILL or a reboot, is lost; its devices are free once nothing that
it started runs any more, as with every lease.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence

from anyaccel.configuration import user_directory
from anyaccel.errors import AnyaccelError, JobNotFoundError, JobStateError, LeaseNotFoundError, UsageError
from anyaccel.ledger import Ledger, process
from anyaccel.ledger import mark as marks
from anyaccel.ledger.mark import Mark
from anyaccel.ledger.names import boot
from anyaccel.ledger.record import pid_namespace
from anyaccel.model import Value, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRACE_SECONDS = 10.0
"""Time between asking a job to end and killing it."""
STATES = ("waiting", "running", "done", "failed", "cancelled", "lost")
LIVE = ("waiting", "running")
"""States of jobs that have not ended."""

NAME = "anyaccel-job"
"""What lists of processes call a keeper."""

_RECORD, _LOG = "job.json", "log"
_LIMIT = 1 << 20
_LOOK = 0.05
_TO_END = 10.0


class Job(Value):
    """One job, as its keeper wrote it down.

    Attributes:
        id: Its number, which no other job of the user has.
        state: ``waiting`` for its devices, ``running``, ``done`` (exit status 0), ``failed`` (another), ``cancelled``,
            or ``lost``: its keeper has ended without a word.
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
        pid: Its keeper.
        start: Start time of the keeper, in ticks since the boot.
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


def directory(environ: Mapping[str, str] | None = None) -> str:
    """Where the jobs of this user lie; it need not exist.

    Args:
        environ: The environment, in which ``XDG_STATE_HOME`` may name another place; that of this process when None.
    """
    environ = os.environ if environ is None else environ
    own = {**environ, "HOME": environ.get("HOME") or _home()}
    return f"{user_directory('XDG_STATE_HOME', '.local/state', own)}/jobs"


def jobs(environ: Mapping[str, str] | None = None) -> tuple[Job, ...]:
    """The jobs of this user, oldest first; what is damaged or belongs to somebody else is left out.

    Raises:
        JobStateError: When the directory belongs to another user, or others may write to it.
    """
    path = directory(environ)
    if not _trusted(path):
        return ()
    numbers = sorted(int(name) for name in os.listdir(path) if name.isascii() and name.isdigit())
    return tuple(job for number in numbers if (job := _read(f"{path}/{number}")))


def find(job_id: str, environ: Mapping[str, str] | None = None) -> Job:
    """The job of this number.

    Raises:
        JobNotFoundError: When there is none.
        JobStateError: When the directory cannot be trusted.
    """
    path = directory(environ)
    job = _read(f"{path}/{int(job_id)}") if is_id(job_id) and _trusted(path) else None
    if job is None:
        raise JobNotFoundError(f"there is no job {job_id!r} in {path}", hint="'anyaccel jobs --all' lists your jobs")
    return job


def is_id(text: str) -> bool:
    """Whether a text can be the number of a job; identities of leases and tickets are longer."""
    return text.isascii() and text.isdigit() and len(text) < 10  # noqa: PLR2004


def wait(job: Job, *, timeout: float | None = None) -> Job:
    """Wait until a job has ended.

    Args:
        job: The job.
        timeout: Seconds to wait; None for as long as it takes.

    Returns:
        The job as it is then; it still lives when the time is over.

    Raises:
        UsageError: When it belongs to another machine.
    """
    _must_be_here(job)
    if job.live:
        try:
            keeper = os.pidfd_open(job.pid)
        except OSError:
            return _again(job)
        try:
            if _again(job).live:
                poll = select.poll()
                poll.register(keeper, select.POLLIN)
                poll.poll(None if timeout is None else timeout * 1000)
        finally:
            os.close(keeper)
    return _again(job)


def cancel(job: Job, *, grace: float = GRACE_SECONDS) -> Job:
    """End a job, and all that it has started.

    Its processes are asked to end (SIGTERM) and killed after a while. A job that waits leaves the line. What a lost job
    has left running with its devices is ended, too.

    Args:
        job: The job.
        grace: Seconds between asking and killing.

    Returns:
        The job as it is then.

    Raises:
        UsageError: When it belongs to another machine.
        AnyaccelError: When it does not end, or a lost one has left something running that does not.
    """
    _must_be_here(job)
    job = _again(job)
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
                f"job {job.id} does not end: process {job.pid} keeps it",
                hint=f"'kill -KILL {job.pid}' gives it up; 'anyaccel cancel {job.id}' then ends what is left of it",
            )
    if job.state == "lost" and job.lease and job.boot == boot():
        with contextlib.suppress(LeaseNotFoundError):
            Ledger.open().release_of(job.lease, grace=grace, force=True)
    return job


class Keeper:
    """The process that keeps a job: writes down what happens to it. Made by :func:`detach`, in that process.

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
        if self.job.id:
            self._write(state=state, **known)
            return
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
        self.job = replace(self.job, id=str(number), path=f"{path}/{number}")
        self._write(state=state, **known)
        self._detach()

    def end(self, status: int, *, cancelled: bool = False) -> None:
        """Write down how the job has ended; does nothing for one that never began.

        Args:
            status: Its exit status.
            cancelled: Whether somebody ended it.
        """
        if self.job.id:
            state = "cancelled" if cancelled else "failed" if status else "done"
            self._write(state=state, status=status, ended=time.time())

    def supervise(self, become: Callable[[], int], mark: Mark, seconds: float | None = None) -> tuple[int, bool]:
        """Run a function that becomes the command in a child, and wait for its end.

        SIGTERM and SIGINT are passed on to the command's process group and mean that the job is cancelled; the second
        one kills all that it has started.

        Args:
            become: Called in the child, the leader of a process group; it replaces the child, or returns its status.
            mark: The mark of the job's lease; empty where there is none.
            seconds: Time after which the command is asked to end, and killed after a while; None for no limit.

        Returns:
            The exit status, and whether the job was cancelled.
        """
        asked = {signal.SIGTERM, signal.SIGINT, signal.SIGALRM}
        signal.pthread_sigmask(signal.SIG_BLOCK, {*asked, signal.SIGCHLD})
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            for number in asked:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*asked, signal.SIGCHLD})
            os._exit(_status_of(become))
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(child, child)
        status, told, cancelled = None, 0, False
        signal.setitimer(signal.ITIMER_REAL, seconds or 0.0, GRACE_SECONDS)
        leftover = _Leftover(mark)
        while True:
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) if status is None else None
            if ended is not None:
                if told > 1:
                    _signal_group(child, signal.SIGKILL)  # before it is reaped: until then nobody else has its number
                os.waitpid(child, 0)
                status = ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
            if status is not None and (not told or not leftover.send(kill=told > 1)):
                return status, cancelled
            came = signal.sigtimedwait({*asked, signal.SIGCHLD}, 1.0 if status is None else _LOOK)
            if came is not None and came.si_signo in asked:
                told += 1
                cancelled = cancelled or came.si_signo != signal.SIGALRM
                if status is None:
                    _signal_group(child, signal.SIGTERM if told == 1 else signal.SIGKILL)
                    _signal_group(child, signal.SIGCONT)  # a stopped process hears only once it goes on
                if told > 1:
                    leftover.send(kill=True)

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
            self._remove()
            os._exit(1)
        os.close(self._report)

    def _remove(self) -> None:
        for name in (_RECORD, _LOG):
            with contextlib.suppress(OSError):
                os.unlink(f"{self.job.path}/{name}")
        with contextlib.suppress(OSError):
            os.rmdir(self.job.path)

    def _write(self, **changes: Any) -> None:
        """Write the record as a whole, so that readers see one or the other."""
        self.job = replace(self.job, **changes)
        path = self.job.path
        content = {name: getattr(self.job, name) for name in _KEPT}
        new = f"{path}/.{_RECORD}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, f"{path}/{_RECORD}")


class Cancelled(BaseException):
    """Raised in a keeper when its job is cancelled before the command was started."""


def detach(
    body: Callable[[Keeper], int], *, request: str, command: Sequence[str], note: str = ""
) -> tuple[Job | None, int]:
    """Have a process of its own do something as a job.

    The process has the standard streams until it calls :meth:`Keeper.begin`: what goes wrong before is the caller's to
    see. It dies with this process until then.

    Args:
        body: Called there, with the keeper; returns an exit status.
        request: What it asks for, for people to read.
        command: What it runs, for people to read.
        note: What it is for.

    Returns:
        The job and 0; None and the exit status where it ended before it began.
    """
    _trusted(directory())
    parent = os.getpid()
    report, reporting = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(report)
            status = _keep(body, reporting, parent, request=request, command=tuple(command), note=note)
        except (KeyboardInterrupt, SystemExit):
            status = 130
        finally:
            os._exit(status)
    os.close(reporting)
    told = os.read(report, 64).decode()
    os.close(report)
    if told:
        return find(told), 0
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None, status if status >= 0 else 128 - status


def _keep(body: Callable[[Keeper], int], reporting: int, parent: int, **known: Any) -> int:
    """What the process does that keeps a job."""
    process.die_with_parent(parent)
    os.setsid()  # no terminal ends or stops it any more
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # what a shell has a job in its background ignore
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _cancel)
    _close_inherited()
    process.set_name(NAME)
    pid, start = process.me()
    job = Job(
        id="", state="waiting", directory=_here(), created=time.time(), pid=pid, start=start, boot=boot(),
        host=socket.gethostname(), namespace=pid_namespace(), **known,
    )  # fmt: skip
    keeper = Keeper(job, reporting)
    try:
        return body(keeper)
    except Cancelled:
        keeper.end(143, cancelled=True)
        return 143
    except AnyaccelError as error:
        keeper.end(error.exit_code)
        raise
    except BaseException:
        keeper.end(1)
        raise


def _cancel(*_: object) -> None:
    raise Cancelled


def _close_inherited() -> None:
    """Close what the caller has open beside the standard streams: whoever reads it to the end must not wait for us."""
    for descriptor in process.descriptors():
        with contextlib.suppress(OSError):  # that of the listing itself
            if descriptor > 2 and os.get_inheritable(descriptor):  # noqa: PLR2004
                os.close(descriptor)


_KEPT = (
    "state", "request", "note", "command", "directory", "devices", "lease", "created", "started", "ended", "status",
    "pid", "start", "boot", "host", "namespace",
)  # fmt: skip
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("state", "request", "note", "directory", "lease", "boot", "host"), str),
    **dict.fromkeys(("pid", "start", "namespace"), int),
    **dict.fromkeys(("command", "devices"), list),
    "created": (int, float),
    **dict.fromkeys(("started", "ended"), (int, float, type(None))),
    "status": (int, type(None)),
}


def _read(path: str) -> Job | None:
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
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    if not isinstance(words, dict) or not all(isinstance(words.get(name), kind) for name, kind in _KINDS.items()):
        return None
    content: dict[str, Any] = {name: words[name] for name in _KEPT}
    content |= {name: tuple(map(str, words[name])) for name in ("command", "devices")}
    if content["state"] not in STATES:
        return None
    here = (words["host"], words["namespace"]) == (socket.gethostname(), pid_namespace())
    job = Job(id=os.path.basename(path), path=path, here=here, **content)
    return replace(job, state="lost") if here and job.live and not _kept(job) else job


def _again(job: Job) -> Job:
    return _read(job.path) or replace(job, state="lost")


def _kept(job: Job) -> bool:
    """Whether a job's keeper lives: the very process that wrote the record."""
    return job.boot == boot() and not process.gone(job.pid, job.start) and process.user(job.pid) == os.getuid()


def _ask(job: Job) -> bool:
    """Send SIGTERM to a job's keeper: never to a process that was given its number since."""
    try:
        keeper = os.pidfd_open(job.pid)
    except OSError:
        return False
    try:
        if not _kept(job):
            return False
        signal.pidfd_send_signal(keeper, signal.SIGTERM)
        signal.pidfd_send_signal(keeper, signal.SIGCONT)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(keeper)
    return True


def _must_be_here(job: Job) -> None:
    if not job.here:
        raise UsageError(
            f"job {job.id} belongs to {job.host}, or to another container there; this is {socket.gethostname()}",
            hint="give the command where the job runs",
        )


def _trusted(path: str) -> bool:
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
    _trusted(path)


def _status_of(become: Callable[[], int]) -> int:
    """Call what becomes the command; its exit status where that returns or raises, with a word in the log."""
    try:
        return become()
    except AnyaccelError as error:
        lines = [str(error), *error.hint.splitlines()]
        with contextlib.suppress(OSError):
            os.write(2, "".join(f"anyaccel: {line}\n" for line in lines).encode(errors="replace"))
        return error.exit_code
    except BaseException:  # noqa: BLE001 - it must not go on as a second keeper
        import traceback

        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode(errors="replace"))
        return 1


class _Leftover:
    """What carries a job's mark beside its keeper."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._asked: set[int] = set()

    def send(self, *, kill: bool) -> bool:
        """Ask each process to end, once, or kill it; whether there is any."""
        found = (marks.carriers({self._mark}) or {}).get(self._mark, ()) if self._mark else ()
        left = [pid for pid in found if pid != os.getpid()]
        for pid in left:
            if pid in self._asked and not kill:
                continue
            self._asked.add(pid)
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                try:
                    if marks.carries(pid, self._mark):  # it has not been given another's number since
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL if kill else signal.SIGTERM)
                finally:
                    os.close(descriptor)
        return bool(left)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _home() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"
