"""Ending a lease from outside: its processes are asked to end, then made to; or it is given back without them.

The name of a lease is what its writer says. So a process is signalled only when the kernel confirms that it holds the
lock of this very file or carries the mark, and when it belongs to the owner of the file: another user's process may
have been made to hold the lock, and everybody can read and write down another process's mark.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from functools import partial

from anyaccel.errors import LeaseNotFoundError, LeasePermissionError, LedgerError
from anyaccel.ledger import mark as marks
from anyaccel.ledger import process
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.listing import LeaseState, read, states, sweep
from anyaccel.ledger.lockfile import Life, read_body
from anyaccel.ledger.names import LeaseName
from anyaccel.ledger.record import read_locks, user_name

_LOOK_AGAIN = 0.05
_TO_END_A_PROCESS = 10.0
_PIDFD_GETFD = 438  # the same number on every architecture; see pidfd_getfd(2)

File = tuple[int, int]
"""A file by device number and inode."""


def end(state: StateDirectory, lease_id: str, *, grace: float, force: bool) -> tuple[int, ...]:
    """End every process that holds a lease or was started with it: see :meth:`anyaccel.ledger.Ledger.release_of`."""
    asked: set[int] = set()
    ours: dict[int, int] = {}
    others: dict[int, int] = {}
    directory = state.open()
    try:
        files, owner = _files(state, directory, lease_id)
        for lease in files:
            if lease.pid == os.getpid() and process.me() == (lease.pid, lease.start):
                raise LedgerError(
                    f"lease {lease_id} is held by this very process", hint="call release() on the lease itself"
                )
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _TO_END_A_PROCESS)):
            deadline = time.monotonic() + seconds
            while left := _in_force(directory, files):
                ours, others = _processes(directory, left, owner)
                for pid in ours if number == signal.SIGKILL else [pid for pid in ours if pid not in asked]:
                    process.send(pid, number, partial(process.started_at, pid, ours[pid]))
                    asked.add(pid)
                pause = min(_LOOK_AGAIN, deadline - time.monotonic())
                if pause <= 0 or (others and not ours):
                    break
                _wait(ours, pause)
            if not left:
                sweep(directory, [lease.name for lease in files])
                return tuple(sorted(asked))
            if not force or not ours:
                break
    except OSError as error:
        raise state.fault(error) from error
    finally:
        state.close(directory)
    raise _still_held(files[0], owner, ours, others, seconds)


def forget(state: StateDirectory, lease_id: str) -> tuple[int, ...]:
    """Give back what a lease of one's own holds: see :meth:`anyaccel.ledger.Ledger.forget`."""
    directory = state.open()
    try:
        files, owner = _files(state, directory, lease_id)
        if os.geteuid() != owner:
            raise LeasePermissionError(
                f"lease {lease_id} belongs to {user_name(owner)}, and only its owner can give the devices back while"
                " processes still use them",
                hint=f"'anyaccel release {lease_id}' ends the processes",
            )
        running = {**(found := _processes(directory, files, owner))[0], **found[1]}
        locks = _device_locks(directory, files)
        for lease in files:
            os.unlink(lease.name, dir_fd=directory)
        devices = {lease.device for lease in files}
        others = [lease for lease in read(directory).leases if lease.device in devices]
        locks -= _device_locks(directory, _in_force(directory, others))  # as of another share that a process has
    except OSError as error:
        raise state.fault(error) from error
    finally:
        state.close(directory)
    stuck = [pid for pid in running if not _unlock(pid, locks)]
    if stuck:
        raise LedgerError(
            f"lease {lease_id} is given back, but the lock on the device itself is kept by process"
            f" {', '.join(map(str, stuck))}, whose descriptors this process may not copy (ptrace_scope)",
            hint=f"the device is given out again once the process has ended: kill {' '.join(map(str, stuck))}",
        )
    return tuple(sorted(running))


def _files(state: StateDirectory, directory: int, lease_id: str) -> tuple[list[LeaseName], int]:
    """The files of a lease that is ours to end, and the user id of their owner."""
    files = _in_force(directory, read(directory).of(lease_id))
    owners = {os.stat(lease.name, dir_fd=directory, follow_symlinks=False).st_uid for lease in files}
    if not files:
        raise LeaseNotFoundError(
            f"no lease {lease_id!r} is in force in {state.path}",
            hint="'anyaccel --columns device,user,lease' lists them",
        )
    if len(owners) > 1:  # ids are random, so one of these was copied
        owners &= {os.geteuid()}
        files = [lease for lease in files if os.stat(lease.name, dir_fd=directory).st_uid in owners]
    if not owners:
        raise LedgerError(
            f"lease {lease_id} is not ended: files of several users in {state.path} go by this id",
            hint="its owner can end it, or root as that user: sudo -u USER anyaccel release ...",
        )
    (owner,) = owners
    if os.geteuid() not in (0, owner):
        raise LeasePermissionError(
            f"lease {lease_id} belongs to {user_name(owner)}; only {user_name(owner)} and root can end it",
            hint=f"ask {user_name(owner)}, or wait",
        )
    return files, owner


def _in_force(directory: int, files: Iterable[LeaseName]) -> list[LeaseName]:
    found: dict[str, LeaseState] = states(directory, files := tuple(files))
    return [lease for lease in files if found[lease.name].life is not Life.OVER]


def _processes(directory: int, files: Iterable[LeaseName], owner: int) -> tuple[dict[int, int], dict[int, int]]:
    """Processes that the kernel confirms to hold files or to carry their marks, with their start times.

    Returns:
        Those of the owner of the files, which are ended with the lease; and those of other users, which are not.
    """
    wanted = set()
    for lease in files:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(lease.name, dir_fd=directory, follow_symlinks=False)
            wanted.add((found.st_dev, found.st_ino))
    pids = {pid for pid, _ in _locked(wanted)}
    for carriers in (marks.carriers({lease.mark for lease in files if lease.mark}) or {}).values():
        pids.update(carriers)
    ours: dict[int, int] = {}
    others: dict[int, int] = {}
    for pid in pids - {os.getpid()}:
        start, user = process.start_time(pid), process.user(pid)
        if start is not None and user is not None:
            (ours if user == owner else others)[pid] = start
    return ours, others


def _locked(files: set[File]) -> Iterator[tuple[int, int]]:
    """Descriptors, by process id and number, that carry an exclusive lock on one of some files."""
    for pid, descriptor in process.open_files(files):
        if process.has_lock(pid, descriptor):
            yield pid, descriptor


def _device_locks(directory: int, files: Iterable[LeaseName]) -> set[File]:
    """What the holders of some leases have locked beside the files of these."""
    found = set()
    for lease in files:
        for path in read_locks(read_body(directory, lease.name)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found.add((status.st_dev, status.st_ino))
    return found


def _unlock(pid: int, files: set[File]) -> bool:
    """Unlock files that a process of ours has locked, by copies of its descriptors; False when that is forbidden."""
    descriptors = [number for _, number in process.open_files(files, pid) if process.has_lock(pid, number, shared=True)]
    if not descriptors:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        pinned = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        for number in descriptors:
            copy = libc.syscall(_PIDFD_GETFD, pinned, number, 0)
            if copy < 0:
                return False
            fcntl.flock(copy, fcntl.LOCK_UN)  # it is the copies' lock as well
            os.close(copy)
    finally:
        os.close(pinned)
    return True


def _still_held(
    lease: LeaseName, owner: int, ours: Iterable[int], others: Iterable[int], seconds: float
) -> LedgerError:
    """Say what keeps a lease in force, and who can do something about it."""
    if mine := sorted(ours):
        return LedgerError(
            f"lease {lease.id} is still held by {', '.join(map(str, mine))} after {seconds:g} s",
            hint="'--force' kills them",
        )
    if foreign := sorted(others):
        listed = ", ".join(f"{pid} ({user_name(process.user(pid) or 0)})" for pid in foreign)
        return LedgerError(
            f"lease {lease.id} is still held by process {listed}, which was not ended: it does not belong to"
            f" {user_name(owner)}, the owner of the lease",
            hint=f"end it with 'kill {' '.join(map(str, foreign))}' where that is right, or give the devices back"
            f" all the same: sudo -u {user_name(owner)} anyaccel release --forget {lease.id}",
        )
    if not process.gone(lease.pid, lease.start):
        return LedgerError(
            f"lease {lease.id} is kept until process {lease.pid} ends, which its name gives as the holder; it was not"
            " ended, since the kernel does not confirm that it holds the lease",
            hint=f"end process {lease.pid} where that is right; {user_name(owner)} can also give the devices back with"
            f" 'anyaccel release --forget {lease.id}'",
        )
    return LedgerError(
        f"lease {lease.id} is still held by processes that cannot be seen from here",
        hint="root, or a process outside of this container, can see them",
    )


def _wait(holders: Iterable[int], seconds: float) -> None:
    """Wait until one of some processes has ended, at most for some seconds."""
    poll, descriptors = select.poll(), []
    try:
        for pid in holders:
            try:
                descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return
            poll.register(descriptors[-1], select.POLLIN)
        poll.poll(seconds * 1000)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
