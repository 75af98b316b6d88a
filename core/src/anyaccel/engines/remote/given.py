"""Devices that a cluster has chosen already, and leases of them for others on the node to see."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from anyaccel.errors import LedgerError
from anyaccel.launcher.launch import KnownNames, validate
from anyaccel.model import UNITS_PER_DEVICE, Device, Extent, Grant, Inventory, Request, Term
from anyaccel.policy import Need
from anyaccel.pool.broker import Broker
from anyaccel.scheduler import Choice
from anyaccel.scheduler.choice import located


class Given(Request):
    """A request with the devices that a cluster has given for it.

    Requests are equal when their devices are, so that a process is used again only for calls with the same ones.

    Attributes:
        grants: What was given; not compared, since ``units`` says the same.
        units: Ids of the devices, and how much of each is held.
    """

    grants: tuple[Grant, ...]
    units: tuple[tuple[str, int], ...] = ()

    # Not generated: that would compare the grants, which hold mappings.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and (self.terms, self.units) == (other.terms, other.units)

    def __hash__(self) -> int:
        return hash((self.terms, self.units))


class Preferred(Choice):
    """The devices that the cluster has chosen, or others where a vendor's rule needs that.

    It knows no rule and gives chips 1 and 3 where only 0 and 1, or 2 and 3, can work together. Then we choose in its
    place, among the devices that nobody on the node holds; the cluster has seen to it that there are enough.

    Args:
        inventory: What is on the node.
        request: The request, with its devices.
        ruled: Whether a vendor has rules for such devices.
    """

    def __init__(self, inventory: Inventory, request: Given, *, ruled: bool) -> None:
        self.request = plain(request)
        self._given = request.grants
        self._any: Choice | None = None
        self._accepted = not ruled or all(_accepted(grant) for grant in request.grants)
        if ruled:
            self._any = Choice(inventory, self.request, validate, KnownNames())

    @cached_property
    def candidates(self) -> tuple[Device, ...]:
        """The devices that will do."""
        return _devices(self._given) if self._any is None else self._any.candidates

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """How much is needed, of which devices by their ids."""
        if self._any is not None:
            return self._any.needs
        shares = (share for grant in self._given for share in grant.shares)
        return tuple(Need(count=1, units=share.units, among=frozenset({share.device.id})) for share in shares)

    def choose(self, taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
        """The devices, if nobody holds them."""
        if self._accepted and (free := located(self._given, taken)) is not None:
            return free
        return None if self._any is None else self._any.choose(taken)


def _devices(grants: tuple[Grant, ...]) -> tuple[Device, ...]:
    return tuple(share.device for grant in grants for share in grant.shares)


def plain(request: Request) -> Request:
    """A request without its devices."""
    return Request(terms=request.terms, else_cpu=request.else_cpu)


def _accepted(grant: Grant) -> bool:
    return validate(grant.term, [share.device for share in grant.shares]) is None


def has_rules(like: Device, inventory: Inventory) -> bool:
    """Whether the vendor refuses some number of such devices, so that not every set of them will do."""
    devices = [device for device in inventory.usable if device.type == like.type]
    terms = (Term(names=(like.resource,), units=UNITS_PER_DEVICE * count) for count in range(1, len(devices) + 1))
    return any(validate(term, devices[: term.count]) is not None for term in terms)


def given_broker(inventory: Inventory, *, shared: bool, note: str) -> Broker:
    """Make what leases devices that a cluster has chosen already.

    The cluster may give a device anew while the process that had it before is on its way out, or is kept for later
    calls of another pool; somebody whom it does not know may hold it, too. The ledger makes the next one wait for that.

    Args:
        inventory: What is on the node.
        shared: Whether others on the node see it.
        note: What is said of every lease.
    """
    ruled: dict[str, bool] = {}

    def choice(request: Request) -> Choice:
        assert isinstance(request, Given)  # noqa: S101 - the host asks for nothing else
        for device in _devices(request.grants):
            if device.type not in ruled:
                ruled[device.type] = has_rules(device, inventory)
        return Preferred(inventory, request, ruled=any(ruled[device.type] for device in _devices(request.grants)))

    return Broker(inventory, shared=shared, choice=choice, note=f" ({note})")


def check_known(request: Given) -> None:
    """Check that what a cluster has given says it all, for holders that no ledger keeps apart.

    Raises:
        LedgerError: When it is a share of a device that is some of the slots of that.
    """
    parts = [device.id for device in _devices(request.grants) if device.slots > 1]
    if parts and any(term.fraction for term in request.terms):
        reason = f"a share of {parts[0]} is some of its slots, and the cluster does not say which"
        raise LedgerError(reason, hint="let leases say it (shared=True), or ask for whole devices")
