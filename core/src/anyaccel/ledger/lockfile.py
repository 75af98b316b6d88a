"""Files that their makers keep locked, and what a lock says about a file of somebody else."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from enum import Enum

from anyaccel.ledger.names import boot, hidden_name
from anyaccel.linux import process

BODY_LIMIT = 4096
_LOOKING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100


class Life(Enum):
    """What keeps a file in force."""

    HELD = "held"
    """Its lock is held, or may be."""
    LEAVING = "leaving"
    """Its lock is free, but its process has not left the kernel yet: what it had open may still be in use."""
    KEPT = "kept"
    """Its lock is free and its process gone, but a process that was started with it lives, or may."""
    OVER = "over"
    """Nothing: it is debris."""


class LockedFile:
    """A file of ours: made under a hidden name, locked, written, and only then given the name that counts.

    Its names are known before it has them, so that after an interrupt at any moment :meth:`discard` leaves nothing.

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
        """Descriptor that carries the lock; -1 when there is none."""
        return self._fd[0] if self._fd else -1

    def make(self, directory: int, body: bytes) -> None:
        """Make it.

        Args:
            directory: Descriptor of the directory.
            body: What to write into it.

        Raises:
            OSError: When it could not be made.
        """
        for _ in range(_TRIES):
            try:
                self._make(directory, body)
            except BlockingIOError:  # somebody was looking at it at this very moment
                self.discard()
                self.name = hidden_name()
            else:
                return
        raise OSError(errno.EWOULDBLOCK, "somebody else locks every new file")

    def _make(self, directory: int, body: bytes) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd.append(os.open(self.name, flags, 0o644, dir_fd=directory))
        fd = self._fd[0]
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o644)  # whatever the umask: others must be able to see whether it is locked
        if os.write(fd, body) != len(body):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rewrite(self, body: bytes) -> None:
        """Write something else into it, which readers see at once or not at all.

        Args:
            body: JSON, after which spaces mean nothing.

        Raises:
            OSError: When it could not be written.
        """
        before = os.fstat(self.fd)
        os.pwrite(self.fd, body.ljust(before.st_size), 0)
        os.utime(self.fd, ns=(before.st_atime_ns, before.st_mtime_ns))  # which says since when it is held

    def read(self) -> bytes:
        """What is written in it."""
        return os.pread(self.fd, BODY_LIMIT, 0)

    def rename(self, directory: int, name: str) -> None:
        """Give it another name. An interrupt leaves both names known, so that :meth:`discard` finds it."""
        self._former, self.name = self.name, name
        try:
            os.rename(self._former, name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            self.name = self._former
            raise

    def discard(self) -> None:
        """Remove it, then let go of its lock. What cannot be removed is debris once the lock is gone."""
        for name in {self.name, self._former or self.name}:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}/{name}")
        self.close()

    def close(self) -> None:
        """Let go of its lock, unless somebody else carries the descriptor, too. Any thread may do so, at any time."""
        with contextlib.suppress(IndexError, OSError):  # the kernel closes it even where it reports an error
            list(map(os.close, map(list.pop, (self._fd,))))  # in one step: an interrupt in between would keep the lock


def look(directory: int, name: str) -> tuple[Life, os.stat_result | None]:
    """Say whether a file is locked by somebody.

    The test takes a shared lock for a moment: it stands in no other tester's way, even when we are stopped meanwhile.

    Returns:
        ``HELD`` or ``OVER``, and the file's state if it has one. What cannot be opened, for want of permission or
        because its owner has a kernel lease on it (``F_SETLEASE``), is taken to be held: that keeps from others what
        the owner could keep by a lock, too. What is no regular file is nobody's, since no version ever makes one.
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
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):  # gone; a link; a socket
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


def obstacle(directory: int, name: str) -> str:
    """Say why a file cannot be looked at, so that it is taken to be held; empty when it can be, or is not there."""
    try:
        os.close(os.open(name, _LOOKING, dir_fd=directory))
    except BlockingIOError:
        return "has a kernel lease on it (F_SETLEASE), which keeps others from opening it"
    except PermissionError:
        return "may not be opened by others"
    except OSError:
        pass
    return ""


def left_behind(pid: int, start: int, tag: str) -> bool:
    """Whether the process that made a file cannot use anything any more."""
    return tag != boot() or process.gone(pid, start)


def read_body(directory: int, name: str, limit: int = BODY_LIMIT) -> bytes:
    """Read what is written in somebody's file; empty when that cannot be done."""
    try:
        fd = os.open(name, _LOOKING, dir_fd=directory)
    except OSError:
        return b""
    try:
        return os.read(fd, limit) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)
