"""Leases and tickets as people see them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from functools import lru_cache

from anyaccel.ledger.listing import Listing, states
from anyaccel.ledger.lockfile import Life, read_body
from anyaccel.ledger.names import LeaseName, boot, without_scope
from anyaccel.linux import process
from anyaccel.linux.process import pid_namespace
from anyaccel.linux.users import unmapped, user_name
from anyaccel.model import Value
from anyaccel.model.device import UNITS_PER_DEVICE
from anyaccel.model.extent import format_slots, slot_numbers
from anyaccel.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_STOPPED = ("T", "t")
_SHOWN = 3
_TEXT_LIMIT = 250  # so that all of it stays below the limit of a body


class LeaseRecord(Value):
    """One device of one lease.

    Attributes:
        id: Identity of the lease, the same for all of its devices; empty where it is not understood.
        device: Name of the device in the ledger, ``vendor/id``; of a physical part its path.
        units: Units of it that are held, in 1/10000; 0 where a part of it is held that is a device of its own.
        slots: Which of its slots are held; empty for all of them, and where nobody says which.
        state: ``held``; ``quarantined`` when its holder keeps it although nobody uses it any more; ``leaving`` when its
            holder was killed and has not left the kernel yet; ``kept`` when its holder has ended and processes that
            were started with it still run; ``unknown`` when it is locked and not understood, which counts as the whole
            device; ``outside`` when the device itself is locked though no lease says so.
        reason: Why it is not simply held; else empty.
        hint: The way out, where there is one; else empty.
        carriers: Processes that keep it although its holder has ended, as far as they can be seen.
        pid: Process that took it; 0 when unknown. It may have ended while processes that it started live on.
        here: Whether the process id means anything in this container: it was taken in the same process namespace.
        uid: Owner of the file, or None when it could not be looked at, or has no number in our user namespace.
        user: Name of that user, or its number; ``unknown`` where that is None.
        since: When it was taken, in seconds since 1970 by the clock of that time; None when unknown.
        request: What was asked for, in the holder's words, like the three below: they prove nothing.
        note: What it is for.
        command: Name of the program.
        confined: Whether the holder is confined to its devices.
        through: Id of the device that is really held, where that is a part of this one, or this one a part of it.
        until: When it ends at the latest, in seconds since 1970; None when it does not say.
    """

    id: str
    device: str
    units: int
    state: str
    reason: str = ""
    hint: str = ""
    carriers: tuple[int, ...] = ()
    pid: int = 0
    here: bool = True
    uid: int | None = None
    user: str = "unknown"
    since: float | None = None
    request: str = ""
    note: str = ""
    command: str = ""
    confined: bool = False
    slots: tuple[int, ...] = ()
    through: str = ""
    until: float | None = None

    def __str__(self) -> str:
        where = f", slots {format_slots(self.slots)}" if self.slots else ""
        share = "" if self.units == UNITS_PER_DEVICE else f" ({self.units / UNITS_PER_DEVICE:g} of it{where})"
        if self.state == "outside":
            return self.reason
        words = f", {self.note or self.request!r}" if self.note or self.request else ""
        why = f"; {self.reason}" if self.reason else ""
        share = f" (with {self.through})" if self.through else share
        name = without_scope(self.device)
        return f"{name}{share} is held by {self.user} (process {self.pid or 'unknown'}{words}){why}"


class TicketRecord(Value):
    """Somebody who waits.

    Attributes:
        id: Identity of the ticket.
        priority: The higher, the earlier.
        pid: Process that waits.
        uid: Owner of the file, or None when it could not be looked at.
        user: Name of that user, or its number.
        waited: Seconds since it began to wait.
        responsive: Whether it has lately looked for devices; one that has not is overtaken.
        seconds: How long it holds the devices at most; None when it does not say.
        starts: When it starts if everything lasts as long as it may, in seconds since 1970; None when nobody can tell.
        behind: How many of those ahead want one of the same devices.
        limits: The limits of its user that are in its way, as the machine's configuration has them, a clause each.
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
    seconds: float | None = None
    starts: float | None = None
    behind: int = 0
    limits: tuple[str, ...] = ()


def write_body(request: str, note: str, *, confined: bool = False, **more: Any) -> bytes:
    """Write what people may want to know: names only, never arguments or values of variables."""
    words = {
        "request": clean(request),
        "note": clean(note),
        "command": clean(_command()),
        "namespace": pid_namespace(),
        "confined": confined,
    }
    return json.dumps(words | more, ensure_ascii=False).encode(errors="replace")


lease_body = lru_cache(maxsize=64)(write_body)
"""The same for a lease, of which nothing depends on the moment: a tenth of the time of a lease and back."""


def add_reason(body: bytes, reason: str) -> bytes:
    """Add to the body of a lease why it is kept although nobody uses it.

    Args:
        body: What is written in it: by anything that carries the lease, so it may be no JSON.
        reason: Why, for people to read.
    """
    words = read_object(body) | {"quarantined": clean(reason)}
    return json.dumps(words, ensure_ascii=False).encode(errors="replace")


def read_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object that somebody has written; empty for anything else."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_words(body: bytes) -> dict[str, Any]:
    """Read what :func:`write_body` wrote, or what somebody made up: short printable texts, whatever it says."""
    words = read_object(body)
    texts = {key: clean(words.get(key)) for key in ("request", "note", "command", "quarantined")}
    arrived = words.get("arrived")
    return {
        **texts,
        "confined": words.get("confined") is True,
        "here": words.get("namespace") in (None, pid_namespace()),
        "arrived": arrived if type(arrived) is int and abs(arrived) < 1 << 63 else process.monotonic_ns(),
    }


def read_number(value: object) -> float | None:
    """Read a number of seconds, or the like, as another process wrote it; None where it is none, or makes no sense."""
    return float(value) if type(value) in (int, float) and 0 <= value < 1 << 40 else None  # type: ignore[operator, arg-type] # pyright: ignore[reportOperatorIssue, reportArgumentType]


def read_locks(body: bytes) -> tuple[str, ...]:
    """Read which inodes the holder of a lease has locked beside its file."""
    locks = read_object(body).get("locks")
    return tuple(path for path in locks if isinstance(path, str)) if isinstance(locks, list) else ()


def clean(value: object) -> str:
    """Make a text of somebody else's printable and short; what is no text becomes empty."""
    return printable(value[:_TEXT_LIMIT]) if isinstance(value, str) else ""


def records(directory: int, listing: Listing) -> Iterator[LeaseRecord]:
    """Describe the leases that are in force."""
    leases = sorted(listing.leases, key=lambda lease: (lease.device, lease.name))
    found = states(directory, leases)
    for lease in leases:
        state = found[lease.name]
        if state.life is not Life.OVER:
            yield describe(directory, lease, state.life, state.carriers)


def describe(directory: int, lease: LeaseName, state: Life, carriers: tuple[int, ...] = ()) -> LeaseRecord:
    """Describe one lease."""
    try:
        found = os.stat(lease.name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        found = None
    kind, reason, hint = state.value, "", ""
    if state is Life.KEPT:
        reason, hint = _kept(carriers), _way_out(lease, found)
    elif state is Life.LEAVING and not process.ending(lease.pid):  # its file was made again, as ledger.recovery does
        kind = Life.HELD.value
    elif state is Life.LEAVING:
        where = process.waits_in(lease.pid)
        reason = f"process {lease.pid} has ended but not left the kernel" + (
            f", where it waits in {where}" * bool(where)
        )
    elif not lease.understood:
        kind, reason = "unknown", f"{lease.name!r} is locked and was not written by this version: all of it counts"
    words = read_words(read_body(directory, lease.name))
    quarantined = words.pop("quarantined")
    if state is Life.HELD and quarantined and not reason:
        kind, reason = "quarantined", quarantined
    del words["arrived"]
    if not reason and words["here"] and process.state(lease.pid) in _STOPPED:
        reason, hint = f"process {lease.pid} is stopped", f"it goes on with 'kill -CONT {lease.pid}'"
    return LeaseRecord(
        id=lease.id,
        device=lease.device,
        units=lease.extent.units,
        slots=slot_numbers(lease.extent.slots),
        state=kind,
        reason=reason,
        hint=hint,
        carriers=carriers,
        pid=lease.pid,
        **owner(found),
        since=found.st_mtime if found else None,
        until=_until(lease),
        **words,
    )


def _until(lease: LeaseName) -> float | None:
    """When a lease ends at the latest, in seconds since 1970 by the clock as it goes now."""
    if lease.period.until is None or lease.boot != boot():
        return None
    return since_1970(lease.period.until / 1000)


def since_1970(boot: float) -> float:
    """A time of the clock since the boot, in seconds since 1970 by the clock as it goes now."""
    return time.time() - process.boot_seconds() + boot


def _kept(carriers: tuple[int, ...]) -> str:
    """Say which processes keep a lease whose holder has ended: of each its user and program, never its arguments."""
    if not carriers:
        return "kept: whether a process of the ended lease still runs cannot be seen from here"
    shown = [f"{pid} ({who})" if (who := _who(pid)) else str(pid) for pid in carriers[:_SHOWN]]
    more = f" and {len(carriers) - len(shown)} more" if len(carriers) > len(shown) else ""
    several = len(carriers) > 1
    return f"kept: process{'es' * several} {', '.join(shown)}{more} of the ended lease still run{'s' * (not several)}"


def _who(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            program = file.read(64).rstrip("\n")
        return f"{user_name(os.stat(f'/proc/{pid}').st_uid)}, {clean(program)}"
    except OSError:
        return ""


def _way_out(lease: LeaseName, file: os.stat_result | None) -> str:
    """What its owner can do about a lease that is kept."""
    who = (
        "" if file and file.st_uid == os.geteuid() else f"{user_name(file.st_uid)} or root: " if file else "its owner: "
    )
    return (
        f"{who}'anyaccel release {lease.id}' ends them; "
        f"'anyaccel release --forget {lease.id}' gives the device back whatever still runs"
    )


def owner(found: os.stat_result | None) -> dict[str, Any]:
    """The ``uid`` and ``user`` of a record: unknown where a file has no state, or a user namespace hides its owner."""
    if found is None or unmapped(found.st_uid):
        return {"uid": None, "user": "unknown"}
    return {"uid": found.st_uid, "user": user_name(found.st_uid)}


def _command() -> str:
    return os.path.basename(sys.argv[0] if getattr(sys, "argv", None) else "")
