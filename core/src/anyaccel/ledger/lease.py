"""A lease: devices that are ours until we give them back, or until the last process that carries it has ended."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, TracebackType

from anyaccel.errors import LedgerError
from anyaccel.ledger import listing, record
from anyaccel.ledger.device_locks import DeviceLock, DeviceLocks
from anyaccel.ledger.directory import BUSY_SECONDS, StateDirectory
from anyaccel.ledger.lockfile import Life, LockedFile
from anyaccel.ledger.names import ENDLESS, Period, boot, lease_name, parse_lease
from anyaccel.linux.mark import Mark
from anyaccel.model import Value, field
from anyaccel.model.extent import Extent
from anyaccel.policy import Need

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Self


class Want(Value):
    """What somebody wants from the ledger.

    Attributes:
        candidates: Names of all devices that could serve the request, as :func:`anyaccel.ledger.names.device_name`
            gives them: whoever waits for one of them is a rival. Nothing else is given.
        wholes: Names of devices that candidates are parts of. Whoever chooses a part chooses ``DIVIDED`` of each device
            that it is a part of, so that nobody gets that one.
        device_locks: Inodes that stand for a device on this host, by its name; they are locked, too, where they exist.
        request: What was asked for, for people to read.
        confined: Whether the holder will be confined to its devices, for people to read.
        mark: Gives the mark of what will be started with the lease, which differs from all of a collection: those of
            other leases. None where nothing will be marked; then the lease ends with its lock and its process.
        needs: How much of them, for those who wait: each term's count and units among candidates, by name.
        seconds: How long it is held at most; None for as long as it takes.
    """

    candidates: frozenset[str]
    wholes: frozenset[str] = frozenset()
    device_locks: Mapping[str, tuple[DeviceLock, ...]] = field(default_factory=dict)
    request: str = ""
    confined: bool = False
    mark: Callable[[Collection[Mark]], Mark] | None = None
    needs: tuple[Need, ...] = ()
    seconds: float | None = None

    @property
    def concerned(self) -> frozenset[str]:
        """Names of all devices of which a lease matters."""
        return self.candidates | self.wholes if self.wholes else self.candidates


class Place:
    """A place in the machine's line, for a request that may have to ask anew since the machine has changed.

    Give the same one to each call: the request stands where it stood, and stands in line from its first look on.

    Attributes:
        number: Its number; None before it has one.
        since: When it came, in seconds since the boot; None likewise.
    """

    __slots__ = ("number", "since")

    def __init__(self) -> None:
        self.number: int | None = None
        self.since: float | None = None


class Lease:
    """Devices that are held.

    It ends when it is released; else once every process has ended that took it, has its descriptors, or carries its
    mark. It does not end when the object is collected: the devices may be in use all the same. In a forked child,
    :meth:`release` only lets go of the child's copy.

    Attributes:
        mark: Mark of what is started with it; empty where there is none.
        id: Identity, as ``anyaccel status`` shows it.
        devices: What is held of each device, by its name.
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
        self._period = period
        self.devices: Mapping[str, Extent] = MappingProxyType(dict(choice))
        self._state = state
        self._nonce = nonce
        self._files = dict(files)
        self._device_locks = device_locks
        self._owner = os.getpid()

    @property
    def id(self) -> str:
        """Identity, as ``anyaccel status`` shows it."""
        return self._nonce.removeprefix(boot())

    @property
    def path(self) -> str:
        """The state directory that it is in."""
        return self._state.path

    @property
    def until(self) -> float | None:
        """When it ends at the latest, in seconds since the boot (``CLOCK_BOOTTIME``); None when it does not say."""
        return None if self._period.until is None else self._period.until / 1000

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that carry the lease, for ``pass_fds`` of a worker.

        The kernel closes descriptors of a killed process from the highest number down, so a worker must have these
        before it opens its devices: then the device is closed when the lease ends.
        """
        return (*(file.fd for file in self._files.values()), *self._device_locks.fds)

    @property
    def released(self) -> bool:
        """Whether this process has given it back."""
        return not self._files and bool(self.devices)

    @property
    def intact(self) -> bool:
        """Whether others can see it; False when somebody removed its files, with the state directory for instance."""
        return not self.released and all(os.fstat(file.fd).st_nlink > 0 for file in self._files.values())

    def inherit(self) -> tuple[int, ...]:
        """Let the program that replaces this process, and all that this process starts, carry the lease.

        Returns:
            The descriptors.
        """
        for fd in self.fds:
            os.set_inheritable(fd, True)
        return self.fds

    def _rename(self, owner: tuple[int, int], mark: Mark) -> None:
        with self._state.opened(make=True) as directory:
            if not self._state.lock(directory, BUSY_SECONDS):
                raise self._state.busy(self._state.owner(directory))
            try:
                for device, file in self._files.items():
                    name = lease_name(device, self.devices[device], self._nonce, owner, mark, self._period)
                    file.rename(directory, name)
            finally:
                self._state.unlock(directory)

    def leave_to(self, mark: Mark) -> bool:
        """Let go of the devices; they are free once no process carries a mark, or the lease's descriptors.

        Args:
            mark: Mark of what was started with the devices: the lease's own, or one drawn inside it.

        Returns:
            Whether they are free already.
        """
        if self.released or self._owner != os.getpid():
            self._close()
            return True
        try:
            self._rename((0, 0), mark)
        except LedgerError as error:
            _log().warning("lease %s is kept until this process ends: %s", self.id, error)
        left = [lease for file in self._files.values() if (lease := parse_lease(file.name))]
        self._close()
        with self._state.opened() as directory:
            states = listing.states(directory, left)
            over = [name for name, state in states.items() if state.life is Life.OVER]
            listing.sweep(directory, over)
            return len(over) == len(left)

    def quarantine(self, reason: str) -> None:
        """Say to others why the devices are kept although nobody uses them.

        Args:
            reason: Why, for people to read.
        """
        for file in list(self._files.values()):
            with contextlib.suppress(OSError):  # no room for words; the devices are kept all the same
                file.rewrite(record.add_reason(file.read(), reason))

    def release(self) -> None:
        """Give the devices back. It needs neither the ledger's lock nor space, and does nothing the second time."""
        try:
            self._release()
        except BaseException:  # an interrupt: nobody would do it again
            self._release()
            raise

    def _release(self) -> None:
        ours = self._owner == os.getpid()
        if ours:
            self._device_locks.unlock()
        for file in list(self._files.values()):  # each step can be done twice, by another thread or after an interrupt
            lost = ours and _lost(file)
            file.close()  # before it is removed: one that is removed and locked was lost, and is made again
            if ours:
                self._unlink(file, lost=lost)
        self._close()

    def _close(self) -> None:
        for file in list(self._files.values()):
            file.close()
        self._device_locks.close()
        self._files.clear()

    def _unlink(self, file: LockedFile, *, lost: bool) -> None:
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
    """Whether somebody has removed a file of ours, with the state directory for instance."""
    try:
        return os.fstat(file.fd).st_nlink == 0
    except OSError:  # it is closed: its name is looked for everywhere
        return True


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("anyaccel")
