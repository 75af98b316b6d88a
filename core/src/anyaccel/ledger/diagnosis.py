"""What is wrong with the state directory itself, and the way out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from anyaccel.errors import LedgerError
from anyaccel.ledger.directory import MACHINE_WIDE, VARIABLE, StateDirectory, find
from anyaccel.ledger.filesystem import file_system
from anyaccel.ledger.listing import Listing, debris, life, read
from anyaccel.ledger.lockfile import Life, look
from anyaccel.ledger.record import user_name
from anyaccel.model import Finding, Severity

PRIVATE = "/dev/shm"  # noqa: S108 - nothing is written there
LEAST_BYTES, LEAST_FILES = 1 << 16, 16
"""Room below which the next lease may not fit."""
MANY = 100
"""Left files from which on every look at the directory takes noticeably longer."""
_LOCK_SECONDS = 1.0


def diagnose(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Look for what is wrong with the state directory.

    Args:
        environ: The environment that says where it is.

    Returns:
        The findings, the last of which says where leases are kept; only what is wrong when that is nowhere.
    """
    try:
        state = find(environ)
        directory = state.open()
    except LedgerError as error:
        return (_fail(str(error), error.hint or f"set {VARIABLE} to a directory on tmpfs that belongs to you"),)
    try:
        return (
            *_access(state, directory),
            *_others(state, environ),
            *_left(state, directory),
            _summary(state, directory, environ),
        )
    except OSError as error:
        fault = state.fault(error)
        return (_fail(str(fault), fault.hint or f"set {VARIABLE} to another directory"),)
    finally:
        state.close(directory)


def _access(state: StateDirectory, directory: int) -> Iterator[Finding]:
    """What keeps everybody from taking a lease."""
    room = os.statvfs(directory)
    if room.f_bavail * room.f_frsize < LEAST_BYTES or (room.f_files and room.f_favail < LEAST_FILES):
        message = f"the file system of the state directory {state.path} is full, so that nobody can take devices"
        yield _fail(message, f"remove what fills it, or set {VARIABLE} to a directory on another one")
    if not os.access(state.path, os.W_OK | os.X_OK):
        read_only = room.f_flag & os.ST_RDONLY
        message = f"the state directory {state.path} cannot be written by this user"
        fix = f"mount it for writing, or set {VARIABLE}" if read_only else f"sudo chmod 1777 {state.path}"
        yield _fail(message + ", since its file system is read-only" * bool(read_only), fix)
    if state.lock(directory, _LOCK_SECONDS):
        state.unlock(directory)
    else:
        busy = state.busy(state.owner(directory), _LOCK_SECONDS)
        yield _fail(str(busy), busy.hint)


def _others(state: StateDirectory, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Users who keep leases of the same devices where we do not look."""
    if state.shared or environ.get(VARIABLE):
        return
    users = []
    with contextlib.suppress(OSError), os.scandir(PRIVATE) as entries:
        for entry in entries:
            if entry.name.startswith("anyaccel-") and entry.path != state.path:
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if entry.name == f"anyaccel-{found.st_uid}":
                        users.append(user_name(found.st_uid))
    if users:
        message = (
            f"{', '.join(sorted(users))} keep{'s' * (len(users) == 1)} leases in a directory of their own, as you do:"
            " each of you may be given the same devices"
        )
        yield Finding(severity=Severity.WARN, message=message, fix=_share())


def _left(state: StateDirectory, directory: int) -> Iterator[Finding]:
    """Files of those who are gone that we cannot remove: each costs everybody a look. Ours go by themselves."""
    users: dict[str, int] = {}
    dead = _dead(directory, read(directory))
    for name in dead:
        with contextlib.suppress(OSError):
            owner = os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
            if os.geteuid() not in (0, owner, os.fstat(directory).st_uid):
                users[user_name(owner)] = users.get(user_name(owner), 0) + 1
    if users:
        count = sum(users.values())
        message = (
            f"{count} file{'s' * (count > 1)} in {state.path} {'are' if count > 1 else 'is'} left from processes of"
            f" {', '.join(sorted(users))} that have ended, and only they or root can remove"
            f" {'them' if count > 1 else 'it'}"
        )
        fix = "nothing, where they are few: they go when one of these users, or root, next takes devices"
        severity = Severity.WARN if count >= MANY else Severity.OK
        yield Finding(severity=severity, message=message, fix=fix)


def _dead(directory: int, listing: Listing) -> Iterator[str]:
    yield from (lease.name for lease in listing.leases if life(directory, lease) is Life.OVER)
    yield from (name for name in listing.tickets if look(directory, name)[0] is Life.OVER)
    yield from debris(directory, listing.hidden)


def _summary(state: StateDirectory, directory: int, environ: Mapping[str, str]) -> Finding:
    kind = file_system(directory)
    where = f"leases are kept in {state.path}" + (f" ({kind})" if kind else "")
    who = "which all users share" if state.shared else "where those of other users are not seen"
    fixes = [] if state.shared or environ.get(VARIABLE) else [_share()]
    if kind not in ("tmpfs", ""):
        fixes.append("a directory on tmpfs is quicker, and empty after a boot")
    return Finding(severity=Severity.OK, message=f"{where}, {who}", fix="; ".join(fixes))


def _share() -> str:
    return (
        f"sudo install -d -m 1777 {MACHINE_WIDE}  (shared by all users, until the next boot; see tmpfiles.d for later)"
    )


def _fail(message: str, fix: str) -> Finding:
    return Finding(severity=Severity.FAIL, message=message, fix=fix)
