"""Device locks: ``flock`` on the device's own inode, shared by each user and state directory of a host.

Whole devices are locked exclusively, shares of a device shared. The ledger decides; a device lock can only veto.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from anyaccel.ledger.names import without_scope
from anyaccel.linux import process
from anyaccel.linux.descriptors import lock_owner
from anyaccel.model.device import UNITS_PER_DEVICE
from anyaccel.model.extent import Extent


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
        """Descriptors of the locks."""
        return tuple(fd for _, _, _, fd in self._opened)

    def lock(self) -> tuple[str, str] | None:
        """Lock each opened inode without waiting: exclusively for a whole device, unless the inode is shared.

        An inode whose file system has no such locks is skipped.

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


def describe(device: str, path: str) -> str:
    """Describe a device that is locked without a lease: a clause with the process, if visible, and the locked path."""
    pid = None
    with contextlib.suppress(OSError):
        pid = lock_owner(os.stat(path))
    who = f"process {pid}" if pid else "a process that cannot be seen from here"
    where = f"{who} has locked {path}; it may use another state directory, or another plug-in for the device"
    return f"{without_scope(device)} is in use outside of this ledger: {where}"
