"""The state directory: which one is in force, whether it is fit for that, and the lock for those who publish there.

The one in force is found anew for every look: the machine's as soon as there is one, else the user's own. Root, who
makes the machine's, brings over what users hold in theirs. Leases whose directory was deleted get their files again
before anything is given out. Only taking devices makes a directory; looking where there is none finds nothing.

The lock is on the directory itself. There is no lock file that somebody could own, remove or replace, and whoever has
the right directory open has the right lock. The directory is opened anew for every look, so that one that was deleted
and made again is noticed, threads exclude each other like processes do, and a fork shares no lock with its parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from anyaccel.errors import LedgerBusyError, LedgerError, StateDirectoryError
from anyaccel.ledger.filesystem import note_test, refuse_network, test_lock, tested
from anyaccel.ledger.places import (
    MODE_SHARED,
    OPENING,
    VARIABLE,
    Location,
    check,
    make,
    places,
    refused,
)
from anyaccel.linux import process
from anyaccel.linux.descriptors import list_descriptors, lock_owner
from anyaccel.linux.fork import tidy_in_child

BUSY_SECONDS = 10.0
"""How long the lock may be held by others before somebody must be told; holding it takes some microseconds."""

_BRING_OVER_SECONDS = 1.0
_SPINS = 32
_FIRST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.005

_open: set[int] = set()
_opening: set[object] = set()
_known: dict[tuple[int, int], bool] = {}
"""Directories that this process has opened, by device number and inode, and whether their file system is local."""


@tidy_in_child
def _close_in_child() -> None:
    """Give up directories that other threads of the parent had open: a copy would keep their lock if they died."""
    descriptors = set(_open)
    if _opening:  # forked between the opening of a directory and the moment at which it was noted
        descriptors.update(list_descriptors())
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode) and (found.st_dev, found.st_ino) in _known:
                os.close(descriptor)
    _open.clear()
    _opening.clear()


class NoStateDirectoryError(StateDirectoryError):
    """Raised by a look where there is no directory yet: nothing is held there."""


class StateDirectory:
    """The first of some directories that is there.

    Args:
        places: Where it may be, those that come before others first.
        others: Finds the directories of users in whose place the first one comes: paths.

    Attributes:
        path: Where it is, or would be made first by this user.
        shared: Whether other users can take part.

    Raises:
        StateDirectoryError: When it must not be used; the message says why.
    """

    def __init__(self, places: Sequence[Location], others: Callable[[], Iterable[str]] = tuple) -> None:
        ours = next(place for place in places if place.mode is not None)
        self.path = ours.path
        self.shared = ours.mode == MODE_SHARED
        self._places = tuple(places)
        self._others = others
        self._modes: dict[str, int] = {}
        self._seen: tuple[object, ...] = ()
        self._user = os.geteuid()
        self._noted = False
        with contextlib.suppress(NoStateDirectoryError):
            self.close(self.open())

    def open(self, *, make: bool = False) -> int:
        """Open it, to be given to :meth:`close`.

        Args:
            make: Whether to make it where there is none: for those who take devices only.

        Raises:
            NoStateDirectoryError: When there is none, and it was not to be made.
            StateDirectoryError: When it must not be used (any more).
        """
        token = object()
        _opening.add(token)
        try:
            opened = self._open_first()
            if opened is None and not make:
                raise self._missing()
            place, descriptor, made = (*opened, False) if opened else self._make()
            _open.add(descriptor)
        finally:
            _opening.discard(token)
        try:
            found = os.fstat(descriptor)
            seen = (place.path, found.st_dev, found.st_ino, found.st_uid, found.st_mode)
            # One that was emptied, or made again with the number of the deleted one, lacks the file that says so.
            if seen != self._seen or not tested(descriptor, self._user):
                self._user = os.geteuid()
                _known.setdefault((found.st_dev, found.st_ino), False)
                self._verify(descriptor, found, place.path)
                self._seen, self._noted = seen, tested(descriptor, self._user)
                self.path = place.path
                if found.st_uid == os.geteuid():
                    self._modes[place.path] = stat.S_IMODE(found.st_mode)  # whoever deletes it gets one of this kind
            if made:  # what was published before it had its name
                self._bring_over(descriptor, clear=True)
        except OSError as error:
            self.close(descriptor)
            raise self.fault(error) from error
        except BaseException:
            self.close(descriptor)
            raise
        return descriptor

    @contextlib.contextmanager
    def opened(self, *, make: bool = False) -> Iterator[int]:
        """Open it for the time of a context, in which what the kernel refuses is an error of the ledger.

        Args:
            make: As of :meth:`open`, which says what is raised, too.

        Raises:
            LedgerError: When the kernel refuses something in the context.
        """
        directory = self.open(make=make)
        try:
            yield directory
        except OSError as error:
            raise self.fault(error) from error
        finally:
            self.close(directory)

    def _open_first(self) -> tuple[Location, int] | None:
        """Open the first place where there is a directory that may be ours."""
        for place in self._places:
            try:
                descriptor = os.open(place.path, OPENING)
            except FileNotFoundError:
                continue
            except OSError as error:
                if place.gone_around:
                    continue
                raise refused(place.path, error) from error
            if not place.gone_around or os.fstat(descriptor).st_uid == os.geteuid():
                return place, descriptor
            os.close(descriptor)
        return None

    def _make(self) -> tuple[Location, int, bool]:
        """Make the directory at the first place where we may, and open it; what a rival has made there is as good.

        Returns:
            The place, the directory, and whether we have made one that comes in the place of those of users.
        """
        reasons = []
        for place in self._places:
            mode = self._modes.get(place.path, place.mode)
            if mode is None:
                continue
            made = False
            try:
                make(place.path, mode, partial(self._bring_over, clear=False))
                made = mode == MODE_SHARED
            except FileExistsError:
                reasons.append(f"{place.path} cannot be made: another user has made something there")
            except OSError as error:
                reasons.append(f"{place.path} cannot be made: {error.strerror}")
            if opened := self._open_first():
                if opened[0] is not place:  # one that comes first was made meanwhile: ours would seem to be in use
                    with contextlib.suppress(OSError):
                        os.rmdir(place.path)
                    made = False
                return *opened, made
        raise StateDirectoryError(
            f"the state directory {'; '.join(reasons) or f'{self.path} does not exist'}",
            hint=f"make it, or set {VARIABLE} to another one",
        )

    def _missing(self) -> NoStateDirectoryError:
        parent = os.path.dirname(self.path)
        if len(self._places) == 1 and not os.path.isdir(parent):
            raise StateDirectoryError(
                f"the state directory {self.path} cannot be made: {os.strerror(errno.ENOENT)}",
                hint=f"make {parent}, or set {VARIABLE}",
            )
        return NoStateDirectoryError(
            f"the state directory {self.path} does not exist: no devices have been taken yet",
            hint="'anyaccel run' makes it",
        )

    def close(self, descriptor: int) -> None:
        """Close what :meth:`open` returned; it should be unlocked, in case that a child was forked meanwhile."""
        _open.discard(descriptor)
        with contextlib.suppress(OSError):  # the kernel closes it even where it reports an error
            os.close(descriptor)

    def lock(self, descriptor: int, seconds: float) -> bool:
        """Lock the directory, once no other process or thread has it locked; False when that takes longer."""
        deadline = time.monotonic() + seconds
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
                import random  # it takes longer than the lock, which is mostly free

                time.sleep(random.uniform(pause / 2, pause))  # noqa: S311 -- so that rivals do not march in step
                pause = min(_LONGEST_PAUSE, pause * 1.5)  # many must not keep the one who has it from the processor
            else:
                return False

    def unlock(self, descriptor: int) -> None:
        """Unlock the directory if it is locked: explicitly, since a child that was forked meanwhile has a copy."""
        with contextlib.suppress(OSError):  # it is going to be closed
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def replaced(self, descriptor: int) -> bool:
        """Whether the directory was deleted or emptied since it was opened, or is in force no more.

        Who publishes asks with the directory locked, and who brings leases over locks it, too: so no lease is left.
        """
        found = os.fstat(descriptor)
        if found.st_nlink == 0 or (self._noted and not tested(descriptor, self._user)):
            return True
        if len(self._places) == 1:
            return False
        for place in self._places:
            with contextlib.suppress(OSError):
                there = os.lstat(place.path)
                if os.path.samestat(there, found):
                    return False
                if not place.gone_around or (stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()):
                    return True
        return True

    def remove(self, name: str, *, lost: bool) -> None:
        """Remove the file of a lease of ours.

        Args:
            name: Its name.
            lost: Whether the file that we have is in no directory any more: then those are removed that were made
                again in its place.

        Raises:
            OSError: When it is there and cannot be removed.
        """
        if not lost:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{name}")
                return
        from anyaccel.ledger.recovery import remove

        for place in self._places:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                remove(place.path, name)

    def owner(self, descriptor: int) -> int | None:
        """Process that has the directory locked; None when it cannot be seen."""
        return lock_owner(os.fstat(descriptor))

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

    def _verify(self, descriptor: int, found: os.stat_result, path: str) -> None:
        check(descriptor, found, path)
        self.shared = found.st_mode & stat.S_ISVTX != 0 and found.st_mode & 0o022 != 0
        identity, is_tested = (found.st_dev, found.st_ino), tested(descriptor, self._user)
        if not (is_tested and _known[identity]):
            refuse_network(descriptor, path)
        if not is_tested and test_lock(descriptor, path):
            from anyaccel.ledger.recovery import recover

            recover(descriptor, [place.path for place in self._places], ())
            note_test(descriptor)
        _known[identity] = True

    def bring_over(self) -> None:
        """Make the directory where there is none, and bring over what users hold in directories of their own.

        Raises:
            StateDirectoryError: When it cannot be made.
            LedgerError: When the kernel refuses something.
        """
        with self.opened(make=True) as descriptor:
            self._bring_over(descriptor, clear=True)

    def _bring_over(self, descriptor: int, *, clear: bool) -> None:
        """Bring over what users hold in directories of their own, which are locked meanwhile for a second at most.

        Args:
            descriptor: The directory that comes in their place.
            clear: Whether to remove the others.

        Raises:
            OSError: When something cannot be written.
        """
        from anyaccel.ledger import recovery

        former: list[tuple[str, int]] = []
        try:
            for path in self._others():
                try:
                    former.append((path, os.open(path, OPENING)))
                except OSError as error:
                    if error.errno in process.SCARCE:
                        raise
            for _, source in former:
                self.lock(source, _BRING_OVER_SECONDS)
            recovery.recover(descriptor, (), former)
            for path, source in former if clear else ():
                recovery.clear(source)
                with contextlib.suppress(OSError):  # it has files that are none of ours
                    os.rmdir(path)
        finally:
            for _, source in former:
                self.unlock(source)
                os.close(source)


def find(environ: Mapping[str, str]) -> StateDirectory:
    """Find the state directory that an environment leads to.

    Raises:
        StateDirectoryError: When it must not be used.
    """
    found, others = places(environ)
    return StateDirectory(found, others)
