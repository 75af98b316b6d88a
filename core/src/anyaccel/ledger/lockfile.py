"""Locks: files that stay locked by their makers, tests and bodies of other processes' files, and locks of devices.

A device lock is ``flock`` on the device's own inode, shared by each user and state directory of a host. Whole devices
are locked exclusively, shares of a device shared. The ledger decides; a device lock can only veto.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
from collections.abc import Mapping, Sequence
from enum import Enum

from anyaccel._typing import NamedTuple
from anyaccel.ledger.names import boot, hidden_name, without_scope
from anyaccel.linux import process
from anyaccel.linux.descriptors import lock_owner
from anyaccel.model.device import UNITS_PER_DEVICE
from anyaccel.model.extent import Extent
from anyaccel.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BODY_LIMIT = 4096
_TEXT_LIMIT = 250  # so that all of it stays below the limit of a body
# Files belong to other users: no symbolic link is followed, and opening a FIFO must not block.
_LOOKING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100  # each with a new name, which a hostile process would have to find and lock in time


class Life(Enum):
    """Reason why a file is active."""

    HELD = "held"
    """The lock is held, or may be."""
    LEAVING = "leaving"
    """The lock is free, but the process has not left the kernel yet: its devices may still be open."""
    KEPT = "kept"
    """The lock is free and the process gone, but a process that was started with the lease lives, or may live."""
    ON_BEHALF = "on behalf"
    """No process holds the lock, but the tenure of the lease lasts; see :mod:`anyaccel.ledger.states`."""
    OVER = "over"
    """No reason is left: the file is debris."""


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

    def rewrite(self, body: bytes) -> None:
        """Replace the content, but not the times of the file; readers see the old or the new content.

        Args:
            body: JSON; spaces fill the rest of longer old content.

        Raises:
            OSError: When the file could not be written.
        """
        before = os.fstat(self.fd)
        os.pwrite(self.fd, body.ljust(before.st_size), 0)
        os.utime(self.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # the start of the lease

    def read(self) -> bytes:
        """Return the content of the open file from its start, up to 4096 bytes; OSError passes, also once closed."""
        return os.pread(self.fd, BODY_LIMIT, 0)

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


def probe_lock(directory: int, name: str) -> tuple[Life, os.stat_result | None]:
    """Test whether a file is locked exclusively.

    The test takes a shared lock for a moment, which does not disturb other tests, even if this process is stopped
    meanwhile.

    Returns:
        ``HELD`` or ``OVER``, and the state of the file. A regular file that cannot be opened, for want of permission or
        because of a kernel lease (``F_SETLEASE``), counts as held: its owner could keep the device by a lock, too. A
        file that is not regular is ``OVER``, since no version makes one, and so is a missing file; both without state.

    Raises:
        OSError: When the file cannot be tested for another reason, as for want of descriptors.
    """
    try:
        fd = os.open(name, _LOOKING, dir_fd=directory)
    except (PermissionError, BlockingIOError):
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return Life.OVER, None
        return (Life.HELD, found) if stat.S_ISREG(found.st_mode) else (Life.OVER, None)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # gone, a symbolic link, a socket
            return Life.OVER, None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return Life.OVER, None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Life.HELD, found
        return Life.OVER, found
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


class DeviceLock(NamedTuple):
    """An inode in place of a device.

    Attributes:
        path: Path of the inode, such as the device's directory in sysfs. Opening a device node may start the device.
        shared: Whether to lock the inode shared for a whole device, too, since other devices are behind the same inode.
    """

    path: str
    shared: bool = False


class DeviceLocks:
    """The opened inodes of the chosen devices. An inode that is missing or not readable for this user is skipped."""

    __slots__ = ("_opened",)

    def __init__(self) -> None:
        self._opened: list[tuple[str, str, int, int]] = []

    def open(self, choice: Mapping[str, Extent], locks: Mapping[str, Sequence[DeviceLock]]) -> None:
        """Open the inodes of the chosen devices, without locking them; an inode that cannot be opened is skipped.

        Args:
            choice: The extent to hold of each device, by device name.
            locks: Inodes by device name.

        Raises:
            OSError: When this process, or the kernel, is out of descriptors or memory; inodes that were opened before
                stay open until :meth:`close`.
        """
        for device, extent in choice.items():
            whole = extent.units == UNITS_PER_DEVICE
            for path, shared in locks.get(device, ()):
                kind = fcntl.LOCK_EX if whole and not shared else fcntl.LOCK_SH
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                except OSError as error:
                    if error.errno in process.SCARCE:  # missing inodes are no veto, missing descriptors are
                        raise
                else:
                    self._opened.append((device, path, kind, fd))

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors of the opened inodes, locked or not."""
        return tuple(fd for _, _, _, fd in self._opened)

    def lock(self) -> tuple[str, str] | None:
        """Lock each opened inode without waiting.

        The lock is exclusive for a whole device, and shared for a part or with :attr:`DeviceLock.shared`. An inode that
        cannot be locked because of another error, as on a file system without such locks, is skipped.

        Returns:
            None on success; else the device's name and the path that another process has locked, with every inode
            unlocked again.
        """
        for device, path, kind, fd in self._opened:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                self.unlock()
                return device, path
            except OSError:  # the file system has no locks on inodes of this kind: no veto
                continue
        return None

    def unlock(self) -> None:
        """Unlock explicitly, ignoring errors, so that copies of the descriptors in other processes lose the locks."""
        for _, _, _, fd in self._opened:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptors; each lock lasts until the last process with a copy has closed its own."""
        while self._opened:
            with contextlib.suppress(OSError):
                os.close(self._opened.pop()[3])


def describe_lock(device: str, path: str) -> str:
    """Describe a device that is locked without a lease: a clause with the process, if visible, and the locked path."""
    pid = None
    with contextlib.suppress(OSError):
        pid = lock_owner(os.stat(path))
    who = f"process {pid}" if pid else "a process that cannot be seen from here"
    where = f"{who} has locked {path}; it may use another state directory, or another plug-in for the device"
    return f"{without_scope(device)} is in use outside of this ledger: {where}"
