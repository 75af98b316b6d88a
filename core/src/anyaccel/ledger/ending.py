"""Ending a lease from outside, with or without ending its processes, and renewing a lease that no process holds.

The name of a lease says what its writer wants. So a process is signalled only if the kernel confirms that the process
holds the lock of the file or carries the mark, and if the process belongs to the owner of the file: a process of
another user may have been passed the lock, and every user can read the mark of another process and use it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable
from functools import partial

from anyaccel.errors import LeaseNotFoundError, LeasePermissionError, LedgerError
from anyaccel.ledger import entries
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.entries import LeaseName, Tenure
from anyaccel.ledger.lease import LockedFile
from anyaccel.ledger.record import read_locks
from anyaccel.linux import (
    KILL_SECONDS,
    Teardown,
    Visit,
    find_carriers,
    has_lock,
    open_files,
    process,
    system,
    user_name,
)
from anyaccel.text import clean

_LOOK_AGAIN = 0.05  # the carriers of a mark cannot be watched, only searched

File = tuple[int, int]
"""Device number and inode of a file."""


def end_lease(state: StateDirectory, lease_id: str, *, grace: float, force: bool) -> tuple[int, ...]:
    """End the processes of a lease and remove its files; see :meth:`anyaccel.ledger.Ledger.end_lease`.

    The call returns once the lease has ended.

    Args:
        state: The state directory.
        lease_id: Identity of the lease.
        grace: Seconds for the processes to end after SIGTERM.
        force: Whether to kill the processes after the grace, and to wait up to ``KILL_SECONDS`` more.

    Returns:
        Sorted ids of the signalled processes.

    Raises:
        LeaseNotFoundError: When no active lease has this id.
        LeasePermissionError: When the lease belongs to another user, and this process is not root's.
        LedgerError: When the lease is still held in the end, also after signals; when the lease is held by this
            process, is on behalf of others, or is released at the beginning of the call; when several other users have
            files with this id; or when a system call fails.
    """
    with state.opened() as directory:
        files, owner = _files(state, directory, lease_id)
        for lease in files:
            if lease.pid == os.getpid() and process.me() == (lease.pid, lease.start):
                raise LedgerError(
                    f"lease {lease_id} is held by this very process", hint="call release() on the lease itself"
                )
        states = entries.find_active(directory, files).values()
        if key := next((state.key for state in states if state.key), ""):
            raise LedgerError(
                f"lease {lease_id} is on behalf of {key}, whose processes were not started with the lease",
                hint=f"end those; 'anyaccel release --forget {lease_id}' releases the device even if they still run",
            )
        rest = Teardown(partial(_find_holders, directory, files), grace=grace, owner=owner, force=force)
        while _select_active(directory, files):
            pause = rest.step()
            # Without a process of the owner, the lease is about to end, unless a foreign process keeps it: a killed
            # process is not found any more before it has left the kernel.
            done = rest.expired or (not rest.own and rest.others)
            if done and _select_active(directory, files):  # again: processes may have ended during the step
                raise _still_held(files[0], owner, rest.own, rest.others, KILL_SECONDS if rest.killing else grace)
            process.wait_for_end(rest.own, _LOOK_AGAIN if pause is None else pause)
        entries.sweep(directory, [lease.name for lease in files])
        return tuple(sorted(rest.asked))


def drop_lease(state: StateDirectory, lease_id: str) -> tuple[int, ...]:
    """Free the devices of an own lease without ending processes; see :meth:`anyaccel.ledger.Ledger.drop_lease`.

    The files are removed, and other visible processes lose their locks on the devices. Locks of this process stay, and
    so do locks on a device that another active lease names.

    Returns:
        Sorted ids of the visible processes, other than this one, that still run with the devices.

    Raises:
        LeaseNotFoundError: When no active lease has this id.
        LeasePermissionError: When the lease belongs to another user, also for root.
        LedgerError: When a system call fails, or the lease is released meanwhile; or when the files are removed, but
            a process keeps the lock on a device.
    """
    with state.opened() as directory:
        files, owner = _files(state, directory, lease_id)
        if os.geteuid() != owner:
            raise LeasePermissionError(
                f"lease {lease_id} belongs to {user_name(owner)}, and only its owner can give the devices back while"
                " processes still use them",
                hint=f"'anyaccel release {lease_id}' ends the processes",
            )
        holders: set[int] = set()
        _find_holders(directory, files, lambda pid, _: holders.add(pid))
        running = [pid for pid in sorted(holders) if process.exists(pid)]
        locks = _device_locks(directory, files)
        for lease in files:
            os.unlink(lease.name, dir_fd=directory)
        devices = {lease.device for lease in files}
        others = [lease for lease in entries.list_names(directory).leases if lease.device in devices]
        # A process may hold another share of the same device by another lease: that lock must stay.
        locks -= _device_locks(directory, _select_active(directory, others))
    stuck: dict[int, str] = {}
    for pid in running:
        try:
            _unlock(pid, locks)
        except OSError as error:
            stuck[pid] = error.strerror or str(error)
    if stuck:
        listed = ", ".join(f"{pid} ({reason})" for pid, reason in stuck.items())
        raise LedgerError(
            f"lease {lease_id} has been released, but the lock on the device itself is kept by process {listed}, whose"
            " descriptors could not be copied",
            hint=f"the device is free once the process has ended: kill {' '.join(map(str, stuck))}",
        )
    return tuple(running)


def renew(state: StateDirectory, lease_id: str, tenure: Tenure, note: str | None) -> None:
    """Replace the tenure, and the note unless None, of an own lease on behalf of others, with the directory locked.

    See :meth:`anyaccel.ledger.Ledger.renew`. If a former tenure has ended before the last file is written, the files
    that a renewal has written are removed, since another process may have taken the lease for ended.

    Raises:
        LeaseNotFoundError: When no lease has this id, or it has ended.
        LeasePermissionError: When the lease is active and belongs to another user, also for root.
        LedgerError: When a process holds the lease, when the directory stays locked, or a file cannot be written or
            removed.
    """
    # The lock keeps requests from publishing a lease of the same devices meanwhile.
    with state.locked() as directory:
        files = entries.list_names(directory).find_lease(lease_id)
        former = [entries.read_tenure(directory, lease) for lease in files]
        without = [lease for lease, old in zip(files, former, strict=True) if old is None]
        if _select_active(directory, without):
            raise LedgerError(
                f"lease {lease_id} is held by a process, so that there is nothing to renew",
                hint="it lasts until its processes have ended or 'anyaccel release' ends it",
            )
        for lease in files if _all_last(former) else ():
            _replace(state, directory, lease, tenure, note)
        # A request that has read a former tenure after its end takes the lease for ended, and gives the device out
        # once the directory is unlocked. A tenure that lasts beyond the last write was never read so.
        if files and _all_last(former):
            return
        for lease in files:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # of another user: it has ended all the same
                os.unlink(_without_process(lease), dir_fd=directory)
    raise _ended(lease_id)


def _all_last(tenures: list[Tenure | None]) -> bool:
    """Return whether each tenure lasts now; False if a lease has none, True for an empty list.

    Control groups are looked at once the time is over; see :meth:`Tenure.reason`.
    """
    return all(each is not None and each.reason() for each in tenures)


def _replace(state: StateDirectory, directory: int, lease: LeaseName, tenure: Tenure, note: str | None) -> None:
    """Replace a file of a lease by one with another tenure and note, in one step, so that no reader sees half a body.

    The new file is not locked, keeps the start of the lease, and has no process in its name. A file with another name
    is removed.

    Raises:
        OSError: When the new file cannot be made or named; or when it is in place, but the old one cannot be removed.
        LeaseNotFoundError: When the file is gone.
        LeasePermissionError: When the file belongs to another user.
    """
    if (found := entries.stat_of(directory, lease.name)) is None:
        raise _ended(lease.id)
    if found.st_uid != os.geteuid():
        raise LeasePermissionError(
            f"lease {lease.id} belongs to {user_name(found.st_uid)}", hint="only its owner can renew it"
        )
    file, settled = LockedFile(state.path), _without_process(lease)
    try:
        body = entries.with_entry(entries.read_body(directory, lease.name), entries.ENTRY, tenure.encode())
        file.make(directory, body if note is None else entries.with_entry(body, "note", clean(note)))
        os.utime(file.fd, ns=(found.st_atime_ns, found.st_mtime_ns))  # the start of the lease
        os.rename(file.name, settled, src_dir_fd=directory, dst_dir_fd=directory)
        if settled != lease.name:
            os.unlink(lease.name, dir_fd=directory)
    finally:
        file.discard()  # only the hidden name


def _without_process(lease: LeaseName) -> str:
    """Return the name of a lease's file without process and mark, as a renewed lease has it."""
    return entries.lease_name(lease.device, lease.extent, lease.boot + lease.id, (0, 0), (), lease.period)


def _ended(lease_id: str) -> LeaseNotFoundError:
    """Return the error for a lease that has ended."""
    return LeaseNotFoundError(f"lease {lease_id} has ended", hint="acquire the devices anew")


def _files(state: StateDirectory, directory: int, lease_id: str) -> tuple[list[LeaseName], int]:
    """Return the active files of a lease that this user may end, and the user id of their owner.

    If a user has copied the id of another user's lease, only files of this process's user count.

    Raises:
        LeaseNotFoundError: When no active lease has this id.
        LeasePermissionError: When the lease belongs to another user, and this process is not root's.
        LedgerError: When several users, but not this one, have files with this id, also for root.
        FileNotFoundError: When the lease is released during the call.
    """
    files = _select_active(directory, entries.list_names(directory).find_lease(lease_id))
    owners = {os.stat(lease.name, dir_fd=directory, follow_symlinks=False).st_uid for lease in files}
    if not files:
        raise LeaseNotFoundError(
            f"no lease {lease_id!r} is active in {state.path}",
            hint="'anyaccel --columns device,user,lease' lists the active leases",
        )
    if len(owners) > 1:  # ids are random, so a user has copied the id of another user's lease
        owners &= {os.geteuid()}
        files = [lease for lease in files if os.stat(lease.name, dir_fd=directory).st_uid in owners]
    if not owners:
        raise LedgerError(
            f"lease {lease_id} is not ended: files of several users in {state.path} have this id",
            hint="each owner can end the own lease, also root as that user: sudo -u USER anyaccel release ...",
        )
    (owner,) = owners
    if os.geteuid() not in (0, owner):
        raise LeasePermissionError(
            f"lease {lease_id} belongs to {user_name(owner)}; only {user_name(owner)} and root can end it",
            hint=f"ask {user_name(owner)}, or wait",
        )
    return files, owner


def _select_active(directory: int, files: Iterable[LeaseName]) -> list[LeaseName]:
    """Return the leases that have not ended, after tests of locks and tenures and, if needed, a scan of all processes.

    A lease in doubt, as after an incomplete scan, counts as active.

    Raises:
        OSError: When a lock cannot be tested.
    """
    active = entries.find_active(directory, files := tuple(files))
    return [lease for lease in files if lease.name in active]


def _find_holders(directory: int, files: Iterable[LeaseName], visit: Visit) -> bool:
    """Visit each other process with the lock of a file or with a mark, as the kernel confirms; skip missing files.

    A process with both is visited twice. Processes that this process may not inspect are passed over.

    Returns:
        Whether the scan for marks was complete.

    Raises:
        OSError: When this process has no descriptor left to look.
    """
    wanted = set()
    for lease in files:
        if found := entries.stat_of(directory, lease.name):
            wanted.add((found.st_dev, found.st_ino))
    for pid in {pid for pid, descriptor in open_files(wanted) if has_lock(pid, descriptor)} - {os.getpid()}:
        if (start := process.start_time(pid)) is not None:
            visit(pid, start)
    return find_carriers(lease.mark for lease in files)(visit)


def _device_locks(directory: int, files: Iterable[LeaseName]) -> set[File]:
    """Return device number and inode of each path that stands for a device, as the leases' bodies name it.

    Whether the inodes are locked is not tested. Missing paths and unreadable bodies are skipped.
    """
    found = set()
    for lease in files:
        for path in read_locks(entries.read_body(directory, lease.name)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found.add((status.st_dev, status.st_ino))
    return found


def _unlock(pid: int, files: set[File]) -> None:
    """Unlock files of an own process, exclusively or shared locked, through copies of its descriptors.

    No error for a process that has ended, that holds no lock on the files, or whose descriptors this process may not
    see.

    Raises:
        OSError: When a descriptor cannot be copied or unlocked, as where ``ptrace_scope`` forbids that.
    """
    for number in [number for _, number in open_files(files, pid) if has_lock(pid, number, shared=True)]:
        try:
            pinned = os.pidfd_open(pid)
            try:
                copy = system.syscall(system.PIDFD_GETFD, pinned, number, 0)
            finally:
                os.close(pinned)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EBADF):  # the process has ended, or closed the descriptor
                continue
            raise
        try:
            fcntl.flock(copy, fcntl.LOCK_UN)  # the copy shares the open file, and so the lock
        finally:
            os.close(copy)


def _still_held(
    lease: LeaseName, owner: int, ours: Iterable[int], others: Iterable[int], seconds: float
) -> LedgerError:
    """Make the error for a lease that is still active, with the reason and the way out.

    Without processes of either kind, the error names the process in the lease's name unless that has ended; else it
    says that the holders cannot be seen from here.

    Args:
        lease: A file of the lease.
        owner: User id of the owner.
        ours: The owner's processes that hold the lease: the first reason.
        others: Processes of other users that hold the lease: the second reason.
        seconds: Seconds that the processes were given.
    """
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
            hint=f"end it with 'kill {' '.join(map(str, foreign))}' if that is right, or release the devices without"
            f" ending it: sudo -u {user_name(owner)} anyaccel release --forget {lease.id}",
        )
    if not process.gone(lease.pid, lease.start):
        return LedgerError(
            f"lease {lease.id} is kept until process {lease.pid} ends, which its name gives as the holder; the process"
            " was not ended, since the kernel does not confirm that it holds the lease",
            hint=f"end process {lease.pid} if that is right; {user_name(owner)} can also release the devices with"
            f" 'anyaccel release --forget {lease.id}'",
        )
    return LedgerError(
        f"lease {lease.id} is still held by processes that cannot be seen from here",
        hint="root, or a process outside of this container, can see them",
    )
