"""Diagnosis of the state directory: findings with remedies, for ``anyaccel doctor``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from anyaccel.errors import LedgerBusyError, LedgerError
from anyaccel.ledger.directory import (
    VARIABLE,
    NoStateDirectoryError,
    StateDirectory,
    file_system,
    find,
    private_directories,
)
from anyaccel.ledger.entries import list_names, without_scope
from anyaccel.ledger.handovers import list_unfinished
from anyaccel.linux import mark as marks
from anyaccel.linux import process, user_name
from anyaccel.model import Finding, Severity

LEAST_BYTES, LEAST_FILES = 1 << 16, 16
"""Free bytes and inodes below which the next lease may not fit."""
_SHARE = "sudo anyaccel setup  (shared by all users)"
_LOCK_SECONDS = 1.0  # far longer than any publication: a lock that lasts so long is stuck


def diagnose(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Diagnose the state directory; an error of the ledger is not raised, but becomes the only finding, ``FAIL``.

    So does a failed system call in the directory. A missing directory is not made. The first look of this user in a
    boot makes missing files of active leases again: see :meth:`anyaccel.ledger.directory.StateDirectory.open`.

    Args:
        environ: The environment that may name the state directory.

    Returns:
        The findings. The last finding names the directory, unless no directory can be used.
    """
    try:
        state = find(environ)
        directory = state.open()
    except NoStateDirectoryError:
        return (*_marks(), *_separate_users(environ), _summary(state, None, environ))
    except LedgerError as error:
        return (_fail(str(error), error.hint or f"set {VARIABLE} to a directory on tmpfs that belongs to you"),)
    try:
        return (
            *_access(state, directory),
            *_marks(),
            *_separate_users(environ, state),
            *_unfinished_handovers(directory),
            _summary(state, directory, environ),
        )
    except OSError as error:
        fault = state.fault(error)
        return (_fail(str(fault), fault.hint or f"set {VARIABLE} to another directory"),)
    finally:
        state.close(directory)


def _access(state: StateDirectory, directory: int) -> Iterator[Finding]:
    """Find reasons why this user could take no lease: little space, no permission, or a directory that stays locked.

    Each is a finding ``FAIL``; little space is below :data:`LEAST_BYTES` or :data:`LEAST_FILES`. The directory is
    locked for a moment; a lock of another process is waited for, a second at most.
    """
    room = os.statvfs(directory)
    if room.f_bavail * room.f_frsize < LEAST_BYTES or (room.f_files and room.f_favail < LEAST_FILES):
        message = f"the file system of the state directory {state.path} is full, so that no devices can be taken"
        yield _fail(message, f"free space there, or set {VARIABLE} to a directory on another file system")
    if not os.access(state.path, os.W_OK | os.X_OK):
        read_only = room.f_flag & os.ST_RDONLY
        message = f"the state directory {state.path} cannot be written by this user"
        fix = f"mount it for writing, or set {VARIABLE}" if read_only else f"sudo chmod 1777 {state.path}"
        yield _fail(message + ", since its file system is read-only" * bool(read_only), fix)
    try:
        state.lock(directory, _LOCK_SECONDS)
    except LedgerBusyError as busy:
        yield _fail(str(busy), busy.hint)
    else:
        state.unlock(directory)


def _marks() -> Iterator[Finding]:
    """Warn that leases may end before their processes, or that this user cannot see the end of other users' leases."""
    if reason := marks.obstacle():
        yield Finding(
            severity=Severity.WARN,
            reason=f"leases that are taken from here end with the processes that have their descriptors: {reason}",
            remedy="end leftover processes of a job before other users need the device; if an administrator has set"
            " the limit: remove 'locks' from /etc/security/limits.conf",
        )
    if not process.sees_itself():
        yield Finding(
            severity=Severity.WARN,
            reason="/proc shows the processes of another process namespace, so that leases whose holders were killed"
            " count as kept here",
            remedy="mount /proc anew in the process namespace: unshare --pid --fork --mount-proc",
        )
    elif marks.hidden():
        yield Finding(
            severity=Severity.WARN,
            reason="/proc hides processes of other users, so that their ended leases count as kept until they or root"
            " use anyaccel",
            remedy="mount /proc without hidepid, or with gid= of a group that all users of the devices are in",
        )


def _separate_users(environ: Mapping[str, str], state: StateDirectory | None = None) -> Iterator[Finding]:
    """Find directories of single users that this process does not read: one warning with the users' names.

    Whether leases are there is not checked. Where the state directory is shared, an own former directory of this user
    counts, too. No finding if ``environ`` names the state directory.

    Args:
        environ: The environment.
        state: The state directory; None if it does not exist yet.
    """
    if environ.get(VARIABLE):
        return
    shared = state is not None and state.shared
    users = set()  # by name: a user may have several directories
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
        fix = "sudo anyaccel setup  (moves these leases)"
    else:
        message, fix = f"{who}, as you do: each of you may be given the same devices", _SHARE
    yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _unfinished_handovers(directory: int) -> Iterator[Finding]:
    """Warn of each device without an active lease that is still changed, or half changed, for a former holder.

    Changes of an earlier boot are not reported, although the device may still have them.
    """
    for device, lease in list_unfinished(directory, list_names(directory)).items():
        message = f"{without_scope(device)} was not put back into its idle state after lease {lease}"
        fix = f"nothing: the next lease of it does that; to do it now: anyaccel run {without_scope(device)} -- true"
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _summary(state: StateDirectory, directory: int | None, environ: Mapping[str, str]) -> Finding:
    """Make the finding about the state directory: path, file system, whether all users share it; always OK.

    The remedy advises a shared directory unless ``environ`` names one, and tmpfs, where these are missing.

    Args:
        state: The state directory.
        directory: Its descriptor; None if the directory does not exist yet.
        environ: The environment, which may name the directory.
    """
    kind = "" if directory is None else file_system(directory)
    where = f"leases are kept in {state.path}" + (f" ({kind})" if kind else "")
    if directory is None:
        where += ", which is made when devices are taken"
    who = "which all users share" if state.shared else "where leases of other users are not seen"
    fixes = [] if state.shared or environ.get(VARIABLE) else [_SHARE]
    if kind not in ("tmpfs", ""):
        fixes.append("a directory on tmpfs is faster, and empty after a boot")
    return Finding(severity=Severity.OK, reason=f"{where}, {who}", remedy="; ".join(fixes))


def _fail(message: str, fix: str) -> Finding:
    """Make a finding that keeps leases from being taken."""
    return Finding(severity=Severity.FAIL, reason=message, remedy=fix)
