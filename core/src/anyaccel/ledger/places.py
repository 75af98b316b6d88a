"""Where the state directory may be: the environment's, the machine's, or a user's own."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from anyaccel.errors import StateDirectoryError
from anyaccel.ledger.names import hidden_name
from anyaccel.linux.process import UNSEEN
from anyaccel.linux.users import outside, unmapped

VARIABLE = "ANYACCEL_STATE_DIR"
MACHINE_WIDE = "/run/anyaccel"
PRIVATE = "/dev/shm"  # noqa: S108 -- the owner of what is found there is verified
MODE_SHARED = 0o1777
MODE_PRIVATE = 0o700

OPENING = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags with which a state directory is opened."""

_PRIVATE_PLACES = 10


class Location(NamedTuple):
    """Where a state directory may be.

    Attributes:
        path: The path.
        mode: Access mode with which to make it; None when that is not ours to do.
        gone_around: Whether what another user has made there is left alone, and the next place is taken.
    """

    path: str
    mode: int | None
    gone_around: bool = False


def places(environ: Mapping[str, str]) -> tuple[list[Location], Callable[[], Iterable[str]]]:
    """Where an environment leads to.

    Returns:
        Where the state directory may be, those that come before others first; and what finds the directories of other
        users, from whom we take over where we are root.

    Raises:
        StateDirectoryError: When the environment names no absolute path.
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
    """Where a user's own state directory may be: the first, unless another user made something of this name.

    The last can be made by nobody else, but is there only while the user is logged in.

    Args:
        uid: The user, by its number outside of user namespaces.
    """
    first = f"{PRIVATE}/anyaccel-{uid}"
    return [first, *(f"{first}.{number}" for number in range(1, _PRIVATE_PLACES)), f"/run/user/{uid}/anyaccel"]


def private_directories() -> Iterator[str]:
    """Directories of single users, as far as they can be seen; none that another user made."""
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
    """Make sure that nobody can take leases in a directory away but their owners and root.

    Args:
        descriptor: The directory.
        found: Its state.
        path: Its path.

    Raises:
        StateDirectoryError: When it is not; says why.
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
        path: Its path.
        mode: Access mode. One for all users appears at once with what is in it, since each of them may be next.
        fill: Puts in what belongs into one for all users, given its descriptor.

    Raises:
        FileExistsError: When there is something already.
        OSError: When it cannot be made.
    """
    name = path if mode != MODE_SHARED else f"{path}{hidden_name()}"
    os.mkdir(name, MODE_PRIVATE)
    try:
        descriptor = os.open(name, OPENING)
        try:
            if mode == MODE_SHARED:
                fill(descriptor)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)
        if name != path:
            _rename_directory(name, path)
    except BaseException:
        if name != path:  # nobody else uses it
            _remove_directory(name)
        raise


def _made_outside(path: str, descriptor: int, found: os.stat_result) -> bool:
    """Whether the owner of a directory, whom our user namespace does not show, must have the rights of root.

    That is so for the machine's directory where it is a mount of its own, which whoever made the container has put
    there, or where the owner of its parent is not shown, either, and the parent is not ours to write.
    """
    if path != MACHINE_WIDE or not unmapped(found.st_uid):
        return False
    from anyaccel.ledger.filesystem import mount

    parent = os.open(os.path.dirname(path), OPENING & ~os.O_NOFOLLOW)
    try:
        writable = os.access(os.path.dirname(path), os.W_OK)
        return mount(parent) != mount(descriptor) or (unmapped(os.fstat(parent).st_uid) and not writable)
    finally:
        os.close(parent)


def _foreign(path: str, uid: int) -> StateDirectoryError:
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


def _rename_directory(name: str, path: str) -> None:
    """Give a directory its name, unless there is something that it cannot take the place of."""
    try:
        os.rename(name, path)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        raise


def _remove_directory(path: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(path):
            os.unlink(f"{path}/{name}")
        os.rmdir(path)


def refused(path: str, error: OSError) -> StateDirectoryError:
    """Say that a directory cannot be opened."""
    reason = {
        errno.ELOOP: "it is a symbolic link, which somebody else could turn elsewhere",
        errno.ENOTDIR: "it is no directory, or a symbolic link, which somebody else could turn elsewhere",
    }.get(error.errno or 0, error.strerror)
    return StateDirectoryError(
        f"the state directory {path} cannot be used: {reason}", hint=f"set {VARIABLE} to a directory of your own"
    )
