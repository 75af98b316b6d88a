"""Entries of the state directory: files that their makers lock, and others test and read; and why a lease is active.

A lease is active by its lock, its process, its mark, or its tenure. No process holds the lock of a lease on behalf of
other processes, which outlives the program that took it. The body of its files has a tenure instead: the lease is
active until a moment that its program postpones from time to time, and beyond that while a named control group has
processes. Every process can judge a tenure, so a program that is killed, stopped or upgraded frees nothing that others
still use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterable
from enum import Enum

from anyaccel._typing import NamedTuple, TypeVar
from anyaccel.errors import UsageError
from anyaccel.ledger.names import LeaseName, boot, hidden_name, parse_hidden
from anyaccel.linux import mark as marks
from anyaccel.linux import process
from anyaccel.linux.groups import is_populated
from anyaccel.model import Value, replace
from anyaccel.text import elapsed, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_Value = TypeVar("_Value", bound=Value)
BODY_LIMIT = 4096
_TEXT_LIMIT = 250  # so that all of it stays below the limit of a body
# Files belong to other users: no symbolic link is followed, and opening a FIFO must not block.
_LOOKING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100  # each with a new name, which a hostile process would have to find and lock in time


class Life(Enum):
    """Reason why a lease is active."""

    HELD = "held"
    """The lock is held, or may be."""
    LEAVING = "leaving"
    """The lock is free, but the process has not left the kernel yet: its devices may still be open."""
    KEPT = "kept"
    """The lock is free and the process gone, but a process that was started with the lease lives, or may live."""
    ON_BEHALF = "on behalf"
    """No process holds the lock, but the tenure of the lease lasts."""


class LockedFile:
    """A file of this process: made under a hidden name, locked, written, and then renamed to the name that counts.

    Each name is recorded before the file gets it, so that :meth:`discard` leaves nothing after an interrupt at any
    moment.

    Args:
        path: The directory.

    Attributes:
        name: Current name.
    """

    __slots__ = ("_fd", "_former", "_path", "name")

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: list[int] = []
        self.name = hidden_name()
        self._former = ""

    @property
    def fd(self) -> int:
        """Descriptor of the made file, which carries the lock; -1 before :meth:`make` and after :meth:`close`."""
        return self._fd[0] if self._fd else -1

    def make(self, directory: int, body: bytes) -> None:
        """Make the file under its hidden name, locked and readable for every user.

        If another process has the new file locked, the file is removed and made again under a new name, 100 times at
        most.

        Args:
            directory: Descriptor of the directory.
            body: Content of the file.

        Raises:
            OSError: When the file could not be made, for example for want of space; call :meth:`discard` then.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(_TRIES):
            self._fd.append(os.open(self.name, flags, 0o644, dir_fd=directory))
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process tested the lock at this very moment
                self.discard()
                self.name = hidden_name()
                continue
            os.fchmod(self.fd, 0o644)  # whatever the umask: each user must be able to test the lock
            if os.write(self.fd, body) != len(body):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return
        raise OSError(errno.EWOULDBLOCK, "another process locks every new file")

    def add(self, name: str, value: Any) -> None:
        """Add an entry to the content, or replace the entry; readers see the old or the new content.

        The times of the file stay. Spaces fill the rest of longer old content.

        Raises:
            OSError: When the file could not be written, as once it is closed.
        """
        before = os.fstat(self.fd)
        body = with_entry(os.pread(self.fd, BODY_LIMIT, 0), name, value)
        os.pwrite(self.fd, body.ljust(before.st_size), 0)
        os.utime(self.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # the start of the lease

    def rename(self, directory: int, name: str) -> None:
        """Rename the file, in place of any file with the new name.

        After an interrupt both names are recorded, so that :meth:`discard` finds the file.

        Raises:
            OSError: When the file could not be renamed; :attr:`name` is the old name then.
        """
        self._former, self.name = self.name, name
        try:
            os.rename(self._former, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            self.name = self._former
            raise

    def discard(self) -> None:
        """Remove the file under its current and former name, then :meth:`close` the descriptor.

        Failures are ignored: a file that cannot be removed is debris once unlocked.
        """
        for name in {self.name, self._former or self.name}:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}/{name}")
        self.close()

    def close(self) -> None:
        """Close the descriptor, which unlocks the file unless another process has a copy; the file stays.

        Errors are ignored, and a second call has no effect. Thread-safe.
        """
        with contextlib.suppress(IndexError, OSError):  # the kernel closes the descriptor even if it reports an error
            list(map(os.close, map(list.pop, (self._fd,))))  # in one step: an interrupt in between would keep the lock


def probe_lock(directory: int, name: str) -> tuple[bool, os.stat_result | None]:
    """Test whether a file is locked exclusively.

    The test takes a shared lock for a moment, which does not disturb other tests, even if this process is stopped
    meanwhile.

    Returns:
        Whether the file is locked, and the state of the file. A regular file that cannot be opened, for want of
        permission or because of a kernel lease (``F_SETLEASE``), counts as locked: its owner could keep the device by a
        lock, too. A file that is not regular counts as unlocked, since no version makes one, and so does a missing
        file; both without state.

    Raises:
        OSError: When the file cannot be tested for another reason, as for want of descriptors.
    """
    try:
        fd = os.open(name, _LOOKING, dir_fd=directory)
    except (PermissionError, BlockingIOError):
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return False, None
        return (True, found) if stat.S_ISREG(found.st_mode) else (False, None)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # gone, a symbolic link, a socket
            return False, None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return False, None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True, found
        return False, found
    finally:
        os.close(fd)


def find_obstacle(directory: int, name: str) -> str:
    """Return the reason why an existing file cannot be opened and so counts as held, as a clause without subject.

    Empty if the file can be opened, is gone, or cannot be opened for another reason.
    """
    try:
        os.close(os.open(name, _LOOKING, dir_fd=directory))
    except BlockingIOError:
        return "has a kernel lease on it (F_SETLEASE), which keeps others from opening it"
    except PermissionError:
        return "may not be opened by others"
    except OSError:
        pass
    return ""


def is_left_behind(pid: int, start: int, tag: str) -> bool:
    """Return whether the maker of a file has left the kernel, so that it cannot use a device any more; in doubt False.

    Args:
        pid: Process id of the maker.
        start: Start time of the maker; 0 when unknown.
        tag: Tag of the maker's boot; after another boot, the answer is True.
    """
    return tag != boot() or process.gone(pid, start)


def read_body(directory: int, name: str, limit: int = BODY_LIMIT) -> bytes:
    """Read the content of another process's file, up to ``limit`` bytes, 4096 by default.

    Empty if the file is not regular, or cannot be opened for any reason. An OSError of the reading itself passes.
    """
    try:
        fd = os.open(name, _LOOKING, dir_fd=directory)
    except OSError:
        return b""
    try:
        return os.read(fd, limit) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object from another process; empty for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_value(kind: type[_Value], data: object) -> _Value | None:
    """Decode a value from another process, without the fields that only a later version has; None if implausible."""
    from anyaccel.model.wire import decode  # most bodies are read without

    try:
        return decode(kind, {name: data[name] for name in kind._fields if name in data})  # type: ignore[index, operator]
    except (ValueError, TypeError):
        return None


def read_number(value: object) -> float | None:
    """Convert a number of seconds, or the like, from another process; None unless a number from 0 to below 2**40."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1 << 40 else None  # type: ignore[operator, arg-type] # pyright: ignore[reportOperatorIssue, reportArgumentType]


def clean(value: object) -> str:
    """Cut a foreign text to 250 characters, and replace each unprintable character; empty for anything but a text.

    White space becomes a space, so that one line is left; other characters become U+FFFD.
    """
    return printable(value[:_TEXT_LIMIT]) if isinstance(value, str) else ""


def with_entry(body: bytes, name: str, value: Any) -> bytes:
    """Return the body of a lease with an entry added or replaced, as JSON of any length.

    Args:
        body: The current content: any carrier of the lease may have written it, so anything but a JSON object is
            dropped.
        name: Name of the entry.
        value: The value, which JSON must be able to encode.
    """
    return json.dumps(read_object(body) | {name: value}, ensure_ascii=False).encode(errors="replace")


ENTRY = "tenure"
"""Name of the tenure in the body of a lease."""
RENEWED = "for another"
"""Beginning of the reason of a lease that is renewed in time."""
_MOST_GROUPS = 16
_LONGEST_PATHS = 2048
"""Most characters of all paths in JSON, so that all of it stays below the limit of a body."""
_MOST_SECONDS = 2**31


class Tenure(Value):
    """The condition under which a lease that no process holds stays active.

    Attributes:
        key: Identity of the use, given by the program that took the lease.
        until: The lease is active until then at least, in seconds since the boot.
        groups: Control groups, by path below the root of the hierarchy and by inode: while one of them has processes,
            the lease stays active.
    """

    key: str
    until: float
    groups: tuple[tuple[str, int], ...] = ()

    def encode(self) -> dict[str, Any]:
        """Return the tenure as JSON values."""
        return {"key": self.key, "until": self.until, "groups": [list(group) for group in self.groups]}

    def reason(self) -> str:
        """Return the reason why the lease is active now, as a clause; empty once the tenure has ended.

        Before ``until``, the clause begins with :data:`RENEWED`, and the groups are not looked at. After that, a
        control group that cannot be seen from here counts as having processes.
        """
        left = self.until - process.boot_seconds()
        if left > 0:
            return f"{RENEWED} {elapsed(left)} unless renewed"
        for path, inode in self.groups:
            populated = is_populated(path, inode)
            if populated:
                return f"not renewed any more, and kept while control group {clean(path)} has processes"
            if populated is None:
                return f"not renewed any more, and control group {clean(path)} cannot be seen from here"
        return ""


def read_tenure(directory: int, lease: LeaseName) -> Tenure | None:
    """Return the tenure of a lease, which may have ended; None if there is no valid tenure of this boot.

    None also if the file is unreadable or longer than 4096 bytes, or has an implausible tenure. Of the groups, the
    first 16 count.
    """
    if not lease.understood or lease.boot != boot():
        return None
    found = read_value(Tenure, read_object(read_body(directory, lease.name)).get(ENTRY))
    if found is None or read_number(found.until) is None:
        return None
    return replace(found, key=clean(found.key), groups=found.groups[:_MOST_GROUPS])


def make_tenure(key: str, seconds: float, groups: tuple[tuple[str, int], ...] = ()) -> Tenure:
    """Make a tenure that begins now.

    Args:
        key: Identity of the use: 1 to 250 printable characters.
        seconds: Seconds until the tenure ends unless renewed; more than 0, and at most 2**31, which is 68 years.
        groups: Control groups by path and inode: 16 at most, with paths of 2048 characters in all as JSON writes them.
            While a group has processes, the lease stays active after ``seconds``.

    Raises:
        UsageError: When a value is out of range.
    """
    if not key or clean(key) != key:
        raise UsageError(f"key must be 1 to 250 printable characters (got {key!r:.80})")
    if not 0 < seconds <= _MOST_SECONDS:
        raise UsageError(f"seconds must be more than 0 and at most {_MOST_SECONDS} (got {seconds!r})")
    if len(groups) > _MOST_GROUPS or sum(len(json.dumps(path)) - 2 for path, _ in groups) > _LONGEST_PATHS:
        raise UsageError(
            f"a lease follows at most {_MOST_GROUPS} control groups, with {_LONGEST_PATHS} characters in all"
            f" (got {len(groups)})"
        )
    return Tenure(key=key, until=process.boot_seconds() + seconds, groups=groups)


class LeaseState(NamedTuple):
    """Reason why a lease is active.

    Attributes:
        life: The kind of reason.
        carriers: Visible processes that carry the mark of a lease whose holder has ended.
        reason: Reason why a lease on behalf of others is active; empty for other leases.
        key: Identity of the use of a lease on behalf of others; empty for other leases.
    """

    life: Life
    carriers: tuple[int, ...] = ()
    reason: str = ""
    key: str = ""


def find_active(directory: int, leases: Iterable[LeaseName]) -> dict[str, LeaseState]:
    """Test leases, and return by name why each is active, without those that have ended. Nothing is removed.

    Each lock is tested; the processes are scanned at most once, and only for marks of leases whose holder has ended.

    A lease that has ended stays ended in this directory: names are never reused. Only if the directory was deleted, the
    names are made again in the next directory. A lease whose holder has ended, and whose descriptors are still open in
    a carrier of its mark, is kept like a lease with the mark alone. A marked lease is also kept, without carriers, if a
    carrier may be hidden: ``/proc`` hides processes of other users, and this user is neither root nor the owner of the
    lease, or processes start faster than the scan can follow. A lease of another version is judged by its lock alone.

    Raises:
        OSError: When a lock cannot be tested, as for want of descriptors.
    """
    found, marked = {}, []
    for lease in leases:
        locked, file = probe_lock(directory, lease.name)
        if locked:
            found[lease.name] = LeaseState(Life.HELD)
        if file is None or not lease.understood or (locked and not lease.mark):
            continue
        left = is_left_behind(lease.pid, lease.start, lease.boot)
        if left and lease.mark and lease.boot == boot():
            marked.append(lease)
        elif locked:
            continue
        elif not left and stat_of(directory, lease.name):
            found[lease.name] = LeaseState(Life.LEAVING)
        elif (tenure := read_tenure(directory, lease)) and (reason := tenure.reason()):
            found[lease.name] = LeaseState(Life.ON_BEHALF, reason=reason, key=tenure.key)
    carried = marks.carriers({lease.mark for lease in marked}) if marked else {}
    for lease in marked:
        carriers = () if carried is None else carried.get(lease.mark, ())
        file = stat_of(directory, lease.name)  # again: the scan takes a while
        hidden = not carriers and (carried is None or (file and file.st_uid != os.geteuid() and marks.hidden()))
        if file and (carriers or (hidden and lease.name not in found)):
            found[lease.name] = LeaseState(Life.KEPT, carriers)
    return found


def sweep(directory: int, names: Iterable[str]) -> None:
    """Remove the named files, which the caller found to have ended; locks are not tested again, failures ignored."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)


def find_debris(directory: int, hidden: Iterable[str]) -> list[str]:
    """Return the hidden names whose files are unlocked, irregular or gone and whose makers have ended.

    Names of another form are left out. Nothing is removed.

    Raises:
        OSError: When a lock cannot be tested.
    """
    found = []
    for name in hidden:
        maker = parse_hidden(name)
        # In another container the maker seems to have ended: the lock tells that the file is in use.
        if maker and is_left_behind(*maker) and not probe_lock(directory, name)[0]:
            found.append(name)
    return found


def stat_of(directory: int, name: str) -> os.stat_result | None:
    """Return the state of a file, of a symbolic link itself; None if the file is gone. Other errors pass."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
