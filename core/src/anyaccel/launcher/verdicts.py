"""Report and watch the leases of a machine, judge whether a new request would be served now, and describe waits."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from time import time as since_1970

from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import AnyaccelError
from anyaccel.inventory import LEASE_VARIABLE
from anyaccel.inventory.detect import detect
from anyaccel.launcher.environment import worker_environment
from anyaccel.launcher.scope import LedgerRequest, Scope
from anyaccel.ledger import BLOCKED, LeaseRecord, Ledger, describe_ahead, describe_block, describe_obstacles
from anyaccel.model import (
    ANY_SLOTS,
    DIVIDED,
    UNITS_PER_DEVICE,
    Device,
    Extent,
    Inventory,
    Request,
    Value,
    describe_parts,
    replace,
    slot_mask,
)
from anyaccel.scheduler import Reason, ReasonCode, Scheduler, Verdict, apply_limits, parse_request
from anyaccel.text import LONGEST_DURATION, clock, span
from anyaccel.vendors import KnownNames, validate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from anyaccel.ledger import Want
    from anyaccel.policy import OverLimit

LOOK_SECONDS = 1.0
"""Seconds between two looks at the ledger."""
_LISTED = 4


def why(
    request: str | Sequence[str] | Request,
    *,
    time: Duration | None = None,
    priority: int = 0,
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    **where: Any,
) -> Verdict:
    """Judge whether :func:`acquire` would get devices now, given leases, earlier requests and this user's limits.

    Drained devices count as taken, and so do devices with a reservation for other users that begins before the request
    would end: without ``time``, each later reservation counts. Use without a lease is not observed, although
    :func:`acquire` avoids devices with too little free memory for a filter of the request.

    Args:
        request: The request.
        time: Time limit of the request, in seconds or as a text such as ``"1h30m"``; None for none.
        priority: A request of higher priority is served first.
        inventory: The machine's inventory; detected if None.
        environ: Environment to read; that of this process if None.
        where: ``machine``, ``declare`` and ``timeout`` as for :func:`anyaccel.detect`; ignored with an ``inventory``.

    Returns:
        The verdict, with reasons and the nearest request that fits. If the request can ever fit, ``gaps`` warns of
        devices that would stay open to the worker.

    Raises:
        RequestError, UnknownNameError: If the request is invalid.
        UsageError: If ``time`` is no duration, or the variable of the lease around this process is invalid.
        MachineError: If there is no such machine.
        ConfigurationError: If the machine's configuration is invalid or untrusted.
        LedgerError: If the ledger cannot be read.

    Examples:
        >>> verdict = anyaccel.why("GPU:3", machine="sim:H100:2")
        >>> verdict.fits_now, verdict.ever_fits, str(verdict.nearest)
        (False, False, 'GPU:2')
        >>> print(verdict.message)
        GPU:3 can never fit: this machine has 2 GPU (2 H100).
    """
    environ = os.environ if environ is None else environ
    inventory = inventory or detect(environ=environ, **where)
    seconds = read_seconds("time", time, positive=True)
    asked = LedgerRequest(inventory, parse_request(request), environ, seconds=seconds)
    verdict = judge(asked, Ledger.open(environ), priority)
    return replace(verdict, gaps=_find_gaps(asked)) if verdict.ever_fits else verdict


def estimate_start(
    request: Request,
    *,
    time: float | None = None,
    inventory: Inventory,
) -> float | None:
    """Estimate when a new request of this user would start if every lease lasts until its time limit.

    Args:
        request: The request, which fits the machine.
        time: Time limit of the request in seconds; None for none.
        inventory: The machine's inventory.

    The priority is 0. The environment is that of this process.

    Returns:
        Seconds since 1970; None if a lease or request ahead has no time limit, or if the request is over a limit of
        this user that lasts.

    Raises:
        UsageError: If the variable of the lease around this process is invalid.
        LedgerError: If the ledger cannot be read.
    """
    return Ledger.open().forecast_start(LedgerRequest(inventory, request, os.environ, seconds=time).want)


def leases(inventory: Inventory, environ: Mapping[str, str] | None = None) -> tuple[LeaseRecord, ...]:
    """Return the active leases, drains and begun reservations of a machine: a record for each device of each.

    A lease of a device also has records for its parts, and for devices of which it is a part, with ``through``.
    Inside a lease, only what was leased within it is returned.

    Args:
        inventory: The machine; records of devices that it does not list are left out.
        environ: The environment, which names the state directory and the lease around this process, if any; that of
            this process if None.

    Raises:
        LedgerError: If the ledger cannot be read.
        UsageError: If the variable of the lease around this process is invalid.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> with anyaccel.acquire("GPU:0.5", inventory=inventory, note="evaluation"):
        ...     [(record.units, record.note) for record in anyaccel.leases(inventory)]
        [(5000, 'evaluation')]
    """
    environ = os.environ if environ is None else environ
    return Scope.make(inventory, environ).select_records(Ledger.open(environ).leases())


def find_limits(request: Request, *, time: float | None, priority: int, inventory: Inventory) -> tuple[OverLimit, ...]:
    """Return the limits of this user, and of the user's group, in the way of a new request; empty for none.

    The limits of devices count the active leases: the user's, or those of all members of the group.

    Args:
        request: The request, which fits the machine.
        time: Time limit of the request in seconds; None for none.
        priority: Priority of the request.
        inventory: The machine's inventory.

    Raises:
        UsageError: If the variable of the lease around this process is invalid.
        ConfigurationError: If the machine's configuration is invalid or untrusted.
        LedgerError: If the ledger cannot be read.
    """
    return Ledger.open().over_limits(LedgerRequest(inventory, request, os.environ, seconds=time).want, priority)


def judge(asked: LedgerRequest, ledger: Ledger, priority: int) -> Verdict:
    """Judge a new request by the leases, then by the user's limits, then by earlier requests.

    A request that never fits is not compared with limits. A request that does not fit beside leases and limits is not
    compared with the queue, but the nearest request that fits is. If the request would fit now with a shorter time
    limit, which ends before a reservation begins or lets the request pass earlier ones, the first way out is the
    longest such limit, in whole minutes.

    Args:
        asked: The request, with its time limit.
        ledger: The ledger.
        priority: Priority of the request.

    Raises:
        ConfigurationError: If the machine's configuration is invalid or untrusted.
        LedgerError: If the ledger cannot be read.
    """
    want = asked.want
    verdict = _judge(asked, want, ledger, priority)
    if not verdict.ever_fits:
        return name_masks(verdict, asked.inventory, asked.environ)
    if verdict.fits_now:
        return verdict
    now = since_1970()
    times = {block.begin - now for block in ledger.blocks() if block.begin is not None}
    times.add(ledger.find_time_to_pass(want, priority))
    for time in sorted(times - {math.inf}, reverse=True):
        shorter = min(time // 60 * 60, LONGEST_DURATION)
        if not 0 < shorter < (want.seconds or math.inf):
            continue
        if _judge(asked, replace(want, seconds=shorter), ledger, priority).fits_now:
            return replace(verdict, ways_out=(f"fits now with --time {span(shorter)}", *verdict.ways_out))
    return verdict


def _judge(asked: LedgerRequest, want: Want, ledger: Ledger, priority: int) -> Verdict:
    """Judge a new request as in :func:`judge`, but for the time limit of ``want`` alone."""
    held = ActiveLeases.read(asked.inventory, ledger, asked.environ, time=want.seconds)
    scheduler = Scheduler(asked.inventory, validate, KnownNames(), list_holders=held.list_holders)
    for lease, devices in held.devices.items():
        scheduler.occupy(devices, holder=lease)
    verdict = held.add_hints(scheduler.why(asked.request))
    if not verdict.ever_fits:
        return verdict
    # Limits before the queue: a request over its limit waits for the user's own leases, not for earlier requests.
    verdict = apply_limits(verdict, ledger.over_limits(want, priority))
    if not verdict.fits_now:
        return _without_blocked(verdict, asked, want.seconds, ledger, priority)
    if not (ahead := ledger.count_ahead(want, priority, asked.choose)):
        return verdict
    message = describe_ahead(ahead)
    if (used := ledger.count_usage()) is not None:
        message += f", and fair shares count {used / 3600:.3g} device-hours of yours"
    reasons = (Reason(code=ReasonCode.WAITING_BEHIND, message=message),)
    return replace(verdict, fits_now=False, reasons=reasons, ways_out=("'anyaccel queue' shows who waits",))


def name_masks(verdict: Verdict, inventory: Inventory, environ: Mapping[str, str]) -> Verdict:
    """Return the verdict with a way out that names the variables that hide devices; unchanged inside of a lease."""
    hidden = {each for reason in verdict.reasons if reason.code is ReasonCode.HIDDEN for each in reason.devices}
    masks = find_masks(inventory, hidden, environ)
    if not masks:
        return verdict
    told = f"in a shell whose lease has ended, 'unset {' '.join(masks)}' shows them again"
    return replace(verdict, ways_out=(*verdict.ways_out, told))


def find_masks(inventory: Inventory, hidden: Collection[str], environ: Mapping[str, str]) -> list[str]:
    """Return the variables of an environment that may hide devices, given by id; none inside of a lease."""
    if not hidden or LEASE_VARIABLE in environ:
        return []
    vendors = {device.vendor for device in inventory.devices if device.id in hidden}
    edits = (report.hidden for report in inventory.vendors if report.vendor in vendors)
    return [name for each in edits if each is not None for name in each.set if name in environ]


def _without_blocked(
    verdict: Verdict, asked: LedgerRequest, seconds: float | None, ledger: Ledger, priority: int
) -> Verdict:
    """Return the verdict without the nearest request that fits now, if limits or earlier requests are in its way."""
    if verdict.nearest_now is None:
        return verdict
    near = LedgerRequest(asked.inventory, verdict.nearest_now, asked.environ, seconds=seconds)
    blocked = ledger.over_limits(near.want, priority) or ledger.count_ahead(near.want, priority, near.choose)
    return replace(verdict, nearest_now=None) if blocked else verdict


class ActiveLeases(Value):
    """The active leases of a machine's devices.

    Attributes:
        records: One record for each device of each lease.
        devices: The part of each device that a lease holds, by the id of the lease, then of the device.
        holders: Clause with user, devices and end, by the id of the lease: ``ben has acme/0-3 until 16:17 (...)``.
        withheld: Ids in ``devices`` that stand for a drain or a reservation.
    """

    records: tuple[LeaseRecord, ...]
    devices: Mapping[str, Mapping[str, Extent]]
    holders: Mapping[str, str]
    withheld: frozenset[str] = frozenset()

    @classmethod
    def read(
        cls, inventory: Inventory, ledger: Ledger, environ: Mapping[str, str], *, time: float | None = None
    ) -> ActiveLeases:
        """Read the active leases, and the devices withheld from a request of this user with a time limit.

        A device that is taken only through another listed device is missing in ``devices``. A lease file that is not
        understood, a drain and a reservation count under an id of their own; blocks with the same reason share one.

        Args:
            inventory: The machine.
            ledger: The ledger.
            environ: The environment of the process, for :meth:`Scope.make`.
            time: Time limit of the request in seconds; None for none.

        Raises:
            LedgerError: If the ledger cannot be read.
            UsageError: If the variable of the lease around this process is invalid.
        """
        scope, obstacles = Scope.make(inventory, environ), tuple(ledger.find_obstacles(time))
        first: dict[str, LeaseRecord] = {}
        taken: dict[str, dict[str, Extent]] = {}
        blocks: dict[str, str] = {}
        for record in obstacles:
            # A lease file that is not understood has no id: each counts by itself.
            key = record.id or f"unknown-{len(first)}"
            if record.state in BLOCKED:  # the reason is that of the drain or reservation, which has several devices
                kind = "drain" if record.state == "drained" else "reservation"
                key = blocks.setdefault(record.reason, f"{kind}-{len(first)}")
            first.setdefault(key, record)
            slots = slot_mask(record.slots) if record.slots else ANY_SLOTS
            part = Extent(record.units, slots) if record.units else DIVIDED
            taken.setdefault(key, {})[record.device] = part
        devices = {key: held for key, names in taken.items() if (held := scope.to_devices(names))}
        listed = {device.id: device for device in inventory.devices}
        holders = {}
        for key, held in devices.items():
            units = [(listed[each], extent.units or UNITS_PER_DEVICE) for each, extent in held.items()]
            holders[key] = describe_holder(first[key], units)
        records = scope.select_records(obstacles)
        return cls(records=records, devices=devices, holders=holders, withheld=frozenset(blocks.values()))

    def add_hints(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the hints of the leases that hold taken devices; unchanged if no end of one helps."""
        if verdict.fits_now or not verdict.ever_fits:
            return verdict
        blocking = {device for reason in verdict.reasons for device in reason.devices}
        ways = (record.hint for record in self.records if record.device in blocking)
        return replace(verdict, ways_out=tuple(dict.fromkeys(filter(None, (*verdict.ways_out, *ways)))))

    def list_holders(self, ids: Iterable[str]) -> str:
        """Return clauses about the first four leases of several, and about each drain and reservation."""
        ids = tuple(ids)
        clauses = [self.holders.get(key, f"held by {key}") for key in ids if key not in self.withheld]
        if len(clauses) > _LISTED:
            clauses[_LISTED:] = [f"{len(clauses) - _LISTED} more"]
        return "; ".join((*clauses, *(self.holders[key] for key in ids if key in self.withheld)))


def _find_gaps(asked: LedgerRequest) -> tuple[str, ...]:
    """Return warnings about devices left open to a worker, served on an idle machine; empty on an error of anyaccel."""
    with contextlib.suppress(AnyaccelError):
        allocation = Scheduler(asked.inventory, validate, KnownNames()).allocate(asked.request)
        return worker_environment(allocation, asked.inventory, environ=asked.environ).allocation.gaps
    return ()


def describe_holder(record: LeaseRecord, parts: Iterable[tuple[Device, int]]) -> str:
    """Return a clause with user, devices and end of a lease; then purpose, odd state and id in parentheses.

    Such as ``ben has acme/0-3 until 16:17 (evaluation, lease ead9a23527e7)``, or ``you have`` for this user. Without a
    note, the purpose is the request, else the command, else the key. A lease of this process also has the line that
    took it. For a drain or reservation: ``acme/3 is drained by root: new fan``.

    Args:
        record: A record of the lease, drain or reservation.
        parts: Its devices, each with the held part in 1/10000.
    """
    shown = describe_parts(parts, record.request)
    several = "," in shown or "-" in shown.rpartition("/")[2]
    if record.state in BLOCKED:
        return f"{shown} {'are' if several else 'is'} {describe_block(record, note=True)}"
    words = record.note or record.request or record.command or record.key
    place = ""
    if record.pid == os.getpid():
        from anyaccel.launcher.open_lease import list_own_leases  # other commands than those that lease do without

        own = list_own_leases()
        place = own[record.id][1] if record.id in own else ""
    more = (words, record.reason, place and f"taken by this process at {place}", record.id and f"lease {record.id}")
    who = "you have" if record.uid == os.geteuid() else f"{record.user} has"
    until = "" if record.until is None else f" until {clock(record.until)}"
    return f"{who} {shown}{until} ({', '.join(filter(None, more))})"


def describe_wait(place: int, holders: Iterable[LeaseRecord], limits: Iterable[OverLimit]) -> str:
    """Return a sentence with the queue position and the obstacles of a request: limits, then holders of devices.

    The devices are counted by user, as :func:`describe_obstacles` does. Without limits and holders, the obstacles are
    the earlier requests, ``place - 1``; without these, too, use of the devices without a lease.

    Args:
        place: The queue position, 1 for the next.
        holders: The leases and withheld devices in the way.
        limits: The limits in the way.
    """
    from anyaccel.launcher.open_lease import list_own_leases

    taken = describe_obstacles(holders, {key: line for key, (_, line) in list_own_leases().items()})
    obstacles = "; ".join(filter(None, (*(each.message() for each in limits), taken)))
    end = "th" if place % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    ahead = describe_ahead(place - 1) if place > 1 else "the devices are in use without a lease"
    return f"waiting ({place}{end}): {obstacles or ahead}"


class LeaseWatch:
    """An iterator over the leases of a machine: the present leases first, then the new list after each change.

    :meth:`close` ends the iteration; any thread may call it.
    """

    def __init__(self, inventory: Inventory, environ: Mapping[str, str] | None, every: float) -> None:
        self._inventory, self._environ, self._every = inventory, environ, every
        self._known: tuple[LeaseRecord, ...] | None = None
        import threading

        self._closed = threading.Event()

    def close(self) -> None:
        """End the iteration over the leases; a thread that waits for the next change gets StopIteration at once."""
        self._closed.set()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[LeaseRecord, ...]:
        while not self._closed.wait(self._every if self._known is not None else 0):
            found = leases(self._inventory, self._environ)
            # A reason may tell a remaining time, which is no change.
            plain = tuple(replace(record, reason="", until=None) for record in found)
            if plain != self._known:
                self._known = plain
                return found
        raise StopIteration


def watch_leases(
    inventory: Inventory, *, every: Duration = LOOK_SECONDS, environ: Mapping[str, str] | None = None
) -> LeaseWatch:
    """Watch the leases, drains and reservations of a machine for changes.

    Args:
        inventory: The machine.
        every: Time between two looks at the ledger, in seconds or as a text such as ``"5s"``.
        environ: The environment, which may name the state directory; that of this process if None.

    Returns:
        An iterator over the records of :func:`anyaccel.leases`: the present ones at once, then again after each change,
        for which the iterator waits. A change of a reason or an end alone is none. The iteration raises the errors of
        :func:`anyaccel.leases`, such as LedgerError if the ledger cannot be read, and may go on after that.

    Raises:
        UsageError: If ``every`` is no duration.

    Examples:
        >>> watch = anyaccel.watch_leases(anyaccel.detect("sim:H100:2"))
        >>> next(watch)
        ()
        >>> with anyaccel.acquire("GPU:1", machine="sim:H100:2"):
        ...     len(next(watch))
        1
    """
    return LeaseWatch(inventory, environ, read_seconds("every", every, positive=True))
