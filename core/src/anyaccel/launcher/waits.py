"""The wait of a request: description, logger, and possible deadlocks.

A wait ends when another process, or another thread of this one, releases devices. If only this process could release
what a request needs, and it has no other thread, the wait would never end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from time import time as now

from anyaccel.ledger.lockfile import Life
from anyaccel.ledger.record import BLOCKED, describe_ahead, describe_obstacles
from anyaccel.linux.fork import tidy_in_child
from anyaccel.text import elapsed, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.ledger import Lease, LeaseRecord
    from anyaccel.policy import OverLimit

LOGGER = "anyaccel.wait"
"""Logger that gets the description of a wait in a Python program."""

_own: dict[str, tuple[Lease, str]] = {}
"""Leases that this process holds for itself, with the line that acquired each: only the program releases them."""
tidy_in_child(_own.clear)


def note_own(lease: Lease | None) -> None:
    """Remember a lease of this process and the acquiring line of the program; drop released leases.

    Args:
        lease: The lease, which only the program releases; with None, for no devices, nothing is done.
    """
    if lease is None:
        return
    # Without a lock: another thread may note a lease at the same time, so the items are copied first.
    for key in [key for key, (other, _) in tuple(_own.items()) if other.released]:
        _own.pop(key, None)
    _own[lease.id] = lease, _find_calling_line()


def own_leases(path: str) -> Mapping[str, tuple[Lease, str]]:
    """Return the leases of :func:`note_own` in a state directory, with their lines, by id.

    Released leases are left out, and leases whose files were removed.
    """
    return {
        key: (lease, place)
        for key, (lease, place) in tuple(_own.items())
        if lease.path == path and not lease.released and lease.intact
    }


def has_other_threads() -> bool:
    """Return whether this process has another Python thread, which could release devices while this one waits."""
    # A daemon of a library counts, too: no call can tell what a thread will do.
    return any(thread is not threading.current_thread() for thread in threading.enumerate())


def _find_calling_line() -> str:
    """Return ``file:line`` of the innermost frame outside this package."""
    frame = sys._getframe(1)  # noqa: SLF001 - inspect.stack() reads source files, and takes milliseconds
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return printable(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def describe_holder(record: LeaseRecord) -> str:
    """Describe the holder of a device: user, process, for how long, for what, and the line of a lease of this process.

    The text for a drain or reservation is its reason; for a kept lease, its user and reason; for a lease on behalf of
    other processes, its user, purpose and reason.
    """
    words = record.note or record.request or record.command
    if record.state in BLOCKED:
        return record.reason
    if record.state == Life.KEPT.value:
        return f"{record.user}, {record.reason}"
    if record.state == Life.ON_BEHALF.value:
        return ", ".join(filter(None, (record.user, words or record.key, record.reason)))
    since = f", for {elapsed(now() - record.since)}" if record.since is not None else ""
    place = _own[record.id][1] if record.pid == os.getpid() and record.id in _own else ""
    here = f", taken by this process at {place}" if place else ""
    return f"{record.user}, process {record.pid or 'unknown'}{since}" + (f", {words}" if words else "") + here


def describe_wait(place: int, holders: Iterable[LeaseRecord], limits: Iterable[OverLimit]) -> str:
    """Return a sentence with the queue position and the obstacles of a request: limits, then holders of devices.

    Without limits and holders, earlier requests are the obstacle.

    Args:
        place: The queue position, 1 for the next.
        holders: The leases and withheld devices in the way.
        limits: The limits in the way.
    """
    taken = describe_obstacles(holders, {key: line for key, (_, line) in tuple(_own.items())})
    obstacles = "; ".join(filter(None, (*(each.message() for each in limits), taken)))
    return f"waiting, place {place} in line: {obstacles or describe_ahead(place - 1)}"


def log_wait(sentence: str) -> None:
    """Log the description of a wait as a warning: on standard error, unless the program configures logging."""
    import logging

    logging.getLogger(LOGGER).warning("anyaccel: %s", printable(sentence))
