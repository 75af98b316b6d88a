"""Wake-ups when a file is removed, or closed by the last user: a thin layer over inotify(7)."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator

from anyaccel.linux import system
from anyaccel.linux.fork import tidy_in_child

_CLOSE_WRITE = 0x8
_DELETE = 0x200
_DELETE_SELF = 0x400
_OVERFLOW = 0x4000
_IGNORED = 0x8000
_DONT_FOLLOW = 0x02000000
_EVENT = struct.Struct("iIII")

_MOST_IDLE = 16  # of the 128 instances that a user has by default
_idle: list[int] = []
"""Descriptors without a watch, for reuse. The kernel takes up to 20 ms to close a descriptor after a watch was removed,
which a request that has just got its devices must not wait for: ten threads that take turns at one device get 6 times
as many leases with 16 kept descriptors as with one."""


@tidy_in_child
def _close_in_child() -> None:
    """Close the idle descriptors: a child would steal events of the parent."""
    while _idle:
        os.close(_idle.pop())


class FileEvents:
    """Events of a file or of the files in a directory: :meth:`fileno` is readable while events are pending.

    The kernel reports the close of the last descriptor shortly before it drops the lock. So a reader that is woken by
    a close must check the lock twice.

    Raises:
        OSError: When the user has no inotify instance left.
    """

    __slots__ = ("_fd", "_owner", "_watch", "path")

    def __init__(self) -> None:
        try:
            self._fd = _idle.pop()
        except IndexError:
            self._fd = system.call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
        self._owner = os.getpid()
        self._watch = -1
        self.path = ""

    def follow(self, path: str) -> None:
        """Watch a file, or the files of a directory, in place of the former target.

        Raises:
            OSError: When the target cannot be watched, for example because it is gone. Nothing is watched then.
        """
        self._stop()
        mask = _CLOSE_WRITE | _DELETE | _DELETE_SELF | _DONT_FOLLOW
        self._watch = system.call("inotify_add_watch", self._fd, os.fsencode(path), mask, subject=path)
        self.path = path

    def fileno(self) -> int:
        """Return the descriptor to wait for; -1 once closed."""
        return self._fd

    def events(self) -> Iterator[tuple[str, bool]]:
        """Yield the pending events: the file's name, empty for the target itself, and whether the file was removed.

        Events of a former target are left out. Lost events count as one of the target. A removed target is watched no
        more.
        """
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                if mask & _IGNORED:  # the kernel has removed the watch, and has said why before
                    if watch == self._watch:
                        self._watch, self.path = -1, ""
                elif watch == self._watch or mask & _OVERFLOW:
                    name = data[at - length : at].rstrip(b"\0")
                    yield os.fsdecode(name), bool(mask & (_DELETE | _DELETE_SELF))

    def close(self) -> None:
        """Stop watching, and keep the descriptor for reuse, or close it; a second call has no effect.

        In a forked child, the watch of the parent goes on.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._owner == os.getpid() and len(_idle) < _MOST_IDLE:  # in a forked child the watch is the parent's
            self._stop(fd)
            _idle.append(fd)
        else:
            with contextlib.suppress(OSError):  # the kernel closes it even where it reports an error
                os.close(fd)

    def _stop(self, fd: int | None = None) -> None:
        """Remove the watch, if any; an error is ignored.

        Args:
            fd: The descriptor; None for the object's own.
        """
        if self._watch >= 0:
            watch, self._watch, self.path = self._watch, -1, ""
            with contextlib.suppress(OSError):  # the kernel has removed it already
                system.call("inotify_rm_watch", self._fd if fd is None else fd, watch)
