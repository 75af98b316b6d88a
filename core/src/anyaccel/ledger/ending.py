"""Ending a lease from outside: its holders are asked to end, then made to; what they hold is never edited."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable

from anyaccel.errors import LeaseNotFoundError, LeasePermissionError, LedgerError
from anyaccel.ledger import process
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.listing import life, read, sweep
from anyaccel.ledger.lockfile import Life
from anyaccel.ledger.names import LeaseName
from anyaccel.ledger.record import user_name

_LOOK_AGAIN = 0.05
_TO_END_A_PROCESS = 10.0


def end(state: StateDirectory, lease_id: str, *, grace: float, force: bool) -> tuple[int, ...]:
    """End a lease by ending every process that carries it.

    Args:
        state: The state directory.
        lease_id: Identity of the lease.
        grace: Seconds for the processes to end after SIGTERM.
        force: Whether to send SIGKILL to those that did not.

    Returns:
        The processes that were asked to end.

    Raises:
        LeaseNotFoundError: When there is no such lease.
        LeasePermissionError: When it belongs to another user.
        LedgerError: When it is still held in the end.
    """
    asked: set[int] = set()
    directory = state.open()
    try:
        files = _files(state, directory, lease_id)
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _TO_END_A_PROCESS)):
            deadline = time.monotonic() + seconds
            while left := [lease for lease in files if life(directory, lease) is not Life.OVER]:
                holders = _holders(directory, left)
                for pid in holders if number == signal.SIGKILL else [pid for pid in holders if pid not in asked]:
                    _send(pid, holders[pid], number)
                    asked.add(pid)
                pause = min(_LOOK_AGAIN, deadline - time.monotonic())
                if pause <= 0:
                    break
                _wait(holders, pause)
            if not left:
                sweep(directory, [lease.name for lease in files])
                return tuple(sorted(asked))
            if not force:
                break
    except OSError as error:
        raise state.fault(error) from error
    finally:
        state.close(directory)
    carriers = ", ".join(map(str, sorted(holders))) or "processes that cannot be seen from here"
    hint = "" if force else "'--force' kills them"
    raise LedgerError(f"lease {lease_id} is still held by {carriers} after {seconds:g} s", hint=hint)


def _files(state: StateDirectory, directory: int, lease_id: str) -> list[LeaseName]:
    """The files of a lease that is ours to end."""
    files = [
        lease for lease in read(directory).leases if lease.id == lease_id and life(directory, lease) is not Life.OVER
    ]
    if not files or not lease_id:
        raise LeaseNotFoundError(
            f"no lease {lease_id!r} is in force in {state.path}", hint="'anyaccel' lists the leases of this machine"
        )
    for lease in files:
        owner = os.stat(lease.name, dir_fd=directory, follow_symlinks=False).st_uid
        if os.geteuid() not in (0, owner):
            raise LeasePermissionError(
                f"lease {lease_id} belongs to {user_name(owner)}; only {user_name(owner)} and root can end it",
                hint=f"ask {user_name(owner)}, or wait",
            )
        if lease.pid == os.getpid() and process.me() == (lease.pid, lease.start):
            raise LedgerError(
                f"lease {lease_id} is held by this very process", hint="call release() on the lease itself"
            )
    return files


def _holders(directory: int, files: Iterable[LeaseName]) -> dict[int, int]:
    """Processes that keep files in force, with their start times."""
    wanted, holders = set(), {}
    for lease in files:
        try:
            found = os.stat(lease.name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            continue
        wanted.add((found.st_dev, found.st_ino))
        if not process.gone(lease.pid, lease.start):
            holders[lease.pid] = lease.start
    for pid in process.carriers(wanted):
        start = process.start_time(pid)
        if start is not None and pid != os.getpid():
            holders[pid] = start
    return holders


def _send(pid: int, start: int, number: signal.Signals) -> None:
    """Send a signal to exactly this process: never to one that was given its number since."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if process.start_time(pid) == start:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


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
