"""Leases and tickets as people see them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from anyaccel.ledger import process
from anyaccel.ledger.listing import Listing, life
from anyaccel.ledger.lockfile import Life, read_body
from anyaccel.ledger.names import LeaseName
from anyaccel.model.device import UNITS_PER_DEVICE

_STOPPED = ("T", "t")
_TEXT_LIMIT = 250  # so that all of it stays below the limit of a body


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """One device of one lease.

    Attributes:
        id: Identity of the lease, the same for all of its devices; empty where it is not understood.
        device: Id of the device.
        units: Units of it that are held, in 1/10000.
        state: ``held``; ``aside`` when its holder keeps it although nobody uses it any more; ``leaving`` when its
            holder was killed and has not left the kernel yet; ``unknown`` when it is locked and not understood, which
            counts as the whole device; ``outside`` when the device itself is locked though no lease says so.
        reason: Why it is not simply held; else empty.
        pid: Process that took it; 0 when unknown. It may have ended while processes that it started live on.
        here: Whether the process id means anything in this container: it was taken in the same process namespace.
        uid: Owner of the file, or None when it could not be looked at.
        user: Name of that user, or its number.
        since: When it was taken, in seconds since 1970 by the clock of that time; None when unknown.
        request: What was asked for, in the holder's words, like the three below: they prove nothing.
        note: What it is for.
        command: Name of the program.
        confined: Whether the holder is confined to its devices.
    """

    id: str
    device: str
    units: int
    state: str
    reason: str = ""
    pid: int = 0
    here: bool = True
    uid: int | None = None
    user: str = "unknown"
    since: float | None = None
    request: str = ""
    note: str = ""
    command: str = ""
    confined: bool = False

    def __str__(self) -> str:
        share = "" if self.units == UNITS_PER_DEVICE else f" ({self.units / UNITS_PER_DEVICE:g} of it)"
        if self.state == "outside":
            return self.reason
        words = f", {self.note or self.request!r}" if self.note or self.request else ""
        why = f"; {self.reason}" if self.reason else ""
        return f"{self.device}{share} is held by {self.user} (process {self.pid or 'unknown'}{words}){why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketRecord:
    """Somebody who waits.

    Attributes:
        id: Identity of the ticket.
        priority: The higher, the earlier.
        pid: Process that waits.
        uid: Owner of the file, or None when it could not be looked at.
        user: Name of that user, or its number.
        waited: Seconds since it began to wait.
        responsive: Whether it has lately looked for devices; one that has not is overtaken.
        request: What it asks for, in its own words, like the two below.
        note: What for.
        command: Name of the program.
    """

    id: str
    priority: int
    pid: int
    uid: int | None
    user: str
    waited: float
    responsive: bool
    request: str = ""
    note: str = ""
    command: str = ""


def write_body(request: str, note: str, *, confined: bool = False, **more: Any) -> bytes:
    """Write what people may want to know: names only, never arguments or values of variables."""
    words = {
        "request": clean(request),
        "note": clean(note),
        "command": clean(_command()),
        "namespace": _namespace(),
        "confined": confined,
    }
    return json.dumps(words | more, ensure_ascii=False).encode(errors="replace")


lease_body = lru_cache(maxsize=64)(write_body)
"""The same for a lease, of which nothing depends on the moment."""


def add_reason(body: bytes, reason: str) -> bytes:
    """Add to the body of a lease why it is kept although nobody uses it."""
    return json.dumps(json.loads(body) | {"aside": clean(reason)}, ensure_ascii=False).encode(errors="replace")


def read_words(body: bytes) -> dict[str, Any]:
    """Read what :func:`write_body` wrote, or what somebody made up: short printable texts, whatever it says."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    words = found if isinstance(found, dict) else {}
    texts = {key: clean(words.get(key)) for key in ("request", "note", "command", "aside")}
    arrived = words.get("arrived")
    return {
        **texts,
        "confined": words.get("confined") is True,
        "here": words.get("namespace") in (None, _namespace()),
        "arrived": arrived if type(arrived) is int and abs(arrived) < 1 << 63 else time.monotonic_ns(),
    }


def clean(value: object) -> str:
    """Make a text of somebody else's fit for a terminal."""
    text = value[:_TEXT_LIMIT] if isinstance(value, str) else ""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def records(directory: int, listing: Listing) -> Iterator[LeaseRecord]:
    """Describe the leases that are in force."""
    for lease in sorted(listing.leases, key=lambda lease: (lease.device, lease.name)):
        state = life(directory, lease)
        if state is not Life.OVER:
            yield describe(directory, lease, state)


def describe(directory: int, lease: LeaseName, state: Life) -> LeaseRecord:
    """Describe one lease."""
    try:
        found = os.stat(lease.name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        found = None
    kind, reason = state.value, ""
    if state is Life.LEAVING:
        where = process.waits_in(lease.pid)
        reason = f"process {lease.pid} has ended but not left the kernel" + (
            f", where it waits in {where}" * bool(where)
        )
    elif not lease.understood:
        kind, reason = "unknown", f"{lease.name!r} is locked and was not written by this version: all of it counts"
    words = read_words(read_body(directory, lease.name))
    aside = words.pop("aside")
    if state is Life.HELD and aside and not reason:
        kind, reason = "aside", aside
    del words["arrived"]
    if not reason and words["here"] and process.state(lease.pid) in _STOPPED:
        reason = f"process {lease.pid} is stopped, and goes on with: kill -CONT {lease.pid}"
    return LeaseRecord(
        id=lease.id,
        device=lease.device,
        units=lease.units,
        state=kind,
        reason=reason,
        pid=lease.pid,
        uid=found.st_uid if found else None,
        user=user_name(found.st_uid) if found else "unknown",
        since=found.st_mtime if found else None,
        **words,
    )


@cache
def user_name(uid: int) -> str:
    """Name of a user, or the number where there is none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def _namespace() -> int:
    """Number of the namespace in which process ids of this process mean something; 0 when unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _command() -> str:
    return os.path.basename(sys.argv[0] if getattr(sys, "argv", None) else "")
