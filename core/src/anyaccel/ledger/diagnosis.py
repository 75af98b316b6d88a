"""What is wrong with the state directory itself, and the way out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from anyaccel.errors import LedgerError
from anyaccel.ledger.directory import NoStateDirectoryError, StateDirectory, find
from anyaccel.ledger.filesystem import file_system
from anyaccel.ledger.listing import Listing, debris, owner_of, read, states
from anyaccel.ledger.lockfile import Life, look, obstacle
from anyaccel.ledger.names import without_scope
from anyaccel.ledger.places import MACHINE_WIDE, PRIVATE, VARIABLE, private_directories, private_places
from anyaccel.ledger.record import clean, owner
from anyaccel.linux import mark as marks
from anyaccel.linux.users import outside, user_name
from anyaccel.model import Finding, Severity

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
    except NoStateDirectoryError:
        return (*_marks(), *_others(environ), *_gone_around(environ), _summary(state, None, environ))
    except LedgerError as error:
        return (_fail(str(error), error.hint or f"set {VARIABLE} to a directory on tmpfs that belongs to you"),)
    try:
        return (
            *_access(state, directory),
            *_marks(),
            *_others(environ, state),
            *_gone_around(environ),
            *_closed(state, directory),
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


def _marks() -> Iterator[Finding]:
    """What keeps a lease from lasting as long as all that was started with it, and others from seeing that."""
    if reason := marks.obstacle():
        yield Finding(
            severity=Severity.WARN,
            reason=f"leases that are taken from here end with the processes that have their descriptors: {reason}",
            remedy="end what a job leaves behind before others need the device; where an administrator has set the"
            " limit: leave 'locks' out of /etc/security/limits.conf",
        )
    if marks.hidden():
        yield Finding(
            severity=Severity.WARN,
            reason="/proc hides processes of other users, so that their ended leases count as kept until they or root"
            " use anyaccel",
            remedy="mount /proc without hidepid, or with gid= of a group that all users of the devices are in",
        )


def _others(environ: Mapping[str, str], state: StateDirectory | None = None) -> Iterator[Finding]:
    """Users who keep leases of the same devices where we do not look."""
    if environ.get(VARIABLE):
        return
    shared = state is not None and state.shared
    users = set()
    for path in private_directories():
        with contextlib.suppress(OSError):
            uid = os.lstat(path).st_uid
            if shared or uid != os.geteuid():
                users.add(user_name(uid))
    if not users:
        return
    who = f"{', '.join(sorted(users))} keep{'s' * (len(users) == 1)} leases in a directory of their own"
    if state is not None and state.shared:
        message = f"{who}, made before {state.path}: no request sees them"
        fix = "sudo anyaccel setup  (which brings them over)"
    else:
        message, fix = f"{who}, as you do: each of you may be given the same devices", _share()
    yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _gone_around(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What another user has made where our own directory would be."""
    if environ.get(VARIABLE) or os.path.lexists(MACHINE_WIDE):
        return
    for path in private_places(outside(os.geteuid())):
        with contextlib.suppress(OSError):
            found = os.lstat(path)
            if found.st_uid != os.geteuid() and path.startswith(PRIVATE):
                message = f"{path} was made by {owner(found)['user']}, so that your leases are kept elsewhere"
                yield Finding(severity=Severity.OK, reason=message, remedy=_share())


def _closed(state: StateDirectory, directory: int) -> Iterator[Finding]:
    """Leases' files that cannot be looked at, so that they count as held whether they are or not."""
    for lease in read(directory).leases:
        reason = obstacle(directory, lease.name)
        if reason:
            with contextlib.suppress(OSError):
                user = owner(os.stat(lease.name, dir_fd=directory, follow_symlinks=False))["user"]
                file = f"{state.path}/{clean(lease.name)}"
                message = f"{without_scope(lease.device)} counts as held by {user}, whose file {file} {reason}"
                fix = f"ask {user} to end what made it, or have root remove it"
                yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _left(state: StateDirectory, directory: int) -> Iterator[Finding]:
    """Files of those who are gone that we cannot remove: each costs everybody a look. Ours go by themselves."""
    users: dict[str, int] = {}
    for name in _dead(directory, read(directory)):
        uid = owner_of(directory, name)
        if uid is not None and os.geteuid() not in (0, uid, os.fstat(directory).st_uid):
            users[user_name(uid)] = users.get(user_name(uid), 0) + 1
    if users:
        count = sum(users.values())
        message = (
            f"{count} file{'s' * (count > 1)} in {state.path} {'are' if count > 1 else 'is'} left from processes of"
            f" {', '.join(sorted(users))} that have ended, and only they or root can remove"
            f" {'them' if count > 1 else 'it'}"
        )
        fix = "nothing, where they are few: they go when one of these users, or root, next takes devices"
        severity = Severity.WARN if count >= MANY else Severity.OK
        yield Finding(severity=severity, reason=message, remedy=fix)


def _dead(directory: int, listing: Listing) -> Iterator[str]:
    yield from (name for name, state in states(directory, listing.leases).items() if state.life is Life.OVER)
    yield from (name for name in listing.tickets if look(directory, name)[0] is Life.OVER)
    yield from debris(directory, listing.hidden)


def _summary(state: StateDirectory, directory: int | None, environ: Mapping[str, str]) -> Finding:
    kind = "" if directory is None else file_system(directory)
    where = f"leases are kept in {state.path}" + (f" ({kind})" if kind else "")
    if directory is None:
        where += ", which is made when devices are taken"
    who = "which all users share" if state.shared else "where those of other users are not seen"
    fixes = [] if state.shared or environ.get(VARIABLE) else [_share()]
    if kind not in ("tmpfs", ""):
        fixes.append("a directory on tmpfs is quicker, and empty after a boot")
    return Finding(severity=Severity.OK, reason=f"{where}, {who}", remedy="; ".join(fixes))


def _share() -> str:
    return "sudo anyaccel setup  (shared by all users)"


def _fail(message: str, fix: str) -> Finding:
    return Finding(severity=Severity.FAIL, reason=message, remedy=fix)
