"""A lease: devices that are ours until we give them back, or until the last process that carries it has ended."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Self

from anyaccel.errors import LedgerError
from anyaccel.ledger import process, record
from anyaccel.ledger.directory import BUSY_SECONDS, StateDirectory
from anyaccel.ledger.lockfile import LockedFile
from anyaccel.ledger.names import boot, lease_name
from anyaccel.ledger.witness import Witnesses


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """What somebody wants from the ledger.

    Attributes:
        candidates: Ids of all devices that could serve the request: whoever waits for one of them is a rival. Nothing
            else is given.
        witnesses: Paths of inodes that stand for a device on this host, by device id, such as its directory in sysfs;
            they are locked, too, where they exist. A path of a device node is opened, which may start the device.
        request: What was asked for, for people to read.
        confined: Whether the holder will be confined to its devices, for people to read.
    """

    candidates: frozenset[str]
    witnesses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    request: str = ""
    confined: bool = False


class Lease:
    """Devices that are held.

    It ends when it is released, or when every process that carries its descriptors has ended. It does not end because
    nobody refers to the object any more: the devices may be in use all the same. In a forked child, :meth:`release`
    only lets go of the child's copy.

    Attributes:
        id: Identity, as ``anyaccel status`` shows it.
        devices: Units that are held by device id, in 1/10000.
    """

    def __init__(
        self,
        state: StateDirectory,
        nonce: str,
        choice: Mapping[str, int],
        files: Mapping[str, LockedFile],
        witnesses: Witnesses,
    ) -> None:
        self.devices: Mapping[str, int] = MappingProxyType(dict(choice))
        self._state = state
        self._nonce = nonce
        self._files = dict(files)
        self._witnesses = witnesses
        self._owner = os.getpid()

    @property
    def id(self) -> str:
        """Identity, as ``anyaccel status`` shows it."""
        return self._nonce.removeprefix(boot())

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that carry the lease, for ``pass_fds`` of a worker.

        The kernel closes descriptors of a killed process from the highest number down, so a worker must have these
        before it opens its devices: then the device is closed when the lease ends.
        """
        return (*(file.fd for file in self._files.values()), *self._witnesses.fds)

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

    def hand_to(self, pid: int) -> None:
        """Say that another process, which carries the lease, is the one that uses the devices.

        After a crash they are given out again only once that process has left the kernel.

        Raises:
            LedgerError: When there is no such process, or the ledger cannot be written; nothing has changed then, or
                some of the devices already say so.
        """
        start = process.start_time(pid)
        if start is None:
            raise LedgerError(f"lease {self.id} cannot be handed to process {pid}: there is none")
        directory = self._state.open()
        try:
            if not self._state.lock(directory, BUSY_SECONDS):
                raise self._state.busy(self._state.owner(directory))
            for device, file in self._files.items():
                file.rename(directory, lease_name(device, self.devices[device], self._nonce, (pid, start)))
        except OSError as error:
            raise self._state.fault(error) from error
        finally:
            self._state.unlock(directory)
            self._state.close(directory)

    def set_aside(self, reason: str) -> None:
        """Say to others why the devices are kept although nobody uses them.

        Args:
            reason: Why, for people to read.
        """
        for file in list(self._files.values()):
            with contextlib.suppress(OSError):  # no room for words; the devices are kept all the same
                file.rewrite(record.add_reason(file.read(), reason))

    def release(self) -> None:
        """Give the devices back. It needs neither the ledger's lock nor space, and does nothing the second time."""
        ours = self._owner == os.getpid()
        if ours:
            self._witnesses.unlock()
        for file in list(self._files.values()):  # each step can be done twice, by another thread or after an interrupt
            if ours:
                self._unlink(file)
            file.close()
        self._witnesses.close()
        self._files.clear()

    def _unlink(self, file: LockedFile) -> None:
        try:
            os.unlink(f"{self._state.path}/{file.name}")
        except FileNotFoundError:
            pass
        except OSError as error:
            import logging

            ends = "when this process does" if error.errno == errno.EROFS else "at the latest when this process does"
            logging.getLogger("anyaccel").warning(
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
        held = "released" if self.released else ", ".join(f"{device}:{units}" for device, units in self.devices.items())
        return f"<Lease {self.id}: {held}>"
