"""The device lock: on the device's own inode, which all users and state directories of a host have in common.

Whole devices are locked exclusively, shares of them shared. The ledger decides; the lock only contradicts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping, Sequence

from anyaccel.ledger import process
from anyaccel.ledger.names import without_scope
from anyaccel.model.device import UNITS_PER_DEVICE
from anyaccel.model.extent import Extent


class DeviceLocks:
    """The inodes of some devices, once opened; one that is absent or closed to us has nothing to say."""

    __slots__ = ("_opened",)

    def __init__(self) -> None:
        self._opened: list[tuple[str, str, int, int]] = []

    def open(self, choice: Mapping[str, Extent], paths: Mapping[str, Sequence[str]]) -> None:
        """Open them.

        Args:
            choice: What is wanted of each device, by its name.
            paths: Paths of inodes by the device's name, such as the device's directory in sysfs.

        Raises:
            OSError: When this process, or the kernel, has nothing left to open them with.
        """
        for device, extent in choice.items():
            kind = fcntl.LOCK_EX if extent.units == UNITS_PER_DEVICE else fcntl.LOCK_SH
            for path in paths.get(device, ()):
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
        pid = process.lock_owner(os.stat(path))
    who = f"process {pid}" if pid else "a process that cannot be seen from here"
    where = f"{who} has locked {path}; it may keep its leases elsewhere"
    return f"{without_scope(device)} is in use outside of this ledger: {where}"
