"""A lease, its files, and its device locks.

A lease holds devices until release, or until the last process that carries the lease has ended. Each of its files is
locked by its maker.

Beside its files, a lease has device locks: ``flock`` on the device's own inode, shared by each user and state directory
of a host. Whole devices are locked exclusively, shares of a device shared. The ledger decides; a device lock can only
veto.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType, TracebackType

from anyaccel._interrupts import finish_step
from anyaccel._typing import NamedTuple
from anyaccel.errors import LedgerError
from anyaccel.ledger import entries
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.entries import BODY_LIMIT, ENDLESS, Period, Tenure
from anyaccel.linux import Mark, lock_owner, process
from anyaccel.model import UNITS_PER_DEVICE, Extent, Value, field
from anyaccel.policy import Need
from anyaccel.text import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any, Self

_TRIES = 100  # each with a new name, which a hostile process would have to find and lock in time


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
        self.name = entries.hidden_name()
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
                self.name = entries.hidden_name()
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
        body = entries.with_entry(os.pread(self.fd, BODY_LIMIT, 0), name, value)
        os.pwrite(self.fd, body.ljust(before.st_size), 0)
        os.utime(self.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # the start of the lease

    def rename(self, directory: int, name: str) -> None:
        """Rename the file, in place of any file with the new name.

        After an interrupt both names are recorded, so that :meth:`discard` finds the file.

        Raises:
            OSError: When the file could not be renamed; :attr:`name` is the old name then.
        """
        again = name == self.name  # after an interrupt of the first call
        if not again:
            self._former, self.name = self.name, name
        former = self._former or name
        try:
            os.rename(former, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError as error:
            if again and error.errno == errno.ENOENT:  # the first call has renamed it
                return
            self.name = former
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
    return f"{entries.without_scope(device)} is in use outside of this ledger: {where}"


class Want(Value):
    """A request to the ledger.

    Attributes:
        candidates: Names of each device that could serve the request, as of
            :func:`anyaccel.ledger.entries.device_name`. Requests with a common candidate compete. No other device is
            given.
        wholes: Names of devices that have candidates as parts. A choice of a part also chooses ``DIVIDED`` of each
            whole, so that the whole is not given out.
        device_locks: Inodes that stand for a device on this host, by device name; existing inodes are locked, too.
        request: The text of the request, for display.
        confined: Whether the holder will be confined to its devices, for display.
        mark: Draws the mark of the processes that will be started with the lease, different from the given marks of
            other leases. None if no process will be marked; then the lease ends with its lock and its process.
        needs: The quantities, for the order of waiting requests: each term's count and units among candidates, by name.
        seconds: Time limit of the lease; None for no limit.
        tenure: Makes the tenure of a lease on behalf of other processes, when the lease is published; None for a lease
            that processes hold.
    """

    candidates: frozenset[str]
    wholes: frozenset[str] = frozenset()
    device_locks: Mapping[str, tuple[DeviceLock, ...]] = field(default_factory=dict)
    request: str = ""
    confined: bool = False
    mark: Callable[[Collection[Mark]], Mark] | None = None
    needs: tuple[Need, ...] = ()
    seconds: float | None = None
    tenure: Callable[[], Tenure] | None = None

    @property
    def concerned(self) -> frozenset[str]:
        """Names of the candidates and of their wholes: the devices whose leases may block the request."""
        return self.candidates | self.wholes if self.wholes else self.candidates


class Place:
    """A queue position that survives a request: for a request that must ask again because the machine has changed.

    Pass the same place to each acquisition: the request keeps its position, and is in line from its first look on.

    Attributes:
        number: Time of arrival, in microseconds since the boot; None before the first ticket.
    """

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number: int | None = None


class Lease:
    """Devices held until release, or until the last process with the lease has ended.

    The lease ends at :meth:`release`; otherwise once each process has ended that took the lease, has its descriptors,
    or carries its mark. Garbage collection of the object does not end the lease, since the devices may still be in use.
    In a forked child, :meth:`release` only closes the child's copy.

    Attributes:
        mark: Mark of processes that are started with the lease; empty for none.
        id: Identity, as ``anyaccel status`` shows it.
        devices: The extent that is held of each device, by device name.
    """

    def __init__(
        self,
        state: StateDirectory,
        nonce: str,
        choice: Mapping[str, Extent],
        files: Mapping[str, LockedFile],
        device_locks: DeviceLocks,
        *,
        mark: Mark = (),
        period: Period = ENDLESS,
    ) -> None:
        self.mark = mark
        self._period = period  # in the name, so that each waiting process knows the end
        self.devices: Mapping[str, Extent] = MappingProxyType(dict(choice))
        self._state = state
        self._nonce = nonce
        self._files: Mapping[str, LockedFile] = dict(files)  # never changed, since other threads may iterate over it
        self._device_locks = device_locks
        self._owner = os.getpid()

    @property
    def id(self) -> str:
        """Identity, as shown by ``anyaccel status``: the nonce without the tag of the boot."""
        return self._nonce.removeprefix(entries.boot())

    @property
    def path(self) -> str:
        """The state directory of the lease."""
        return self._state.path

    @property
    def until(self) -> float | None:
        """End of the time limit in seconds since the boot (``CLOCK_BOOTTIME``); None without a limit."""
        return None if self._period.until is None else self._period.until / 1000

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that carry the lease, with those of device locks, for ``pass_fds`` of a worker.

        Empty after the release, and for a lease without devices.

        The kernel closes descriptors of a killed process from the highest number down, so a worker must have these
        before it opens its devices: then the devices are closed before the lease ends.
        """
        return (*(file.fd for file in self._files.values()), *self._device_locks.fds)

    @property
    def released(self) -> bool:
        """Whether this process has released the lease or left it to others; False for a lease without devices.

        True also in a forked child that has closed its copies.
        """
        return not self._files and bool(self.devices)

    @property
    def intact(self) -> bool:
        """Whether other processes can see the lease by its files; False if another process removed a file.

        False also once this process has released the lease or left it to others, and while another thread releases it.
        True for a lease without devices, also after its release.
        """
        return not self.released and not any(map(_lost, self._files.values()))

    def inherit(self) -> tuple[int, ...]:
        """Make the descriptors inheritable: child processes, and a program that replaces this one, carry the lease.

        Returns:
            The descriptors, as of :attr:`fds`; none after the release.
        """
        for fd in self.fds:
            os.set_inheritable(fd, True)
        return self.fds

    def leave_to(self, mark: Mark) -> bool:
        """Hand the lease over to started processes; the last process with the mark or the descriptors ends the lease.

        This process closes its descriptors. If the files cannot be renamed, a warning is logged, and the lease also
        lasts until this process ends. Files of this lease that no process keeps any more are removed.

        Args:
            mark: Mark of the processes that were started with the devices: the lease's own, or a mark drawn inside the
                lease.

        Returns:
            Whether the devices are free already. True also for a released lease, and in a forked child, which only
            closes its copies.

        Raises:
            LedgerError: When the state directory cannot be read in the end; the lease is handed over nevertheless.
        """
        return finish_step(lambda: self._leave_to(mark))

    def _leave_to(self, mark: Mark) -> bool:
        """Hand the lease over; a second call does the steps that an interrupt has left."""
        if self.released or self._owner != os.getpid():
            self._close()
            return True
        try:
            with self._state.locked(make=True) as directory:
                for device, file in self._files.items():
                    name = entries.lease_name(device, self.devices[device], self._nonce, (0, 0), mark, self._period)
                    file.rename(directory, name)
        except LedgerError as error:
            _log().warning("lease %s is kept until this process ends: %s", self.id, error)
        left = [lease for file in self._files.values() if (lease := entries.parse_lease(file.name))]
        self._close()
        with self._state.opened() as directory:
            active = entries.find_active(directory, left)
            entries.sweep(directory, {lease.name for lease in left} - active.keys())
            return not active

    def quarantine(self, reason: str) -> None:
        """Publish the reason why the devices are kept although no process uses them. A failed write is ignored.

        No effect on a released lease.

        Args:
            reason: The reason, for display; cut to 250 characters.
        """
        for file in self._files.values():
            with contextlib.suppress(OSError):  # without space the reason is lost, but the devices are kept
                file.add("quarantined", clean(reason))

    def release(self) -> None:
        """Release the devices. Needs neither the lock of the ledger nor free space; a second call has no effect.

        The lease ends, even if other processes still have its descriptors or carry its mark. If a file of the lease
        cannot be removed, a warning is logged, and the ledger may count the device as held until this process has
        ended. A forked child only closes its copies.
        """
        finish_step(self._release)

    def _release(self) -> None:
        """Free the device locks, then close and remove the files, also files made again; in a forked child, only close.

        A second call does the steps that an interrupt has left.
        """
        ours = self._owner == os.getpid()
        if ours:
            self._device_locks.unlock()
        for file in self._files.values():  # each step may run twice: in another thread, or after an interrupt
            lost = ours and _lost(file)
            file.close()  # before the unlink: recovery makes the file of a locked and unlinked lease again
            if ours:
                self._unlink(file, lost=lost)
        self._close()

    def _close(self) -> None:
        """Close the files and device locks of this process, so that :attr:`released` is true.

        No file is removed; copies of the descriptors in other processes still carry the lease.
        """
        for file in self._files.values():
            file.close()
        self._device_locks.close()
        self._files = {}

    def _unlink(self, file: LockedFile, *, lost: bool) -> None:
        """Remove a file of the lease; log a warning on failure.

        Args:
            file: The file.
            lost: Whether another process has unlinked the file, so that files that were made again are removed, too.
        """
        try:
            self._state.remove(file.name, lost=lost)
        except OSError as error:
            ends = "when this process does" if error.errno == errno.EROFS else "at the latest when this process does"
            _log().warning(
                "lease %s: %s/%s cannot be removed (%s); it ends %s",
                self.id, self._state.path, file.name, error.strerror, ends,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        devices = ", ".join(f"{device}:{extent.units}" for device, extent in self.devices.items())
        held = "released" if self.released else devices
        return f"<Lease {self.id}: {held}>"


def _lost(file: LockedFile) -> bool:
    """Return whether another process has removed the file of a lease; True also if the file is closed."""
    try:
        return os.fstat(file.fd).st_nlink == 0
    except OSError:  # the file is closed already: search for its name in every directory
        return True


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("anyaccel")
