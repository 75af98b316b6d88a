"""The state of a machine and its devices at one moment, as ``status``, ``top`` and ``metrics`` show it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cached_property

import anyaccel
from anyaccel.cli import output
from anyaccel.errors import LedgerError
from anyaccel.inventory import LEASE_VARIABLE
from anyaccel.model import (
    UNITS_PER_DEVICE,
    Device,
    Health,
    Inventory,
    Stats,
    Value,
    field,
    find_memory,
    format_share,
    format_slots,
    format_units,
)
from anyaccel.probe import HOST
from anyaccel.text import clock, gibibytes, listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.ledger import LeaseRecord, TicketRecord

    Leases = Mapping[str, list[LeaseRecord]]

_NO_STATS = Stats()
_COMMAND_LIMIT = 4096
_SOON = 86400.0  # a later reservation is named below the table alone: its date would widen the column of states


class Sample(Value):
    """The state of a machine at one moment.

    Attributes:
        inventory: Its devices.
        observed: Measurements by device id.
        leases: Leases by device id; None when the ledger cannot be read.
        tickets: The waiting requests, in order.
        at: Time of the sample, in seconds since 1970.
        remarks: Errors of vendors that could not measure, reservations that have not begun, devices that were not put
            back, and the error of a ledger that cannot be read, a sentence each.
        reserved: Start of the next reservation for others by device id, if within a day, in seconds since 1970.
    """

    inventory: Inventory
    observed: Mapping[str, Stats]
    leases: Leases | None
    tickets: tuple[TicketRecord, ...]
    at: float
    remarks: tuple[str, ...] = ()
    reserved: Mapping[str, float] = field(default_factory=dict)

    def states(self) -> list[DeviceState]:
        """Return the devices, in the order of the inventory."""
        return [DeviceState(device, self) for device in self.inventory.devices]


class Holder(Value):
    """A holder of a device, or a process without a lease.

    Attributes:
        user: Name or number of the user, after a star for a process without a lease.
        program: Name of the program.
        pid: Its process; 0 when unknown.
        mine: Whether it belongs to the user of this process.
        state: State of the lease's record; ``unleased`` without a lease.
        share: The share that is held; empty without a lease.
        lease: Identity of the lease; empty without one.
        since: Start of the lease, in seconds since 1970; None when unknown.
        until: End of its time limit, in seconds since 1970; None for a lease without one.
        note: Note of the lease, and remarks about it.
    """

    user: str
    program: str
    pid: int
    mine: bool
    state: str
    share: str = ""
    lease: str = ""
    since: float | None = None
    until: float | None = None
    note: str = ""

    @property
    def command(self) -> str:
        """Command line of a process of this user; the program's name for others, since arguments may hold secrets."""
        try:
            # The process id may be that of another user's process by now.
            if not self.mine or os.stat(f"/proc/{self.pid}").st_uid != os.geteuid():
                return self.program
            with open(f"/proc/{self.pid}/cmdline", encoding="utf-8", errors="replace") as file:
                return file.read(_COMMAND_LIMIT).rstrip("\0").replace("\0", " ") or self.program
        except OSError:
            return self.program


class DeviceState:
    """A device at the moment of a sample.

    Attributes:
        device: The device.
        seen: Its measurements.
        records: Its leases; None when the ledger cannot be read.
    """

    def __init__(self, device: Device, sample: Sample) -> None:
        self.device: Device = device
        self.seen: Stats = sample.observed.get(device.id, _NO_STATS)
        self.records: list[LeaseRecord] | None = None if sample.leases is None else sample.leases.get(device.id, [])
        self._reserved = sample.reserved.get(device.id)
        self._here = sample.inventory.machine == HOST  # process ids of a recording belong to another machine

    @property
    def health(self) -> tuple[Health, str, str]:
        """Health, reason and remedy: as measured, or as detected if that is unknown."""
        # A device that detection found unhealthy stays so, although it may still be measured.
        detected = self.device.health is Health.UNHEALTHY or self.seen.health is Health.UNKNOWN
        known = self.device if detected else self.seen
        return known.health, known.health_reason, known.health_remedy

    @property
    def free(self) -> int | None:
        """Free units; None when the ledger cannot be read."""
        if not self.device.usable:
            return 0
        if self.records is None:
            return None
        # Leases of parts of one device may add up to more than the whole.
        return max(0, self.device.units - sum(record.units for record in self.records))

    @cached_property
    def holders(self) -> tuple[Holder, ...]:
        """The holders, and processes without a lease.

        A process counts as one without a lease when no lease of the device belongs to its user. Processes of a recorded
        machine are not looked up on this one.
        """
        from anyaccel.linux.process import read_name, user
        from anyaccel.linux.users import user_name

        users = {record.uid for record in self.records or ()}
        found = [_of_lease(record, self.device) for record in self.records or ()]
        for process in self.seen.processes or ():
            uid = user(process.pid) if self._here else None
            # Which processes a lease covers is not known: those of its user count as covered.
            if not self.records or (uid is not None and uid not in users):
                name = "" if uid is None else user_name(uid)
                found.append(
                    Holder(
                        user=f"*{name or '?'}",
                        program=(read_name(process.pid) if self._here else "") or f"process {process.pid}",
                        pid=process.pid,
                        mine=uid == os.geteuid(),
                        state="unleased",
                    )
                )
        return tuple(found)

    def describe_free(self) -> str:
        """Return how much is free: in GiB if a holder asked for memory, else in devices; ``-`` for unknown."""
        units, size = self.free, self.device.memory_bytes
        if units is None:
            return "-"
        if size and any(find_memory(record.units, record.request, size) for record in self.records or ()):
            return f"{gibibytes(units * size // UNITS_PER_DEVICE)}GiB"
        return format_units(units)

    def describe(self) -> tuple[str, str]:
        """Return the state of the device in a few words, and its style."""
        left = self.free
        odd = [holder.state for holder in self.holders if holder.state not in ("held", "unleased")]
        until = "" if self._reserved is None else f" until {clock(self._reserved)}"
        if self.health[0] is Health.UNHEALTHY:
            found = "unhealthy", "bad"
        elif not self.device.visible:
            found = "hidden", "dim"
        elif odd or left is None:
            # As in Slurm: a device that is drained and still held is draining.
            draining = odd[:1] == ["drained"] and any(holder.lease for holder in self.holders)
            found = "draining" if draining else "".join(odd[:1]) or "unknown", "warn"
        elif self.records:
            found = (f"{self.describe_free()} free{until}", "good") if left else ("held", "accent")
        elif self.holders:
            found = "busy", "warn"
        else:
            found = ("declared" if self.device.declared else "free") + until, "good"
        return found


def take_sample(
    inventory: Inventory,
    *,
    stats: bool = True,
    past: bool = True,
    timeout: float = 10.0,
    environ: Mapping[str, str] | None = None,
) -> Sample:
    """Measure the devices of a machine, and read its leases and waiting requests.

    Args:
        inventory: The devices.
        stats: Whether vendors measure their devices.
        past: Whether the order of requests counts ended leases where fair shares do, which are read from the journals.
        timeout: Seconds that each vendor may take.
        environ: The environment with the ledger's place; None for that of this process.
    """
    environ = os.environ if environ is None else environ
    observed, problems = anyaccel.stats(inventory, timeout=timeout, environ=environ) if stats else ({}, ())
    by_device: dict[str, list[LeaseRecord]] = {}
    held: Leases | None = by_device
    remarks, reserved = [str(problem) for problem in problems], dict[str, float]()
    tickets: tuple[TicketRecord, ...] = ()
    if inventory.devices:  # without devices there are no leases: importing the ledger would be in vain
        from anyaccel.launcher.scope import Scope
        from anyaccel.launcher.verdicts import leases
        from anyaccel.ledger import Ledger
        from anyaccel.linux.process import find_outer_user

        try:
            for record in leases(inventory, environ):
                by_device.setdefault(record.device, []).append(record)
            ledger = Ledger.open(environ)
            tickets = ledger.tickets(past=past)
            names, scope = {each.id: each.name for each in inventory.devices}, Scope.make(inventory, environ)
            user = find_outer_user(os.geteuid())
            for block in ledger.blocks():
                own = {scope.ids[key] for key in block.devices if key in scope.ids}
                if own and block.begin is not None and block.begin > time.time():
                    remarks.append(f"{output.device_names(sorted(names[each] for each in own))}: {block.describe()}")
                    # For the user of the reservation the device is free then, too.
                    if block.begin < time.time() + _SOON and user not in block.policy_block.users:
                        reserved |= {each: min(block.begin, reserved.get(each, block.begin)) for each in own}
            for key, lease in ledger.unfinished_handovers().items():
                if key in scope.ids:
                    left = f"{names[scope.ids[key]]} was not put back into its idle state after lease {lease}"
                    remarks.append(f"{left}; the next lease of it does that")
        except LedgerError as error:
            held = None
            remarks.append(f"leases are unknown: {error}")
    return Sample(
        inventory=inventory,
        observed=observed,
        leases=held,
        tickets=tickets,
        remarks=tuple(remarks),
        reserved=reserved,
        at=time.time(),
    )


def machine_notes(inventory: Inventory) -> list[str]:
    """Return remarks for a machine that is not this host, a view from inside a lease, and masks in the environment."""
    notes = []
    if inventory.machine != HOST:
        kind = "simulated" if inventory.machine.startswith("sim:") else "recorded"
        notes.append(f"{kind} machine {inventory.machine}")
    if (lease := os.environ.get(LEASE_VARIABLE)) and anyaccel.current() is not None:
        notes.append(f"inside lease {lease}: all other devices are hidden, and so are leases from outside")
    elif hidden := {device.id: device.name for device in inventory.devices if not device.visible}:
        from anyaccel.launcher.verdicts import find_masks

        if masks := find_masks(inventory, hidden, os.environ):
            notes.append(f"{output.device_names(hidden.values())} hidden by {listed(masks)} of this shell")
    return notes


def summary(sample: Sample) -> str:
    """Return the number of devices, and how many are free."""
    devices = sample.states()
    total = sum(device.free or 0 for device in devices)  # unknown counts as not free
    # Shares by memory leave odd parts: four decimals say no more than two.
    return f"{len(devices)} device{'s' * (len(devices) != 1)}, {format_units(total // 100 * 100)} free"


def notes(sample: Sample) -> list[str]:
    """Return remarks about the sample, a sentence each: unhealthy devices, errors of vendors and of the ledger."""
    found = []
    for state in sample.states():
        is_now, reason, remedy = state.health
        if is_now is Health.UNHEALTHY:
            told = f"{reason or 'no reason is known'}{'; ' if remedy else ''}{remedy}"
            found.append(f"{state.device.name} is unhealthy: {told}")
    return [*found, *sample.remarks]


def all_notes(sample: Sample) -> list[str]:
    """Return the remarks of detection and of the sample, a sentence each."""
    reports = sample.inventory.vendors
    found = [note for report in reports for note in report.notes]
    found += [str(report.problem) for report in reports if report.problem is not None]
    return found + notes(sample)


# The columns STATE and USER say that a device is drained or reserved, and by or for which user.
_REASONS = {"quarantined": "(quarantined: anyaccel doctor says why)", "drained": "", "reserved": ""}


def _of_lease(record: LeaseRecord, device: Device) -> Holder:
    from anyaccel.linux.process import read_name

    # The process that took a lease may have ended; a carrier still uses its devices.
    pid = record.carriers[0] if record.carriers else record.pid
    pid = _command_of(pid) if record.here else pid
    words = [
        f"(with {record.through})" if record.through else "",
        f"(slots {format_slots(record.slots)})" if record.slots else "",
        "(confined)" if record.confined else "",
        _REASONS.get(record.state, record.reason),
        record.note or record.request,
    ]
    return Holder(
        user=record.user,
        share=format_share(record.units or UNITS_PER_DEVICE, record.request, device.memory_bytes),
        program=(read_name(pid) if record.here else "") or record.command or "-",
        pid=pid,
        mine=record.uid == os.geteuid(),
        lease=record.id,
        since=record.since,
        until=record.until,
        note=" ".join(filter(None, words)),
        state=record.state,
    )


def _command_of(pid: int) -> int:
    """Return the command of a job, given the job's supervisor; any other process is returned unchanged."""
    from anyaccel.launcher.start import JOB_NAME
    from anyaccel.linux.process import children, read_name

    # A job is held by its supervisor, which is of no interest to people.
    if read_name(pid) != JOB_NAME:
        return pid
    found = children(pid)
    return found[0] if len(found) == 1 else pid
