"""What a request waits for: the sentence about it, who reads it, and whether the wait can end at all.

A wait ends when other processes give devices back, or when other threads of this one do. One that needs what this
process itself holds, and has no thread that could give it back, would last for ever.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from time import time as now

from anyaccel.ledger.lockfile import Life
from anyaccel.ledger.record import BLOCKED
from anyaccel.linux.fork import tidy_in_child
from anyaccel.text import elapsed, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.ledger import Lease, LeaseRecord
    from anyaccel.model import Inventory
    from anyaccel.policy import OverLimit

LOGGER = "anyaccel.wait"
"""Name of the logger that gets the sentence about a wait in Python."""
_LISTED = 4

_own: dict[str, tuple[Lease, str]] = {}
"""Leases that this process took for its own use, and where: no call of ours gives them back at its end."""
tidy_in_child(_own.clear)


def note_own(lease: Lease | None) -> None:
    """Remember where the program that calls us took a lease.

    Args:
        lease: The lease, which the program gives back itself, or never; None for no devices.
    """
    if lease is None:
        return
    for key in [key for key, (other, _) in tuple(_own.items()) if other.released]:
        _own.pop(key, None)
    _own[lease.id] = lease, _calling_line()


def own_leases(path: str) -> Mapping[str, tuple[Lease, str]]:
    """Return the leases of :func:`note_own` that are active in a state directory, with where each was taken, by id."""
    return {
        key: (lease, place)
        for key, (lease, place) in tuple(_own.items())
        if lease.path == path and not lease.released and lease.intact
    }


def other_threads() -> bool:
    """Whether this process has another thread, which may give devices back while this one waits."""
    return any(thread is not threading.current_thread() for thread in threading.enumerate())


def _calling_line() -> str:
    """The line of the program that calls into this package: ``file:line``."""
    frame = sys._getframe(1)  # noqa: SLF001 - there is no other way to the caller's line
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
    return printable(f"{frame.f_code.co_filename}:{frame.f_lineno}")


def holder(record: LeaseRecord) -> str:
    """Name who holds a device, since when and what for, for people."""
    words = record.note or record.request or record.command
    if record.state in BLOCKED:
        return record.reason
    if record.state == Life.KEPT.value:
        return f"{record.user}, {record.reason}"
    since = f", for {elapsed(now() - record.since)}" if record.since is not None else ""
    place = _own[record.id][1] if record.pid == os.getpid() and record.id in _own else ""
    here = f", taken by this process at {place}" if place else ""
    return f"{record.user}, process {record.pid or 'unknown'}{since}" + (f", {words}" if words else "") + here


def describe_wait(
    place: int, holders: tuple[LeaseRecord, ...], limits: Iterable[OverLimit], inventory: Inventory
) -> str:
    """Say what a request waits for: limits of its user first, then each device once, with the first holders.

    Args:
        place: Its place in line, 1 for the next.
        holders: The leases that are in its way.
        limits: The limits that are in its way.
        inventory: The machine, whose devices have names there.
    """
    names = {device.id: device.name for device in inventory.devices}
    by_device: dict[str, list[str]] = {}
    for record in holders:
        text = holder(record) if record.state in BLOCKED else f"held by {holder(record)}"
        by_device.setdefault(names.get(record.device, record.device), []).append(text)
    by_holders: dict[str, list[str]] = {}
    for name, by in sorted(by_device.items()):
        by_holders.setdefault(" and ".join(dict.fromkeys(by)), []).append(name)
    who = [f"{', '.join(them)} {by}" for by, them in list(by_holders.items())[:_LISTED]]
    if len(by_holders) > _LISTED:
        who.append(f"and {len(by_holders) - _LISTED} more")
    why = "; ".join((*(each.message() for each in limits), *who))
    return f"waiting, place {place} in line: {why or 'others came first'}"


def log_wait(sentence: str) -> None:
    """Say what a request waits for, in a program: on standard error, unless the program set up logging otherwise."""
    import logging

    logging.getLogger(LOGGER).warning("anyaccel: %s", printable(sentence))
