"""The state directory: where it is, whether it can be trusted, and the lock that serialises who publishes there.

The lock is on the directory itself. There is no lock file that somebody could own, remove or replace, and whoever has
the right directory open has the right lock. The directory is opened anew for every look, so that one that was deleted
and made again is noticed, threads exclude each other like processes do, and a fork shares no lock with its parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import stat
import threading
import time
from collections.abc import Mapping

from anyaccel.errors import LedgerBusyError, LedgerError, StateDirectoryError
from anyaccel.ledger import process

VARIABLE = "ANYACCEL_STATE_DIR"
MACHINE_WIDE = "/run/anyaccel"
BUSY_SECONDS = 10.0
"""How long the lock may be held by others before somebody must be told; holding it takes some microseconds."""

_MODE_SHARED = 0o1777
_MODE_PRIVATE = 0o700
_SPINS = 32
_FIRST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.005
_COURTESY_SECONDS = 0.1

_open: set[int] = set()
_opening: set[object] = set()
_known: set[tuple[int, int]] = set()
_turn = threading.Lock()
_locked: dict[int, threading.Lock] = {}


def _close_in_child() -> None:
    """Give up directories that other threads of the parent had open: a copy would keep their lock if they died."""
    global _turn  # noqa: PLW0603 -- one of them may have had it
    _turn = threading.Lock()
    _locked.clear()
    descriptors = set(_open)
    if _opening:  # forked between the opening of a directory and the moment at which it was noted
        descriptors.update(int(name) for name in os.listdir("/proc/self/fd"))
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode) and (found.st_dev, found.st_ino) in _known:
                os.close(descriptor)
    _open.clear()
    _opening.clear()


os.register_at_fork(after_in_child=_close_in_child)


class StateDirectory:
    """A directory that was found fit to keep leases.

    Args:
        path: Where it is.
        mode: Access mode with which to make it where it does not exist; None when we may not make it.

    Attributes:
        path: Where it is.
        shared: Whether other users can take part.

    Raises:
        StateDirectoryError: When it must not be used; the message says why.
    """

    def __init__(self, path: str, mode: int | None) -> None:
        self.path = path
        self.shared = False
        self._mode = mode
        self._seen: tuple[int, ...] = ()
        self.close(self.open())

    def open(self) -> int:
        """Open it, to be given to :meth:`close`.

        Raises:
            StateDirectoryError: When it must not be used (any more).
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        token = object()
        _opening.add(token)
        try:
            descriptor = os.open(self.path, flags)
            _open.add(descriptor)
        except FileNotFoundError:
            self._make()
            descriptor = self._open_made(flags)
            _open.add(descriptor)
        except OSError as error:
            raise _refused(self.path, error) from error
        finally:
            _opening.discard(token)
        try:
            found = os.fstat(descriptor)
            seen = (found.st_dev, found.st_ino, found.st_uid, found.st_mode)
            if seen != self._seen:
                _known.add((found.st_dev, found.st_ino))
                self._verify(descriptor, found)
                self._seen = seen
                if found.st_uid == os.geteuid():
                    self._mode = stat.S_IMODE(found.st_mode)  # whoever deletes it gets one of the same kind
        except OSError as error:
            self.close(descriptor)
            raise self.fault(error) from error
        except BaseException:
            self.close(descriptor)
            raise
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close what :meth:`open` returned; it should be unlocked, in case that a child was forked meanwhile."""
        self._pass_on(descriptor)
        _open.discard(descriptor)
        with contextlib.suppress(OSError):  # the kernel closes it even where it reports an error
            os.close(descriptor)

    def lock(self, descriptor: int, seconds: float) -> bool:
        """Lock the directory, once nobody else has it locked; False when that takes longer than some seconds."""
        deadline = time.monotonic() + seconds
        global _turn  # noqa: PLW0603 -- a courtesy among threads, who wait here at no cost; flock excludes them, too
        turn = _turn
        locked = False
        try:
            if turn.acquire(timeout=min(seconds, _COURTESY_SECONDS)):
                _locked[descriptor] = turn
            else:
                _turn = threading.Lock()  # whoever has it was interrupted before it could let go, or is slow
            locked = self._lock_file(descriptor, deadline)
        finally:
            if not locked:
                self._pass_on(descriptor)
        return locked

    def _lock_file(self, descriptor: int, deadline: float) -> bool:
        spins, pause = 0, _FIRST_PAUSE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                spins += 1
            else:
                return True
            if spins < _SPINS:
                os.sched_yield()
            elif time.monotonic() < deadline:
                time.sleep(random.uniform(pause / 2, pause))  # noqa: S311 -- so that rivals do not march in step
                pause = min(_LONGEST_PAUSE, pause * 1.5)  # many must not keep the one who has it from the processor
            else:
                return False

    def unlock(self, descriptor: int) -> None:
        """Unlock the directory if it is locked: explicitly, since a child that was forked meanwhile has a copy."""
        with contextlib.suppress(OSError):  # it is going to be closed
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._pass_on(descriptor)

    def _pass_on(self, descriptor: int) -> None:
        turn = _locked.pop(descriptor, None)
        if turn:
            turn.release()

    def replaced(self, descriptor: int) -> bool:
        """Whether the directory was deleted since it was opened."""
        return os.fstat(descriptor).st_nlink == 0

    def changed(self, descriptor: int) -> int:
        """When a name was made, changed or removed last, in nanoseconds of the clock of the file system."""
        return os.fstat(descriptor).st_mtime_ns

    def owner(self, descriptor: int) -> int | None:
        """Process that has the directory locked; None when it cannot be seen."""
        return process.lock_owner(os.fstat(descriptor))

    def busy(self, pid: int | None, seconds: float = BUSY_SECONDS) -> LedgerBusyError:
        """Say who has had the directory locked for too long."""
        letter = process.state(pid) if pid else ""
        condition = {"T": ", which is stopped", "t": ", which is being traced", "D": ", which is stuck"}.get(letter, "")
        who = f"process {pid}{condition}" if pid else "a process that cannot be seen from here"
        hint = f"let it go on with 'kill -CONT {pid}', or end it" if condition else "end it, then try again"
        return LedgerBusyError(
            f"the state directory {self.path} has been locked for {seconds:.3g} s by {who}", hint=hint
        )

    def fault(self, error: OSError) -> LedgerError:
        """Say that the kernel refused something in the directory."""
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return StateDirectoryError(
                f"the state directory {self.path} cannot be written: {error.strerror}",
                hint=f"make it writable for all, as with 'chmod 1777 {self.path}', or set {VARIABLE}",
            )
        return LedgerError(f"the state directory {self.path} could not be used: {error.strerror or error}")

    def _make(self) -> None:
        if self._mode is None:
            raise StateDirectoryError(
                f"the state directory {self.path} does not exist", hint=f"make it, or set {VARIABLE}"
            )
        try:
            os.mkdir(self.path, self._mode)
        except FileExistsError:
            return
        except OSError as error:
            raise StateDirectoryError(
                f"the state directory {self.path} cannot be made: {error.strerror}", hint=f"make it, or set {VARIABLE}"
            ) from error

    def _open_made(self, flags: int) -> int:
        """Open the directory that was just made, by us or by a rival, and undo what the umask did to ours."""
        try:
            descriptor = os.open(self.path, flags)
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != self._mode and self._mode:
                os.fchmod(descriptor, self._mode)
        except OSError as error:
            raise _refused(self.path, error) from error
        return descriptor

    def _verify(self, descriptor: int, found: os.stat_result) -> None:
        from anyaccel.ledger.filesystem import network_type, test_lock

        if found.st_uid not in (0, os.geteuid()):
            raise StateDirectoryError(
                f"the state directory {self.path} belongs to user {found.st_uid}, who could take the leases of others "
                f"away; it must belong to root or to you",
                hint=f"'chown root {self.path}', or set {VARIABLE} to another directory",
            )
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise StateDirectoryError(
                f"the state directory {self.path} lets users remove each other's files: it is writable for others "
                f"(mode {stat.S_IMODE(found.st_mode):04o}) and not sticky",
                hint=f"'chmod 1777 {self.path}'",
            )
        if network := network_type(descriptor):
            raise StateDirectoryError(
                f"the state directory {self.path} is on a network file system ({network}), where locks of other "
                f"machines' processes look like ours or are not seen",
                hint=f"set {VARIABLE} to a directory on this machine, best on tmpfs",
            )
        self.shared = found.st_mode & stat.S_ISVTX != 0 and found.st_mode & 0o022 != 0
        test_lock(descriptor, self.path)


def find(environ: Mapping[str, str]) -> StateDirectory:
    """Find the state directory that an environment leads to, and make it where that is ours to do.

    Raises:
        StateDirectoryError: When it must not be used.
    """
    chosen = environ.get(VARIABLE)
    if chosen:
        if not os.path.isabs(chosen):
            raise StateDirectoryError(f"{VARIABLE} must be an absolute path (got {chosen!r})")
        return StateDirectory(chosen.rstrip("/") or "/", _MODE_PRIVATE)
    by_root = os.geteuid() == 0 and os.access(os.path.dirname(MACHINE_WIDE), os.W_OK)
    if by_root or os.path.lexists(MACHINE_WIDE):
        return StateDirectory(MACHINE_WIDE, _MODE_SHARED if by_root else None)
    return StateDirectory(f"/dev/shm/anyaccel-{os.geteuid()}", _MODE_PRIVATE)  # noqa: S108 -- its owner is verified


def _refused(path: str, error: OSError) -> StateDirectoryError:
    reason = {
        errno.ELOOP: "it is a symbolic link, which somebody else could turn elsewhere",
        errno.ENOTDIR: "it is no directory, or a symbolic link, which somebody else could turn elsewhere",
    }.get(error.errno or 0, error.strerror)
    return StateDirectoryError(
        f"the state directory {path} cannot be used: {reason}", hint=f"set {VARIABLE} to a directory of your own"
    )
