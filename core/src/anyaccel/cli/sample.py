"""What ``status`` and ``top`` show: a machine, how its devices fare, who holds them and who waits, at one moment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import anyaccel
from anyaccel.errors import LedgerError
from anyaccel.model import (
    UNITS_PER_DEVICE,
    Device,
    Health,
    Inventory,
    Problem,
    Stats,
    Value,
    format_slots,
    format_units,
)
from anyaccel.probe import HOST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.ledger import LeaseRecord, TicketRecord

    Leases = Mapping[str, list[LeaseRecord]]

_NO_STATS = Stats()
_COMMAND_LIMIT = 4096
_MOST_REASONS = 64


class Sample(Value):
    """A machine at one moment.

    Attributes:
        inventory: What is on it.
        observed: What vendors told of their devices, by id.
        problems: Why some could not tell.
        leases: Leases by device id; None when they are not known.
        unknown: Why they are not.
        tickets: Those who wait, first to be served first.
        at: When it was taken, in seconds since 1970.
    """

    inventory: Inventory
    observed: Mapping[str, Stats]
    problems: tuple[Problem, ...]
    leases: Leases | None
    unknown: str
    tickets: tuple[TicketRecord, ...]
    at: float

    def stats(self, device: Device) -> Stats:
        """What is known of a device's state."""
        return self.observed.get(device.id, _NO_STATS)

    def of(self, device: Device) -> list[LeaseRecord]:
        """The leases of a device, as far as they are known."""
        return (self.leases or {}).get(device.id, [])


class Holder(Value):
    """Who has a device, or uses it without a lease.

    Attributes:
        user: Name or number of the user; a star in front of who has no lease.
        program: Name of the program.
        pid: Its process; 0 when unknown.
        mine: Whether it belongs to the user who asks.
        state: That of the lease's record; ``unleased`` without a lease.
        share: How much is held, as people write it; empty without a lease.
        lease: Identity of the lease; empty without one.
        since: When it was taken, in seconds since 1970; None when unknown.
        note: What for, and what else is to be known about it.
    """

    user: str
    program: str
    pid: int
    mine: bool
    state: str
    share: str = ""
    lease: str = ""
    since: float | None = None
    note: str = ""

    @property
    def command(self) -> str:
        """The command line of a process of one's own; of others the program's name: arguments may hold secrets."""
        try:
            if not self.mine or os.stat(f"/proc/{self.pid}").st_uid != os.geteuid():
                return self.program
            with open(f"/proc/{self.pid}/cmdline", encoding="utf-8", errors="replace") as file:
                return file.read(_COMMAND_LIMIT).rstrip("\0").replace("\0", " ") or self.program
        except OSError:
            return self.program


def look(
    inventory: Inventory,
    *,
    stats: bool = True,
    waiters: bool = True,
    timeout: float = 10.0,
    environ: Mapping[str, str] | None = None,
) -> Sample:
    """Look at a machine now.

    Args:
        inventory: What is on it.
        stats: Whether vendors are asked how their devices fare.
        waiters: Whether to look who waits.
        timeout: Seconds that each vendor may take.
        environ: The environment that says from where; that of this process when None.
    """
    environ = os.environ if environ is None else environ
    observed, problems = anyaccel.stats(inventory, timeout=timeout, environ=environ) if stats else ({}, ())
    found: dict[str, list[LeaseRecord]] = {}
    unknown = ""
    tickets: tuple[TicketRecord, ...] = ()
    if inventory.devices:  # nobody can hold what is not there
        from anyaccel.launcher.verdicts import leases
        from anyaccel.ledger import Ledger

        try:
            for record in leases(inventory, environ):
                found.setdefault(record.device, []).append(record)
            tickets = Ledger.open(environ).tickets() if waiters else ()
        except LedgerError as error:
            unknown = str(error)
    return Sample(
        inventory=inventory,
        observed=observed,
        problems=problems,
        leases=None if unknown else found,
        unknown=unknown,
        tickets=tickets,
        at=time.time(),
    )


def reason(ticket: TicketRecord) -> str:
    """Say why a request waits, as far as its ticket says."""
    if ticket.limits:
        return "; ".join(ticket.limits)
    if not ticket.responsive:
        return "it does not look for devices any more, and is overtaken: is it stopped?"
    if ticket.behind:
        return f"{ticket.behind} earlier request{'s are' if ticket.behind > 1 else ' is'} ahead"
    return "devices are in use"


def reasons(sample: Sample) -> list[str]:
    """Say why each request waits, in the order of the line: the first ones in the words of ``why``."""
    known: dict[str, str] = {}
    found = []
    for ahead, ticket in enumerate(sample.tickets):
        if ticket.limits or not ticket.responsive:
            found.append(reason(ticket))
            continue
        if ticket.request not in known and ahead < _MOST_REASONS:
            known[ticket.request] = _reason(ticket.request, sample.inventory)
        found.append(known.get(ticket.request) or (f"{ahead} came first" if ahead else "-"))
    return found


def _reason(text: str, inventory: Inventory) -> str:
    """Why a request does not fit beside what is held, in the words of ``why``; empty when it does."""
    from anyaccel.launcher.verdicts import ActiveLeases, judge_beside
    from anyaccel.ledger import Ledger

    try:
        request = anyaccel.parse_request(text.split())
        verdict = judge_beside(ActiveLeases.read(inventory, Ledger.open(), os.environ), inventory, request)
    except anyaccel.AnyaccelError as error:
        return str(error)
    if verdict.fits_now:
        return ""
    return verdict.message.removeprefix(f"{request} ").removeprefix("does not fit now: ")


def health(device: Device, seen: Stats) -> tuple[Health, str, str]:
    """Health, reason and remedy: what was seen last counts, unless it says nothing."""
    if seen.health is Health.UNKNOWN or device.health is Health.UNHEALTHY:
        return device.health, device.health_reason, device.health_remedy
    return seen.health, seen.health_reason, seen.health_remedy


def free(device: Device, sample: Sample) -> int | None:
    """Units of a device that are free now, or None when nobody knows."""
    if not device.usable:
        return 0
    if sample.leases is None:
        return None
    return max(0, device.units - sum(record.units for record in sample.of(device)))


def summary(sample: Sample) -> str:
    """How many devices there are, and how much of them is free."""
    devices = sample.inventory.devices
    total = sum(free(device, sample) or 0 for device in devices)
    return f"{len(devices)} device{'s' * (len(devices) != 1)}, {format_units(total)} free"


def state(device: Device, sample: Sample, holders: tuple[Holder, ...]) -> tuple[str, str]:
    """How a device stands, in a word or two, and the style in which that is shown."""
    left = free(device, sample)
    odd = [holder.state for holder in holders if holder.state not in ("held", "unleased")]
    if health(device, sample.stats(device))[0] is Health.UNHEALTHY:
        found = "unhealthy", "bad"
    elif not device.visible:
        found = "hidden", "dim"
    elif odd or left is None:
        found = "".join(odd[:1]) or "unknown", "warn"
    elif sample.of(device):
        found = (f"{format_units(left)} free", "good") if left else ("held", "accent")
    elif holders:
        found = "busy", "warn"
    else:
        found = "declared" if device.declared else "free", "good"
    return found


def notes(sample: Sample) -> list[str]:
    """What people should know beside the table, a sentence each."""
    found = []
    for device in sample.inventory.devices:
        is_now, reason, remedy = health(device, sample.stats(device))
        if is_now is Health.UNHEALTHY:
            told = f"{reason or 'the vendor gives no reason'}{'; ' if remedy else ''}{remedy}"
            found.append(f"{device.name} is unhealthy: {told}")
    found += map(str, sample.problems)
    if sample.unknown:
        found.append(f"who holds what is not known: {sample.unknown}")
    return found


def all_notes(sample: Sample) -> list[str]:
    """What people should know beside the table, with what detection said, a sentence each."""
    reports = sample.inventory.vendors
    found = [note for report in reports for note in report.notes]
    found += [str(report.problem) for report in reports if report.problem is not None]
    return found + notes(sample)


def holders(device: Device, sample: Sample) -> tuple[Holder, ...]:
    """Those who hold a device, and those who use it without a lease.

    A process counts as one without a lease when no lease of the device is its user's. Processes of a recorded machine
    are not looked up on this one.
    """
    from anyaccel.linux.process import user
    from anyaccel.linux.users import user_name

    here = sample.inventory.machine == HOST
    records = sample.of(device)
    users = {record.uid for record in records}
    found = [_of_lease(record) for record in records]
    for process in sample.stats(device).processes or ():
        uid = user(process.pid) if here else None
        if not records or (uid is not None and uid not in users):
            name = "" if uid is None else user_name(uid)
            found.append(
                Holder(
                    user=f"*{name or '?'}",
                    program=(program(process.pid) if here else "") or f"process {process.pid}",
                    pid=process.pid,
                    mine=uid == os.geteuid(),
                    state="unleased",
                )
            )
    return tuple(found)


def _of_lease(record: LeaseRecord) -> Holder:
    pid = record.carriers[0] if record.carriers else record.pid
    pid = _command_of(pid) if record.here else pid
    words = [
        f"(with {record.through})" if record.through else "",
        f"(slots {format_slots(record.slots)})" if record.slots else "",
        "(confined)" if record.confined else "",
        "(quarantined: anyaccel doctor says why)" if record.state == "quarantined" else record.reason,
        record.note or record.request,
    ]
    return Holder(
        user=record.user,
        share=format_units(record.units or UNITS_PER_DEVICE),
        program=(program(pid) if record.here else "") or record.command or "-",
        pid=pid,
        mine=record.uid == os.geteuid(),
        lease=record.id,
        since=record.since,
        note=" ".join(filter(None, words)),
        state=record.state,
    )


def _command_of(pid: int) -> int:
    """The command of a job, given its supervisor; any other process itself."""
    from anyaccel.launcher.detached import JOB_NAME
    from anyaccel.linux.process import children

    if program(pid) != JOB_NAME:
        return pid
    found = children(pid)
    return found[0] if len(found) == 1 else pid


def program(pid: int) -> str:
    """Name of the program that a process runs; empty when it cannot be seen."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read(64).removesuffix("\n")
    except OSError:
        return ""
