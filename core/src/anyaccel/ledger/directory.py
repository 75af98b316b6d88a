"""The state directory: finding, checking, making and locking the directory of leases.

The active directory is looked up for each operation: the machine's directory if it exists, else the user's own. Root
makes the machine's directory, and moves the leases of users there. After a directory was deleted, the files of active
leases are made again before devices are given out. Only taking devices makes a directory; reading a missing directory
finds no leases.

The lock is on the directory itself: there is no lock file that another user could own, remove or replace. Each
operation opens the directory again. So a deleted and remade directory is noticed, threads exclude each other like
processes, and a forked child shares no lock with its parent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from anyaccel._typing import NamedTuple
from anyaccel.errors import LeaseNotFoundError, LedgerBusyError, LedgerError, StateDirectoryError
from anyaccel.ledger.entries import boot, hidden_name
from anyaccel.linux import UNSEEN, lock_owner, process, tidy_in_child
from anyaccel.text import shown

VARIABLE = "ANYACCEL_STATE_DIR"
MACHINE_WIDE = "/run/anyaccel"
PRIVATE = "/dev/shm"  # noqa: S108 -- the owner of what is found there is verified
MODE_SHARED = 0o1777  # sticky: users add files and remove only their own
MODE_PRIVATE = 0o700

OPENING = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a state directory."""

_PRIVATE_PLACES = 10  # another user may have made files at the first places, by mistake or intent
_MARKING = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NETWORK = (
    "|9p|acfs|afs|beegfs|ceph|cifs|coda|cvfs|davfs|drvfs|fhgfs|glusterfs|gpfs|ibrix|lustre|ncpfs|nfs|nfs4|orangefs|"
    "panfs|prl_fs|pvfs2|scoutfs|smb2|smb3|smbfs|snfs|vboxsf|virtiofs|vmhgfs|wekafs|"
)
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs")  # NTFS on a local disk, and the root of rootless containers

BUSY_SECONDS = 10.0
"""Seconds that other processes may hold the lock before an error; a publication holds it for microseconds."""

_BRING_OVER_SECONDS = 1.0  # a stopped process may keep a user's own directory locked: root goes on without it
_RUNNING = ("R", "S")
"""States of a process that makes progress, as in ``/proc/PID/stat``."""
_SPINS = 32  # yields before the first sleep: a publication takes less time than a sleep
_FIRST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.005

_open: set[int] = set()
_local: set[tuple[int, int]] = set()
"""Directories on local file systems, by device number and inode: looking takes longer than a lease."""


@tidy_in_child
def _close_in_child() -> None:
    """Close the directories that any thread of the parent had open, also the forking thread.

    Copies in a forked child would keep the parent's lock.
    """
    while _open:
        with contextlib.suppress(OSError):
            os.close(_open.pop())


class Location(NamedTuple):
    """A possible place of the state directory.

    Attributes:
        path: The path.
        mode: Access mode of a new directory; None if this user may not make one here.
        gone_around: Whether to skip a place that another user has occupied, instead of refusing it.
    """

    path: str
    mode: int | None
    gone_around: bool = False


class NoStateDirectoryError(LeaseNotFoundError, StateDirectoryError):
    """Raised when reading a state directory that does not exist: no lease is active, and no request waits."""


class StateDirectory:
    """The first existing directory of several places. A new object opens and checks the directory, if there is one.

    Args:
        places: Possible places, in order of precedence.
        others: Returns the paths of users' own directories, which the first place replaces.

    Attributes:
        path: Path of the directory, or of the first place where this user would make one.
        shared: Whether other users can take part.

    Raises:
        StateDirectoryError: When the directory cannot be trusted; the message says why. A missing one is no error.
        LedgerError: When a system call fails.
    """

    def __init__(self, places: Sequence[Location], others: Callable[[], Iterable[str]] = tuple) -> None:
        ours = next(place for place in places if place.mode is not None)
        self.path = ours.path
        self.shared = ours.mode == MODE_SHARED
        self._places = tuple(places)
        self._others = others
        self._seen: tuple[object, ...] = ()
        self._noted = False
        with contextlib.suppress(NoStateDirectoryError):
            self.close(self.open())

    def open(self, *, make: bool = False) -> int:
        """Open the directory; pass the descriptor to :meth:`close`.

        A directory that is new to this object, has a new owner or mode, or lacks the marker of a recovery, is checked:
        owner, mode, file system. Without the marker, missing files of active leases are also made again, and the marker
        is written, unless this user cannot write to the directory. A made directory for all users takes over users'
        own. Each check updates :attr:`path` and :attr:`shared`.

        Args:
            make: Whether to make a missing directory: only to take devices.

        Raises:
            NoStateDirectoryError: When the directory is missing and ``make`` is False.
            StateDirectoryError: When the directory cannot be trusted (any more), or cannot be made.
            LedgerError: When a system call fails.
        """
        opened = self._open_first()
        if opened is None and not make:
            raise NoStateDirectoryError(
                f"the state directory {self.path} does not exist: no devices have been taken yet",
                hint="'anyaccel run' makes it",
            )
        place, descriptor = opened or self._make()
        _open.add(descriptor)
        try:
            found = os.fstat(descriptor)
            seen = (place.path, found.st_dev, found.st_ino, found.st_uid, found.st_mode)
            # A directory that was emptied, or remade with the inode of the deleted one, lacks the marker file.
            marked = is_marked(descriptor)
            if seen != self._seen or not marked:
                self._verify(descriptor, found, place.path, marked=marked)
                self._noted = marked or self._recover(descriptor)
                self._seen, self.path = seen, place.path
        except OSError as error:
            self.close(descriptor)
            raise self.fault(error) from error
        except BaseException:
            self.close(descriptor)
            raise
        return descriptor

    @contextlib.contextmanager
    def opened(self, *, make: bool = False) -> Iterator[int]:
        """Context with the open directory, in which errors of the kernel are raised as errors of the ledger.

        Args:
            make: As for :meth:`open`, which also lists the errors.

        Raises:
            LedgerError: When a system call fails in the context.
        """
        directory = self.open(make=make)
        try:
            yield directory
        except OSError as error:
            raise self.fault(error) from error
        finally:
            self.close(directory)

    @contextlib.contextmanager
    def locked(self, *, make: bool = False) -> Iterator[int]:
        """Context with the open and locked directory; see :meth:`opened`.

        Args:
            make: Whether to make a missing directory.

        Raises:
            NoStateDirectoryError: When the directory is missing, and ``make`` is False.
            LedgerBusyError: When the directory stays locked for ``BUSY_SECONDS``, by another process or thread, or by
                an outer context of this thread.
            LedgerError: When the directory cannot be used, or a system call fails in the context.
        """
        with self.opened(make=make) as directory:
            self.lock(directory)
            try:
                yield directory
            finally:
                self.unlock(directory)

    def _open_first(self) -> tuple[Location, int] | None:
        """Open the first place that has a directory; at a place that may be skipped, only a directory of this user.

        The owner at any other place is checked later. Any error of opening a place that may be skipped is ignored.

        Returns:
            The place and the descriptor; None if no place has such a directory.

        Raises:
            StateDirectoryError: When a place that must not be skipped cannot be opened.
        """
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

    def _make(self) -> tuple[Location, int]:
        """Make and open the directory at the first possible place. A directory of a concurrent process is used as well.

        If a place of higher precedence has appeared meanwhile, that place is opened, and the empty directory that was
        made is removed.

        Raises:
            StateDirectoryError: When no place can be used.
        """
        reasons = []
        for place in self._places:
            if place.mode is None:
                continue
            try:
                if place.mode == MODE_SHARED:
                    self._make_shared(place.path)
                else:
                    os.mkdir(place.path, place.mode)
            except FileExistsError:
                reasons.append(f"{place.path} cannot be made: another user has made something there")
            except OSError as error:
                reasons.append(f"{place.path} cannot be made: {error.strerror}")
            if opened := self._open_first():
                if opened[0] is not place:  # a place of higher precedence was made meanwhile
                    with contextlib.suppress(OSError):
                        os.rmdir(place.path)
                return opened
        raise StateDirectoryError(
            f"the state directory {'; '.join(reasons) or f'{self.path} does not exist'}",
            hint=f"make it, or set {VARIABLE} to another one",
        )

    def close(self, descriptor: int) -> None:
        """Close a descriptor of :meth:`open`, ignoring errors.

        Unlock before: a child that was forked meanwhile may have a copy.
        """
        _open.discard(descriptor)
        with contextlib.suppress(OSError):  # the kernel closes it even where it reports an error
            os.close(descriptor)

    def lock(self, descriptor: int, seconds: float = BUSY_SECONDS, subject: str = "") -> None:
        """Lock the directory, or another open file, as soon as no other process or thread has the lock.

        The wait yields the processor a few times, then polls with random pauses, which grow to 5 ms. The seconds count
        anew as long as the lock changes hands: many processes that take turns are no error.

        Args:
            descriptor: The open directory or file.
            seconds: Seconds for which one owner may keep the lock before an error.
            subject: What is locked, for the error; the state directory when empty.

        Raises:
            LedgerBusyError: When one owner keeps the lock for that long.
            OSError: When the file system refuses the lock for another reason.
        """
        spins, pause = 0, _FIRST_PAUSE
        turn: object = None
        deadline = 0.0
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                spins += 1
            else:
                return
            if spins < _SPINS:
                os.sched_yield()
                continue
            if (now := time.monotonic()) >= deadline:
                former, turn, deadline = turn, _lock_turn(descriptor), now + seconds
                if turn == former:
                    raise self._busy(lock_owner(os.fstat(descriptor)), seconds, subject)
            time.sleep(draw_pause(pause / 2, pause))
            pause = min(_LONGEST_PAUSE, pause * 1.5)  # leave the processor to the owner of the lock

    def unlock(self, descriptor: int) -> None:
        """Unlock the directory explicitly, ignoring errors.

        A child that was forked meanwhile has a copy of the descriptor.
        """
        with contextlib.suppress(OSError):  # the descriptor is closed next
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def replaced(self, descriptor: int) -> bool:
        """Return whether the directory was deleted or emptied since it was opened, or is not the active one any more.

        Emptied means that the marker of a recovery is gone; without a marker at the check, this goes unnoticed.

        A publisher calls this with the directory locked, and a migration locks the directory, too: so no lease is left
        behind. An OSError passes.
        """
        found = os.fstat(descriptor)
        if found.st_nlink == 0 or (self._noted and not is_marked(descriptor)):
            return True
        for place in self._places:
            with contextlib.suppress(OSError):
                there = os.lstat(place.path)
                if os.path.samestat(there, found):
                    return False
                if not place.gone_around or (stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid()):
                    return True
        return True

    def remove(self, name: str, *, lost: bool) -> None:
        """Remove the file of an own lease; a missing file is no error.

        If the file is lost, or missing in the active directory, the files that were made again for the lease and its
        device are removed from every place, also with other processes in their names.

        Args:
            name: Name of the file.
            lost: Whether the open file was unlinked by another process.

        Raises:
            OSError: When a file exists and cannot be removed, or a place cannot be listed.
        """
        if not lost:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{name}")
                return
        from anyaccel.ledger.recovery import remove

        for place in self._places:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                remove(place.path, name)

    def _busy(self, pid: int | None, seconds: float, subject: str) -> LedgerBusyError:
        """Make the error that names the process which has had the directory, or the subject, locked for too long.

        Args:
            pid: The process; None if it cannot be seen.
            seconds: Seconds for which the lock was waited for.
            subject: What is locked; the state directory when empty.
        """
        letter = process.state(pid) if pid else ""
        condition = {"T": ", which is stopped", "t": ", which is being traced", "D": ", which is stuck"}.get(letter, "")
        who = f"process {pid}{condition}" if pid else "a process that cannot be seen from here"
        hint = f"let it go on with 'kill -CONT {pid}', or end it" if condition else "end it, then try again"
        what = subject or f"the state directory {self.path}"
        return LedgerBusyError(f"{what} has been locked for {seconds:.3g} s by {who}", hint=hint)

    def fault(self, error: OSError) -> LedgerError:
        """Make the error for a failed system call in the directory.

        The error is a StateDirectoryError for want of permission or on a read-only file system, else a LedgerError.
        """
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            way_out = (
                "mount its file system for writing"
                if error.errno == errno.EROFS
                else f"make it writable for all, as with 'chmod 1777 {self.path}'"
            )
            return StateDirectoryError(
                f"the state directory {self.path} cannot be written: {error.strerror}",
                hint=f"{way_out}, or set {VARIABLE}",
            )
        return LedgerError(
            f"the state directory {self.path} could not be used: {error.strerror or error}",
            hint=f"free space there, or set {VARIABLE} to a directory on another file system"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "",
        )

    def _verify(self, descriptor: int, found: os.stat_result, path: str, *, marked: bool) -> None:
        """Check an opened directory, with or without the marker of a recovery in this boot; update :attr:`shared`.

        Raises:
            StateDirectoryError: When the directory cannot be trusted: owner, mode, or network file system.
            OSError: When another system call fails.
        """
        check(found, path)
        self.shared = found.st_mode & stat.S_ISVTX != 0 and found.st_mode & 0o022 != 0
        # Without the marker, the inode may be that of a deleted directory.
        if not marked or (found.st_dev, found.st_ino) not in _local:
            refuse_network(descriptor, path)
            _local.add((found.st_dev, found.st_ino))

    def _recover(self, descriptor: int) -> bool:
        """Make the files of active leases again, and mark the directory; do nothing if no file can be made there.

        Returns:
            Whether the directory is marked. If that fails, the next opening looks again.

        Raises:
            OSError: When a file of a lease cannot be made again, or a lock cannot be tested.
        """
        name = hidden_name()
        try:
            os.close(os.open(name, _MARKING, 0o644, dir_fd=descriptor))
        except OSError:  # read-only, full, or deleted meanwhile: taking devices reports that
            return False
        from anyaccel.ledger.recovery import recover

        try:
            recover(descriptor, [place.path for place in self._places], ())
            with contextlib.suppress(OSError):
                os.rename(name, _marker(), src_dir_fd=descriptor, dst_dir_fd=descriptor)
                return True
            return False
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=descriptor)

    def bring_over(self) -> None:
        """Make the directory if it is missing; as root, move users' own leases into the machine's directory.

        Another user moves nothing, and nothing is moved into a directory that the environment names. Tickets and leases
        of other versions in users' own directories are deleted, not moved. The emptied directories are removed; a
        directory with drains or files of other programs stays, with these files alone.

        Raises:
            StateDirectoryError: When the directory cannot be trusted or made.
            LedgerError: When a system call fails.
        """
        with self.opened(make=True) as descriptor:
            self._bring_over(descriptor)

    def _make_shared(self, path: str) -> None:
        """Make a directory for all users under a hidden name, bring leases over, and give it its name.

        An existing empty directory is replaced. After a failure, the hidden directory is removed with its content.

        Raises:
            OSError: When the directory cannot be made: ENOTEMPTY for a filled directory, ENOTDIR for another file.
        """
        name = f"{path}{hidden_name()}"
        os.mkdir(name, MODE_PRIVATE)  # closed until it is filled: no user may make the file of another user's lease

        def publish() -> None:
            os.chmod(name, MODE_SHARED)  # whatever the umask is
            os.rename(name, path)

        try:
            descriptor = os.open(name, OPENING)
            try:
                self._bring_over(descriptor, publish)
            finally:
                os.close(descriptor)
        except BaseException:
            import shutil

            shutil.rmtree(name, ignore_errors=True)
            raise

    def _bring_over(self, descriptor: int, publish: Callable[[], None] = lambda: None) -> None:
        """Make the files of active leases again in the directory that replaces users' own, and remove the users' own.

        Deleted files of leases are made again, too, if a visible process has their locks. Leases of other versions are
        lost. The users' directories are locked meanwhile, each if the lock is free within a second; without the lock, a
        directory is treated alike. A directory that cannot be opened is skipped; one with other files, such as drains,
        stays with these.

        Args:
            descriptor: The directory that replaces users' own.
            publish: Called between both steps, with the users' directories locked: a process that gets the lock later
                finds the new directory.

        Raises:
            OSError: When a file cannot be written, a directory cannot be read or locked, or no descriptor is left.
        """
        from anyaccel.ledger import recovery

        former: list[tuple[str, int]] = []
        with contextlib.ExitStack() as rest:
            for path in self._others():
                try:
                    source = os.open(path, OPENING)
                except OSError as error:
                    if error.errno in process.SCARCE:
                        raise
                    continue
                rest.callback(os.close, source)
                rest.callback(self.unlock, source)
                with contextlib.suppress(LedgerBusyError):
                    self.lock(source, _BRING_OVER_SECONDS)
                former.append((path, source))
            recovery.recover(descriptor, (), former)
            publish()
            for path, source in former:
                recovery.clear(source)
                with contextlib.suppress(OSError):  # the directory has files of other programs
                    os.rmdir(path)


def _lock_turn(descriptor: int) -> tuple[int | None, int]:
    """Return the owner of a lock and, if that runs or is unknown, the modification time: both change with the owner.

    The time of the directory tells turns of the threads of one process apart, and turns while the owner is unknown: a
    lock that changes hands while the kernel's list of locks is read can be missing there.
    """
    found = os.fstat(descriptor)
    owner = lock_owner(found)
    return owner, found.st_mtime_ns if owner is None or process.state(owner) in _RUNNING else 0


def find(environ: Mapping[str, str]) -> StateDirectory:
    """Find the state directory for an environment, and check an existing one; a missing directory is not made.

    The check may write to the directory: see :meth:`StateDirectory.open`. Root takes the leases of users' own
    directories over into the machine's, unless ``/run`` is closed to root or the environment names a directory.

    Raises:
        StateDirectoryError: When the directory cannot be trusted, when the environment names a relative path, or a path
            whose parent is missing, or when this is not Linux.
        LedgerError: When a system call fails.
    """
    if sys.platform != "linux":
        raise StateDirectoryError(f"leases need Linux (this is {sys.platform}); devices can still be listed")
    chosen = environ.get(VARIABLE)
    if chosen:
        if not os.path.isabs(chosen):
            raise StateDirectoryError(f"{VARIABLE} must be an absolute path (got {shown(chosen)})")
        path = chosen.rstrip("/") or "/"
        if not os.path.isdir(parent := os.path.dirname(path)):
            raise StateDirectoryError(f"{VARIABLE} must be in a directory (got {chosen!r})", hint=f"make {parent}")
        return StateDirectory([Location(path, MODE_PRIVATE)])
    if os.geteuid() == 0 and os.access(os.path.dirname(MACHINE_WIDE), os.W_OK):
        return StateDirectory([Location(MACHINE_WIDE, MODE_SHARED)], private_directories)
    own = [
        Location(path, MODE_PRIVATE, gone_around=True) for path in private_places(process.find_outer_user(os.geteuid()))
    ]
    return StateDirectory([Location(MACHINE_WIDE, None), *own])


def private_places(uid: int) -> list[str]:
    """Return the paths, best first, of which a user's own directory is the first that no other user has occupied.

    Nothing is opened. No other user can make the last place, but it exists only while the user is logged in.

    Args:
        uid: The user, by the number outside of user namespaces.
    """
    first = f"{PRIVATE}/anyaccel-{uid}"
    return [first, *(f"{first}.{number}" for number in range(1, _PRIVATE_PLACES)), f"/run/user/{uid}/anyaccel"]


def is_named(path: str) -> bool:
    """Return whether an environment named a state directory: it is neither the machine's nor one of this user's own."""
    return path != MACHINE_WIDE and path not in private_places(process.find_outer_user(os.geteuid()))


def private_directories() -> Iterator[str]:
    """Yield the paths of visible directories of single users, own ones too.

    Directories that another user made in their place are skipped, and so are unreadable parents.
    """
    candidates = []
    for parent in (PRIVATE, "/run/user"):
        with contextlib.suppress(*UNSEEN):
            names = [name for name in os.listdir(parent) if parent != PRIVATE or name.startswith("anyaccel-")]
            candidates += [f"{parent}/{name}" + "/anyaccel" * (parent != PRIVATE) for name in names]
    for path in candidates:
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if stat.S_ISDIR(found.st_mode) and path in private_places(process.find_outer_user(found.st_uid)):
                yield path


def check(found: os.stat_result, path: str) -> None:
    """Check that no other user but root can remove the files of this user's leases.

    The directory must belong to root, to this user, or to a hidden owner who must have the rights of root; and must be
    sticky if its group or others may write to it.

    Args:
        found: State of the directory.
        path: Path of the directory.

    Raises:
        StateDirectoryError: When another user could; says why.
        OSError: When the parent of the machine's directory, whose owner is not shown, cannot be examined.
    """
    if found.st_uid not in (0, os.geteuid()) and not _made_outside(path, found.st_uid):
        raise _foreign(path, found.st_uid)
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise StateDirectoryError(
            f"the state directory {path} lets users remove each other's files: it is writable for others "
            f"(mode {stat.S_IMODE(found.st_mode):04o}) and not sticky",
            hint=f"'chmod 1777 {path}'",
        )


def _made_outside(path: str, owner: int) -> bool:
    """Return whether the owner of a directory, whom the user namespace does not show, must have the rights of root.

    False for a path other than the machine's directory, and for a shown owner. True if the directory is a mount, made
    by the container's administrator, or if the owner of the parent is not shown, either, and this user cannot write to
    the parent.

    Raises:
        OSError: When the parent cannot be examined.
    """
    if path != MACHINE_WIDE or not process.is_user_unmapped(owner):
        return False
    parent = os.path.dirname(path)
    return os.path.ismount(path) or (
        process.is_user_unmapped(os.stat(parent).st_uid) and not os.access(parent, os.W_OK)
    )


def _foreign(path: str, uid: int) -> StateDirectoryError:
    """Make the error for a directory of another user, or of an owner without a number in this user namespace."""
    if process.is_user_unmapped(uid):
        return StateDirectoryError(
            f"the state directory {path} belongs to a user who has no number in this user namespace (shown as {uid}), "
            f"so that it cannot be told whether that is root",
            hint=f"mount the machine's own at {MACHINE_WIDE} of the container, or set {VARIABLE} to one of your own",
        )
    return StateDirectoryError(
        f"the state directory {path} belongs to user {uid}, who could take the leases of others away; it must belong "
        f"to root or to you",
        hint=f"'chown root {path}', or set {VARIABLE} to another directory",
    )


def refused(path: str, error: OSError) -> StateDirectoryError:
    """Make the error for a directory that cannot be opened because of ``error``; a possible symbolic link is named."""
    reason = {
        errno.ELOOP: "it is a symbolic link, which another user could redirect",
        errno.ENOTDIR: "it is not a directory, or is a symbolic link, which another user could redirect",
    }.get(error.errno or 0, error.strerror)
    return StateDirectoryError(
        f"the state directory {path} cannot be used: {reason}", hint=f"set {VARIABLE} to a directory of your own"
    )


def refuse_network(descriptor: int, path: str) -> None:
    """Check that a directory is on a local file system; an unknown one counts as local.

    FUSE counts as a network, except in :data:`_LOCAL_FUSE`: the program behind the mount decides about locks, and
    cannot be seen.

    Raises:
        StateDirectoryError: When the file system is a network file system.
    """
    name = file_system(descriptor)
    if f"|{name}|" in _NETWORK or (name.startswith("fuse") and name not in _LOCAL_FUSE):
        raise StateDirectoryError(
            f"the state directory {path} is on a network file system ({name}), where locks of other "
            f"machines' processes look like ours or are not seen",
            hint="set ANYACCEL_STATE_DIR to a directory on this machine, best on tmpfs",
        )


def file_system(descriptor: int) -> str:
    """Return the type of the file system of a descriptor, by its mount; empty when unknown.

    An OSError for want of descriptors or memory passes.
    """
    with contextlib.suppress(*UNSEEN):
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="utf-8") as info:
            wanted = next((line.split()[1] for line in info if line.startswith("mnt_id:")), "")
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            for line in table:
                if line.split(" ", 1)[0] == wanted:
                    return line.partition(" - ")[2].split(" ", 1)[0]
    return ""


def draw_pause(least: float, most: float) -> float:
    """Return a random pause between two bounds, in seconds, so that rivals do not poll in lockstep."""
    # Not random.uniform(): the program may have seeded that generator, and it takes longer to load than the lock.
    return least + (most - least) * int.from_bytes(os.urandom(4)) / 0xFFFFFFFF


def is_marked(descriptor: int) -> bool:
    """Return whether a directory has the marker of a recovery in this boot, by this user or by root for this user.

    Root or this user must own the marker. An OSError other than for a missing marker passes.
    """
    try:
        return os.stat(_marker(), dir_fd=descriptor, follow_symlinks=False).st_uid in (0, os.geteuid())
    except FileNotFoundError:
        return False


def _marker() -> str:
    """Return the name of the file by which this user marks a directory after a recovery in this boot."""
    return f"checked.{boot()}.{process.find_outer_user(os.geteuid())}"
