"""The device lock: on the device's own inode, which all users and state directories of a host have in common.

Whole devices are locked exclusively, shares of them shared. The ledger decides; the lock only contradicts it.
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
    """An inode that stands for a device.

    Attributes:
        path: Its path, such as the device's directory in sysfs. A path of a device node is opened, which may start the
            device.
        shared: Whether it is locked shared for a whole device, too: other devices are behind the same inode.
    """

    path: str
    shared: bool = False


class DeviceLocks:
    """The inodes of some devices, once opened; one that is absent or closed to us has nothing to say."""

    __slots__ = ("_opened",)

    def __init__(self) -> None:
        self._opened: list[tuple[str, str, int, int]] = []

    def open(self, choice: Mapping[str, Extent], locks: Mapping[str, Sequence[DeviceLock]]) -> None:
        """Open them.

        Args:
            choice: What is wanted of each device, by its name.
            locks: Inodes by the device's name.

        Raises:
            OSError: When this process, or the kernel, has nothing left to open them with.
        """
        for device, extent in choice.items():
            whole = extent.units == UNITS_PER_DEVICE
            for path, shared in locks.get(device, ()):
                kind = fcntl.LOCK_EX if whole and not shared else fcntl.LOCK_SH
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                except OSError as error:
                    if error.errno in process.SCARCE:
                        raise
                else:
                    self._opened.append((device, path, kind, fd))

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that carry the locks."""
        return tuple(fd for _, _, _, fd in self._opened)

    def lock(self) -> tuple[str, str] | None:
        """Lock all.

        Returns:
            None, or the device's name and the path that somebody else has locked; nothing is locked then.
        """
        for device, path, kind, fd in self._opened:
            try:
                fcntl.flock(fd, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                self.unlock()
                return device, path
            except OSError:  # an inode that cannot be locked says nothing
                continue
        return None

    def unlock(self) -> None:
        """Unlock all, also for processes that carry the descriptors: it goes with the explicit end of a lease."""
        for _, _, _, fd in self._opened:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close all; the locks last until the last process that carries them has done so."""
        while self._opened:
            with contextlib.suppress(OSError):
                os.close(self._opened.pop()[3])


def describe(device: str, path: str) -> str:
    """Say who has locked a device though no lease says so."""
    pid = None
    with contextlib.suppress(OSError):
        pid = lock_owner(os.stat(path))
    who = f"process {pid}" if pid else "a process that cannot be seen from here"
    where = f"{who} has locked {path}; it may keep its leases elsewhere, or know the device by another plug-in"
    return f"{without_scope(device)} is in use outside of this ledger: {where}"
