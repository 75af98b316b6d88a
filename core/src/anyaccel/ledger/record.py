"""Leases and tickets in the form that people and programs see."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from anyaccel.ledger import entries
from anyaccel.ledger.entries import LeaseName, LeaseState, Life, Listing
from anyaccel.linux import pid_namespace, process, user_name
from anyaccel.model import (
    UNITS_PER_DEVICE,
    Value,
    find_memory,
    format_memory,
    format_share,
    format_slots,
    format_units,
    slot_numbers,
)
from anyaccel.text import clean, clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BLOCKED = ("drained", "reserved")
"""States of records that stand for no lease, but for devices that are withheld from requests."""
_STOPPED = ("T", "t")  # by a signal, by a debugger
_USERS = 4
_SHOWN = 3  # processes that a reason names; the others are counted


class LeaseRecord(Value):
    """One device of a lease.

    Attributes:
        id: Identity of the lease, the same for each of its devices; empty if the name is not understood.
        device: Name of the device in the ledger, ``vendor/id``; of a physical part its path.
        units: Units of the device that are held, in 1/10000; 0 if a part is held that is a device of its own.
        slots: The slots that are held; empty for all, or if unknown.
        state: ``held``; ``quarantined`` if the holder keeps the device although no process uses it; ``leaving`` if
            the holder was killed and has not left the kernel yet; ``on behalf`` if other processes use the device, and
            no process holds the lease; ``kept`` if the holder has ended and processes
            that were started with the lease still run; ``unknown`` for a locked file that is not understood, which
            counts as the whole device; ``outside`` if the device itself is locked without a lease; ``drained`` or
            ``reserved`` for a device that is withheld from requests, without a lease.
        reason: Reason of the state, of a file that cannot be opened, or of a holder that is stopped by a signal or a
            debugger; empty for a lease that is simply held, or ``on behalf`` and renewed in time.
        hint: The way out of a kept lease, of one on behalf that is not renewed, of a stopped holder, of a file that
            cannot be opened, or of a block that this user may lift; else empty.
        carriers: Visible processes that keep the lease although its holder has ended.
        pid: Process that took the lease; 0 when unknown. It may have ended while its children live on.
        here: Whether the process id is valid in this container: the lease was taken in the same process namespace.
        uid: Owner of the file, or None if the file could not be read, or the owner has no number in this user
            namespace.
        user: Name of that user, or its number; ``unknown`` if ``uid`` is None.
        since: Start of the lease, in seconds since 1970 by the clock of that time; None when unknown.
        request: Text of the request, from the holder like the three below: no proof of anything.
        note: Purpose of the lease.
        command: Name of the program.
        confined: Whether the holder is confined to its devices.
        through: Id of the device that is really held, if that is a part of this device, or this device a part of it.
        until: End of the time limit, in seconds since 1970; None without a limit.
        key: Identity of the use, of a lease on behalf of other processes; empty for other leases.
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
    key: str = ""

    def __str__(self) -> str:
        where = f", slots {format_slots(self.slots)}" if self.slots else ""
        share = "" if self.units == UNITS_PER_DEVICE else f" ({format_share(self.units, self.request)} of it{where})"
        if self.state == "outside":
            return self.reason
        if self.state in BLOCKED:
            return f"{entries.without_scope(self.device)} is {self.reason}"
        words = f", {self.note or self.request!r}" if self.note or self.request else ""
        why = f"; {self.reason}" if self.reason else ""
        share = f" (with {self.through})" if self.through else share
        name = entries.without_scope(self.device)
        holder = self.state if self.state == Life.ON_BEHALF.value else f"process {self.pid or 'unknown'}"
        return f"{name}{share} is held by {self.user} ({holder}{words}){why}"


class TicketRecord(Value):
    """A waiting request.

    Attributes:
        id: Identity of the ticket.
        priority: The higher, the earlier.
        pid: Process that waits.
        uid: Owner of the file, or None if the file could not be read.
        user: Name of that user, or its number.
        waited: Seconds of the wait so far.
        responsive: Whether the process has looked for devices lately; otherwise the request is passed.
        seconds: Time limit of the lease; None for no limit.
        starts: Start if every lease lasts until its time limit, in seconds since 1970; None when unknown.
        behind: Number of earlier requests that want one of the same devices.
        limits: The limits of the user that are in the way, from the machine's configuration, a clause each.
        used: Device-seconds that fair shares count for the user; None if the machine counts no use over time.
        request: Text of the request, like the two below without proof.
        note: Purpose of the lease.
        command: Name of the program.
        reason: Why it waits, as a clause for people.
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
    used: float | None = None
    reason: str = ""


def describe_obstacles(records: Iterable[LeaseRecord], places: Mapping[str, str]) -> str:
    """Say who has how many of the wanted devices and until when: ``alice has 3 until 22:00, bob 20GiB; 1 drained``.

    The user with the most devices comes first; of the users, the first four are named, and the others counted. The time
    is that by which all leases of the user have ended; it is left out if one of them has no time limit. This user is
    ``you``; leases of this process, and leases that are kept after their holder's end, count apart. Empty without
    records.

    Args:
        records: The leases and withheld devices in the way of a request.
        places: Line of the program that took a lease of this process, by id of the lease.
    """
    units: dict[str, int] = {}
    memory: dict[str, int] = {}  # of shares by memory, which do not count as units
    ends: dict[str, list[float | None]] = {}
    withheld: dict[str, int] = {}
    # A lease of a device also has records of the device's parts: it counts once.
    for record in {(each.id, each.through or each.device): each for each in records}.values():
        if record.state in BLOCKED:
            name = describe_block(record)
            withheld[name] = withheld.get(name, 0) + 1
            continue
        name = "you" if record.uid == os.geteuid() else record.user
        if record.id in places:
            name = f"this process ({places[record.id]})"
        elif record.state == Life.KEPT.value:
            name = f"what {name} left running"
        asked = find_memory(record.units, record.request)
        memory[name] = memory.get(name, 0) + asked
        units[name] = units.get(name, 0) + (0 if asked else record.units or UNITS_PER_DEVICE)
        ends.setdefault(name, []).append(record.until)
    clauses: list[str] = []
    for name in sorted(units, key=lambda name: (-units[name], -memory[name])):
        known = [end for end in ends[name] if end is not None]
        until = f" until {clock(max(known))}" if len(known) == len(ends[name]) else ""
        verb = "" if clauses else " have" if name == "you" else " has"  # of several users, the first one has the verb
        parts = [format_units(units[name])] * bool(units[name]) + [format_memory(memory[name])] * bool(memory[name])
        clauses.append(f"{name}{verb} {' and '.join(parts)}{until}")
    if len(clauses) > _USERS:
        clauses[_USERS:] = [f"{len(clauses) - _USERS} more users the rest"]
    blocks = (f"{count} {name}" for name, count in withheld.items())
    return "; ".join(filter(None, (", ".join(clauses), *blocks)))


def describe_block(record: LeaseRecord, *, note: bool = False) -> str:
    """Say that a device is drained, or reserved for a user until or from a time; with ``note``, also the purpose.

    A record that is not drained counts as a reservation: running with its end, future with its start. With ``note``, a
    drain also has its author.
    """
    if record.state == "drained":
        return record.reason if note else record.state
    begun = record.since is None or record.since <= time.time()
    times = f"until {clock(record.until)}" if begun else f"from {clock(record.since)}"
    return f"reserved for {record.user} {times}" + (f" ({record.note})" if note and record.note else "")


def describe_ahead(count: int) -> str:
    """Say how many earlier requests block a request, as a clause; not for 0."""
    return f"{count} earlier request{'s are' if count > 1 else ' is'} ahead"


def write_body(request: str, note: str, *, confined: bool = False, **more: Any) -> bytes:
    """Encode the facts for other users as JSON: request, note, command, namespace, confined, and ``more`` as given.

    Texts are made printable and cut to 250 characters, except in ``more``, which may replace entries of the same name.
    Of the command, only the name is written. Callers pass names only, never arguments or values of variables.
    """
    words = {
        "request": clean(request),
        "note": clean(note),
        "command": clean(_command()),
        "namespace": pid_namespace(),
        "confined": confined,
    }
    return json.dumps(words | more, ensure_ascii=False).encode(errors="replace")


lease_body = lru_cache(maxsize=64)(write_body)
""":func:`write_body` for a lease, whose body does not depend on the time: the cache saves a tenth of acquire and
release."""


def read_words(body: bytes) -> dict[str, Any]:
    """Parse the body of a lease or ticket into short printable texts, whatever another user has written.

    Returns:
        The texts ``request``, ``note``, ``command`` and ``quarantined``, empty where missing, cut to 250 characters;
        ``confined``; and ``here``, whether process ids are valid in this container, also True if the body names no
        namespace.
    """
    words = entries.read_object(body)
    texts = {key: clean(words.get(key)) for key in ("request", "note", "command", "quarantined")}
    return {
        **texts,
        "confined": words.get("confined") is True,
        "here": words.get("namespace") in (None, pid_namespace()),
    }


def read_locks(body: bytes) -> tuple[str, ...]:
    """Return the paths that the body of a lease names as locked beside the lease's file; empty if it names none.

    Anything but a text is left out; nothing else is verified.
    """
    locks = entries.read_object(body).get("locks")
    return tuple(path for path in locks if isinstance(path, str)) if isinstance(locks, list) else ()


def list_leases(directory: int, listing: Listing) -> Iterator[LeaseRecord]:
    """Yield a record for each device of each active lease, sorted by device; ended leases are left out.

    After a recovery, several processes may have a file for the same device of a lease: the first file counts. All locks
    are tested before the first record. A file that is removed after that still has a record, without owner, start and
    texts.

    Raises:
        OSError: When a lock cannot be tested, as for want of descriptors.
    """
    leases = sorted(listing.leases, key=lambda lease: (lease.device, lease.name))
    active = entries.find_active(directory, leases)
    described = set()
    for lease in leases:
        if state := active.get(lease.name):
            record = _describe(directory, lease, state)
            # With the owner: a user who copies the identity of another user's lease does not hide that lease.
            part = lease.id, lease.device, lease.extent, record.uid
            if not lease.id or part not in described:
                described.add(part)
                yield record


def _describe(directory: int, lease: LeaseName, state: LeaseState) -> LeaseRecord:
    """Describe one device of an active lease by the lease's name, file and process.

    State, reason and hint follow from ``state``, the body and the process: see :class:`LeaseRecord`. If the file is
    gone, the owner and start are unknown, the texts empty, and the process id counts as valid here.

    Args:
        directory: Descriptor of the state directory.
        lease: The parsed name.
        state: Reason why the lease is active.
    """
    found = entries.stat_of(directory, lease.name)
    kind, reason, hint = _explain(directory, lease, state, found)
    words = read_words(entries.read_body(directory, lease.name))
    quarantined = words.pop("quarantined")
    if state.life is Life.HELD and quarantined and not reason:
        kind, reason = "quarantined", quarantined
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
        carriers=state.carriers,
        pid=lease.pid,
        **owner(found),
        since=found.st_mtime if found else None,
        until=_until(lease),
        key=state.key,
        **words,
    )


def _explain(directory: int, lease: LeaseName, state: LeaseState, file: os.stat_result | None) -> tuple[str, str, str]:
    """Return the state of a lease's record, the reason, and the way out; see :class:`LeaseRecord`.

    A holder that is stopped, or that keeps the device in quarantine, is not considered.

    Args:
        directory: Descriptor of the state directory.
        lease: The parsed name.
        state: Reason why the lease is active.
        file: State of the lease's file; None if unknown.
    """
    life = state.life
    if life is Life.LEAVING and not process.ending(lease.pid):  # ledger.recovery made the file again, unlocked
        life = Life.HELD
    if life is Life.KEPT:
        return life.value, _kept(state.carriers), _way_out(lease, file)
    if life is Life.ON_BEHALF and not state.reason.startswith(entries.RENEWED):
        hint = (
            "start the program again that took the lease, such as the Kubernetes agent; or 'anyaccel release --forget"
            f" {lease.id}' once nothing uses the device"
        )
        return life.value, state.reason, hint
    if life is Life.LEAVING:
        where = process.waits_in(lease.pid)
        suffix = f", where it waits in {where}" if where else ""
        return life.value, f"process {lease.pid} has ended but not left the kernel{suffix}", ""
    if not lease.understood:
        reason = f"{lease.name!r} is locked and was not written by this version: all of it counts"
        return "unknown", reason, ""
    if obstacle := entries.find_obstacle(directory, lease.name):
        hint = "have root remove the file, or its owner end the program"
        return life.value, f"its file {lease.name!r} {obstacle}", hint
    return life.value, "", ""


def _until(lease: LeaseName) -> float | None:
    """Return the end of a lease's time limit, in seconds since 1970 by the present clock.

    None without a limit, and for a lease of another boot.
    """
    if lease.period.until is None or lease.boot != entries.boot():
        return None
    return since_1970(lease.period.until / 1000)


def since_1970(boot: float) -> float:
    """Convert seconds since the boot to seconds since 1970 by the present clock."""
    return time.time() - process.boot_seconds() + boot


def since_boot(when: float) -> float:
    """Convert seconds since 1970 by the present clock to seconds since the boot."""
    return process.boot_seconds() - time.time() + when


def _kept(carriers: tuple[int, ...]) -> str:
    """Describe the processes that keep a lease after its holder's end: the first three by user and program.

    Arguments are never named, since they may hold secrets. Without processes, say that none can be seen from here.
    """
    if not carriers:
        return "kept: whether a process of the ended lease still runs cannot be seen from here"
    shown = [f"{pid} ({who})" if (who := _who(pid)) else str(pid) for pid in carriers[:_SHOWN]]
    more = f" and {len(carriers) - len(shown)} more" if len(carriers) > len(shown) else ""
    several = len(carriers) > 1
    return f"kept: process{'es' * several} {', '.join(shown)}{more} of the ended lease still run{'s' * (not several)}"


def _who(pid: int) -> str:
    """Return user and program's name of a process, as ``user, name``; empty if the process cannot be read."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    return f"{user_name(owner)}, {clean(process.read_name(pid))}"


def _way_out(lease: LeaseName, file: os.stat_result | None) -> str:
    """Describe the commands that end a kept lease; first the users who may run them unless this user owns the lease.

    Args:
        lease: The lease.
        file: State of the lease's file; None if unknown.
    """
    who = (
        "" if file and file.st_uid == os.geteuid() else f"{user_name(file.st_uid)} or root: " if file else "its owner: "
    )
    return (
        f"{who}'anyaccel release {lease.id}' ends the processes that keep its device; "
        f"'anyaccel release --forget {lease.id}' releases the device even if they still run"
    )


def owner(found: os.stat_result | None) -> dict[str, Any]:
    """Return ``uid`` and ``user`` of a record: number and name of a file's owner.

    These are None and ``unknown`` if the file has no state, or a user namespace hides the owner.
    """
    if found is None or process.is_user_unmapped(found.st_uid):
        return {"uid": None, "user": "unknown"}
    return {"uid": found.st_uid, "user": user_name(found.st_uid)}


def _command() -> str:
    """Return the base name of this program; empty if there is none."""
    return os.path.basename(sys.argv[0] if getattr(sys, "argv", None) else "")
