"""Questions about the leases of a machine: what is held, and whether a request that came now would be served."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from anyaccel.errors import AnyaccelError, LimitError, NeverFitsError
from anyaccel.inventory.detect import survey
from anyaccel.launcher.choosing import choice_of, local_scheduler
from anyaccel.launcher.environment import worker_environment
from anyaccel.launcher.scope import Scope
from anyaccel.launcher.waits import holder
from anyaccel.ledger import LeaseRecord, Ledger, Want
from anyaccel.ledger.turns import current_policy
from anyaccel.model import ANY_SLOTS, Extent, Inventory, Request, Value, replace, slot_mask
from anyaccel.model.verdict import ReasonCode
from anyaccel.scheduler import Reason, Verdict, parse_request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel.policy import OverLimit


def why(
    request: str | Sequence[str] | Request,
    *,
    time: float | None = None,
    priority: int = 0,
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    **where: Any,
) -> Verdict:
    """Say whether :func:`acquire` would get devices now: by what others hold, who waits, and this user's limits.

    Args:
        request: The request.
        time: Seconds for which it would hold them at most; None when it would not say.
        priority: The higher, the earlier.
        inventory: The machine's inventory; detected when None.
        environ: Our environment; that of this process when None.
        where: ``machine``, ``declare`` and ``timeout`` as :func:`anyaccel.detect` takes them.

    Returns:
        Whether it would, else why not and what would.

    Raises:
        RequestError, UnknownNameError: When the request is wrong.
        ConfigurationError: When the machine's configuration cannot be trusted or understood.
        StateDirectoryError: When the ledger cannot be read.

    Examples:
        >>> verdict = anyaccel.why("GPU:3", machine="sim:H100:2")
        >>> verdict.fits_now, verdict.ever_fits, str(verdict.nearest)
        (False, False, 'GPU:2')
        >>> print(verdict.message)
        GPU:3 can never fit: this machine has 2 GPU (2 H100).
    """
    environ = os.environ if environ is None else environ
    inventory = survey(inventory, environ=environ, **where)
    request, ledger = parse_request(request), Ledger.open(environ)
    verdict = verdict_of(inventory, request, ledger, environ, time=time, priority=priority)
    return replace(verdict, gaps=_gaps(request, inventory, environ)) if verdict.ever_fits else verdict


def estimate_start(
    request: Request,
    *,
    time: float | None = None,
    inventory: Inventory,
) -> float | None:
    """Say when a request that came now would start if everything lasts as long as it may.

    Args:
        request: The request; it fits the machine.
        time: Seconds for which it would hold the devices at most; None when it would not say.
        inventory: The machine's inventory.

    Returns:
        Seconds since 1970; None when that is not known, since something says no end.

    Raises:
        StateDirectoryError: When the ledger cannot be read.
    """
    return Ledger.open().forecast_start(_wanted(inventory, request, os.environ, time))


def leases(inventory: Inventory, environ: Mapping[str, str] | None = None) -> tuple[LeaseRecord, ...]:
    """The leases of a machine's devices: one record for each device of each lease.

    Raises:
        StateDirectoryError: When the ledger cannot be read.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> with anyaccel.acquire("GPU:0.5", inventory=inventory, note="evaluation"):
        ...     [(record.units, record.note) for record in anyaccel.leases(inventory)]
        [(5000, 'evaluation')]
    """
    environ = os.environ if environ is None else environ
    return Scope.make(inventory, environ).ours(Ledger.open(environ).leases())


def over_limits(request: Request, *, time: float | None, priority: int, inventory: Inventory) -> tuple[OverLimit, ...]:
    """Return the limits of this user that are in the way of a request, whatever is held now.

    Args:
        request: The request; it fits the machine.
        time: Seconds for which it would hold them at most; None when it would not say.
        priority: The higher, the earlier.
        inventory: The machine's inventory.

    Raises:
        ConfigurationError: When the machine's configuration cannot be trusted or understood.
        StateDirectoryError: When the ledger cannot be read.
    """
    if current_policy().plain:
        return ()
    return Ledger.open().over_limits(_wanted(inventory, request, os.environ, time), priority)


def within_limits(verdict: Verdict, limits: Sequence[OverLimit]) -> Verdict:
    """A verdict with what the limits of this user, as far as they are in the way, make of it."""
    if not limits or not verdict.ever_fits:
        return verdict
    lasting = [each for each in limits if each.lasting]
    told = lasting or limits
    reasons = tuple(Reason(code=ReasonCode.LIMIT, message=each.message()) for each in told)
    ways_out = tuple(each.remedy for each in told)
    return replace(
        verdict,
        fits_now=False,
        ever_fits=not lasting,
        reasons=reasons if lasting else (*reasons, *verdict.reasons),
        ways_out=ways_out if lasting else (*ways_out, *verdict.ways_out),
        nearest=None,
        nearest_now=None,
    )


def beyond_limits(request: Request, error: LimitError) -> NeverFitsError:
    """Make the error of a request that the ledger refused, since its user may never have so much."""
    reasons = tuple(Reason(code=ReasonCode.LIMIT, message=each) for each in error.reasons)
    ways_out = tuple(error.hint.splitlines())
    verdict = Verdict(request=request, fits_now=False, ever_fits=False, reasons=reasons, ways_out=ways_out)
    return NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)


def verdict_of(
    inventory: Inventory,
    request: Request,
    ledger: Ledger,
    environ: Mapping[str, str],
    *,
    time: float | None,
    priority: int,
) -> Verdict:
    """Say whether a request that came now would be served."""
    verdict = judge_beside(ActiveLeases.read(inventory, ledger, environ, time=time), inventory, request)
    if not verdict.ever_fits:
        return verdict
    want = _wanted(inventory, request, environ, time)
    verdict = within_limits(verdict, ledger.over_limits(want, priority))
    if not verdict.fits_now or not (ahead := ledger.count_ahead(want, priority)):
        return verdict
    message = f"{ahead} earlier request{'s wait' if ahead > 1 else ' waits'} for the same devices"
    reasons = (Reason(code=ReasonCode.WAITING_BEHIND, message=message),)
    return replace(verdict, fits_now=False, reasons=reasons, ways_out=("'anyaccel queue' shows who waits",))


def judge_beside(held: ActiveLeases, inventory: Inventory, request: Request) -> Verdict:
    """Say whether a request fits a machine beside what is held of it, without a look at who asks and waits."""
    scheduler = local_scheduler(inventory)
    for lease, devices in held.devices.items():
        scheduler.occupy(devices, holder=lease, note=held.holders[lease])
    return held.with_ways_out(scheduler.why(request))


class ActiveLeases(Value):
    """What every process on a machine holds of its devices.

    Attributes:
        records: The leases; one record for each device of each.
        devices: How much of each device each lease holds, by the id of the lease, then of the device.
        holders: Who that is, for people, likewise.
    """

    records: tuple[LeaseRecord, ...]
    devices: Mapping[str, Mapping[str, Extent]]
    holders: Mapping[str, str]

    @classmethod
    def read(
        cls, inventory: Inventory, ledger: Ledger, environ: Mapping[str, str], *, time: float | None = None
    ) -> ActiveLeases:
        """Look at the leases of a machine's devices.

        Raises:
            StateDirectoryError: When the ledger cannot be read.
        """
        by_lease: dict[str, list[LeaseRecord]] = {}
        records = Scope.make(inventory, environ).ours(ledger.find_obstacles(time))
        for record in records:
            kind = {"drained": "drain", "reserved": "reservation"}.get(record.state, "unknown")
            by_lease.setdefault(record.id or f"{kind}-{len(by_lease)}", []).append(record)
        listed = {device.id for device in inventory.devices}
        devices = {
            lease: {
                record.device: Extent(record.units, slot_mask(record.slots) if record.slots else ANY_SLOTS)
                for record in own
                if record.through not in listed
            }
            for lease, own in by_lease.items()
        }
        return cls(records=records, devices=devices, holders={lease: holder(own[0]) for lease, own in by_lease.items()})

    def with_ways_out(self, verdict: Verdict) -> Verdict:
        """A verdict with what can be done about the leases that are in the way."""
        if verdict.fits_now:
            return verdict
        blocking = {device for reason in verdict.reasons for device in reason.devices}
        ways = (record.hint for record in self.records if record.device in blocking)
        return replace(verdict, ways_out=tuple(dict.fromkeys(filter(None, (*verdict.ways_out, *ways)))))


def _wanted(inventory: Inventory, request: Request, environ: Mapping[str, str], time: float | None) -> Want:
    """Build what a request that came now would ask the ledger for."""
    want = Scope.make(inventory, environ).want_of(choice_of(inventory, request), inventory)
    return replace(want, seconds=time)


def _gaps(request: Request, inventory: Inventory, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What a worker would not be kept from that is given what a request wants; empty where no worker can be started."""
    with contextlib.suppress(AnyaccelError):
        allocation = local_scheduler(inventory).allocate(request)
        return worker_environment(allocation, inventory, environ=environ).allocation.gaps
    return ()
