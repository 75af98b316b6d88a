"""Waking up when a file goes away from a directory, or its last user closes it: a thin layer over inotify(7)."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

_CLOSE_WRITE = 0x8
_DELETE = 0x200
_DELETE_SELF = 0x400
_ONLY_DIRECTORY = 0x01000000
_DONT_FOLLOW = 0x02000000

_idle: list[int] = []
"""One descriptor without a watch at most: to close one takes the kernel up to 20 ms after a watch was removed, which
nobody who has just got its devices should wait for."""


def _close_in_child() -> None:
    """Leave the descriptors to the parent, whose events a child would steal."""
    while _idle:
        os.close(_idle.pop())


os.register_at_fork(after_in_child=_close_in_child)


class Watch:
    """Events of a directory: its :meth:`fileno` is readable when something may have become free.

    That the last descriptor of a file is closed is told shortly before its lock is dropped, so whoever is woken must
    look twice.

    Args:
        path: The directory.

    Raises:
        OSError: When the kernel gives out no more watches, of which a user has few, or has none at all.
    """

    __slots__ = ("_fd", "_owner", "_watch")

    def __init__(self, path: str) -> None:
        libc, errno = _libc()
        try:
            self._fd: int = _idle.pop()
        except IndexError:
            self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(errno(), os.strerror(errno()))
        mask = _CLOSE_WRITE | _DELETE | _DELETE_SELF | _ONLY_DIRECTORY | _DONT_FOLLOW
        self._owner = os.getpid()
        self._watch: int = libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if self._watch < 0:
            number = errno()
            self.close()
            raise OSError(number, os.strerror(number), path)

    def fileno(self) -> int:
        """The descriptor to wait for."""
        return self._fd

    def drain(self) -> None:
        """Forget the events so far."""
        try:
            while os.read(self._fd, 1 << 16):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Stop watching."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if self._owner != os.getpid():  # the watch is the parent's
            os.close(fd)
            return
        _libc()[0].inotify_rm_watch(fd, self._watch)
        if _idle:
            os.close(fd)
        else:
            _idle.append(fd)


@cache
def _libc() -> tuple[Any, Any]:
    """The C library; loaded by those who wait only."""
    import ctypes

    return ctypes.CDLL(None, use_errno=True), ctypes.get_errno
