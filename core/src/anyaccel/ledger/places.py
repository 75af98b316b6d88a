"""Possible places of the state directory, and checks of owner, mode, file system and locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from anyaccel.errors import StateDirectoryError
from anyaccel.ledger.names import boot, hidden_name
from anyaccel.linux.process import UNSEEN
from anyaccel.linux.users import outside, unmapped

VARIABLE = "ANYACCEL_STATE_DIR"
MACHINE_WIDE = "/run/anyaccel"
PRIVATE = "/dev/shm"  # noqa: S108 -- the owner of what is found there is verified
MODE_SHARED = 0o1777  # sticky: users add files and remove only their own
MODE_PRIVATE = 0o700

OPENING = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a state directory."""

_PRIVATE_PLACES = 10  # another user may have made files at the first places, by mistake or intent
_MAKING = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NETWORK = re.compile(
    "9p|acfs|afs|beegfs|ceph|cifs|coda|cvfs|davfs|drvfs|fhgfs|glusterfs|gpfs|ibrix|lustre|ncpfs|nfs|nfs4|orangefs|"
    "panfs|prl_fs|pvfs2|scoutfs|smb2|smb3|smbfs|snfs|vboxsf|virtiofs|vmhgfs|wekafs"
)
_LOCAL_FUSE = ("fuseblk", "fuse.fuse-overlayfs")  # NTFS on a local disk, and the root of rootless containers


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


def places(environ: Mapping[str, str]) -> tuple[list[Location], Callable[[], Iterable[str]]]:
    """Return the places selected by an environment; nothing is opened or made.

    Returns:
        Places of the state directory in order of precedence; and a function that finds the directories of other users,
        whose leases root takes over. For any other user, for root without write access to ``/run``, and for a named
        place, the function finds none.

    Raises:
        StateDirectoryError: When the environment names a relative path.
    """
    chosen = environ.get(VARIABLE)
    if chosen:
        if not os.path.isabs(chosen):
            raise StateDirectoryError(f"{VARIABLE} must be an absolute path (got {chosen!r})")
        return [Location(chosen.rstrip("/") or "/", MODE_PRIVATE)], tuple
    if os.geteuid() == 0 and os.access(os.path.dirname(MACHINE_WIDE), os.W_OK):
        return [Location(MACHINE_WIDE, MODE_SHARED)], private_directories
    own = [Location(path, MODE_PRIVATE, gone_around=True) for path in private_places(outside(os.geteuid()))]
    return [Location(MACHINE_WIDE, None), *own], tuple


def private_places(uid: int) -> list[str]:
    """Return the places of a user's own directory: the first that no other user has occupied is used.

    No other user can make the last place, but it exists only while the user is logged in.

    Args:
        uid: The user, by the number outside of user namespaces.
    """
    first = f"{PRIVATE}/anyaccel-{uid}"
    return [first, *(f"{first}.{number}" for number in range(1, _PRIVATE_PLACES)), f"/run/user/{uid}/anyaccel"]


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
            if stat.S_ISDIR(found.st_mode) and path in private_places(outside(found.st_uid)):
                yield path


def check(descriptor: int, found: os.stat_result, path: str) -> None:
    """Check that only root and the owner of a lease can remove the lease's file.

    The directory must belong to root, to this user, or to a hidden owner who must have the rights of root; and must be
    sticky if its group or others may write to it.

    Args:
        descriptor: The directory.
        found: State of the directory.
        path: Path of the directory.

    Raises:
        StateDirectoryError: When another user could; says why.
        OSError: When the parent of the machine's directory, whose owner is not shown, cannot be opened.
    """
    if found.st_uid not in (0, os.geteuid()) and not _made_outside(path, descriptor, found):
        raise _foreign(path, found.st_uid)
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise StateDirectoryError(
            f"the state directory {path} lets users remove each other's files: it is writable for others "
            f"(mode {stat.S_IMODE(found.st_mode):04o}) and not sticky",
            hint=f"'chmod 1777 {path}'",
        )


def make(path: str, mode: int, fill: Callable[[int], None]) -> None:
    """Make a directory, whatever the umask.

    Args:
        path: Path of the directory.
        mode: Access mode. A directory for all users (:data:`MODE_SHARED`) is made and filled under a hidden name and
            then renamed, in place of an existing empty directory: a request of any user may come next. After a failure
            it is removed with its content; a directory of another mode stays.
        fill: Called with the descriptor of a directory for all users, to fill it before it gets its name; not called
            for other modes. Exceptions pass.

    Raises:
        OSError: When the directory cannot be made. An existing path gives FileExistsError, but for all users ENOTEMPTY
            if it is a filled directory, or ENOTDIR if it is no directory.
    """
    name = path if mode != MODE_SHARED else f"{path}{hidden_name()}"
    os.mkdir(name, MODE_PRIVATE)  # closed until it is filled
    try:
        descriptor = os.open(name, OPENING)
        try:
            if mode == MODE_SHARED:
                fill(descriptor)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        if name != path:
            os.rename(name, path)
    except BaseException:
        if name != path:
            import shutil

            shutil.rmtree(name, ignore_errors=True)
        raise


def _made_outside(path: str, descriptor: int, found: os.stat_result) -> bool:
    """Return whether the owner of a directory, whom the user namespace does not show, must have the rights of root.

    False for a path other than the machine's directory, and for a shown owner. True if the directory is a mount of its
    own, made by the container's administrator, or if the owner of the parent is not shown, either, and this user cannot
    write to the parent.

    Raises:
        OSError: When the parent cannot be opened.
    """
    if path != MACHINE_WIDE or not unmapped(found.st_uid):
        return False
    parent = os.open(os.path.dirname(path), OPENING & ~os.O_NOFOLLOW)
    try:
        writable = os.access(os.path.dirname(path), os.W_OK)
        return mount(parent) != mount(descriptor) or (unmapped(os.fstat(parent).st_uid) and not writable)
    finally:
        os.close(parent)


def _foreign(path: str, uid: int) -> StateDirectoryError:
    """Make the error for a directory of an owner who is neither root nor this user, or is not shown here."""
    if unmapped(uid):
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
    """Make the error for a directory that cannot be opened."""
    reason = {
        errno.ELOOP: "it is a symbolic link, which another user could redirect",
        errno.ENOTDIR: "it is not a directory, or is a symbolic link, which another user could redirect",
    }.get(error.errno or 0, error.strerror)
    return StateDirectoryError(
        f"the state directory {path} cannot be used: {reason}", hint=f"set {VARIABLE} to a directory of your own"
    )


def refuse_network(descriptor: int, path: str) -> None:
    """Check that a directory is on a local file system; an unknown one counts as local.

    FUSE counts as a network: the program behind the mount decides about locks, and cannot be seen.

    Raises:
        StateDirectoryError: When the file system is a network file system.
    """
    name = file_system(descriptor)
    if _NETWORK.fullmatch(name) or (name.startswith("fuse") and name not in _LOCAL_FUSE):
        raise StateDirectoryError(
            f"the state directory {path} is on a network file system ({name}), where locks of other "
            f"machines' processes look like ours or are not seen",
            hint="set ANYACCEL_STATE_DIR to a directory on this machine, best on tmpfs",
        )


def mount(descriptor: int) -> str:
    """Return the mount id of a descriptor of this process, as decimal digits; empty when unknown."""
    with contextlib.suppress(*UNSEEN), open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as info:
        return next((line.split()[1] for line in info if line.startswith("mnt_id:")), "")
    return ""


def file_system(descriptor: int) -> str:
    """Return the type of the file system of a descriptor, by its mount; empty when unknown."""
    wanted = mount(descriptor)
    with contextlib.suppress(*UNSEEN), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for line in table:
            if line.split(" ", 1)[0] == wanted:
                return line.partition(" - ")[2].split(" ", 1)[0]
    return ""


def tested(descriptor: int, user: int) -> bool:
    """Return whether a directory has the marker of a test in this boot, by the user or by root for the user.

    The marker is made by :func:`note_test`; root or the user must own the marker.
    """
    try:
        return os.stat(_marker(user), dir_fd=descriptor, follow_symlinks=False).st_uid in (0, user)
    except FileNotFoundError:
        return False


def test_lock(descriptor: int, path: str) -> bool:
    """Check that a file with a lock of one open file cannot be locked through another open file.

    A file system that ignores ``flock``, or gives each process locks of its own, grants the second lock. The test makes
    a hidden file and removes it.

    Returns:
        True when the directory passed the test; False where no file can be made, which taking devices reports.

    Raises:
        StateDirectoryError: When the second lock is granted, or locking fails in another way.
    """
    name = hidden_name()
    try:
        first = os.open(name, _MAKING, 0o600, dir_fd=descriptor)
    except OSError:
        return False
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A second open file description: for the kernel it is a rival, though both are of this process.
        second = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=descriptor)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(second)
        answer = "granted twice"
    except OSError as error:
        answer = f"refused: {error.strerror}"
    finally:
        os.unlink(name, dir_fd=descriptor)
        os.close(first)
    raise StateDirectoryError(
        f"the state directory {path} does not keep locks: a lock on a file there is {answer}",
        hint="set ANYACCEL_STATE_DIR to a directory on tmpfs",
    )


def note_test(descriptor: int) -> None:
    """Record the test of a directory by a marker file of this user, so that :func:`tested` is true until the next boot.

    A failure is ignored: then the next process tests again.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(_marker(os.geteuid()), _MAKING, 0o644, dir_fd=descriptor))


def _marker(user: int) -> str:
    """Return the name of the file that marks a directory as tested by a user in this boot."""
    return f"checked.{boot()}.{outside(user)}"
