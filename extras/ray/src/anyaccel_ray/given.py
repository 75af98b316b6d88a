"""The devices that Ray has given to a call, and leases of them for others on the node to see."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from anyaccel.errors import LedgerError, WorkerStartError
from anyaccel.launcher import KnownNames, validate
from anyaccel.model import (
    ANY_SLOTS,
    NOTHING,
    UNITS_PER_DEVICE,
    Device,
    Extent,
    Grant,
    Inventory,
    Request,
    Share,
    Term,
    replace,
    slot_mask,
    slot_numbers,
)
from anyaccel.policy import Need
from anyaccel.pool import Broker
from anyaccel.scheduler import Choice, choose_slots, extent_of, serves, share
from anyaccel_export.ray import PREDEFINED, UNIT_VARIABLE, by_resource, own_unit_instances

from anyaccel_ray.connection import import_ray
from anyaccel_ray.snapshot import started_with

Slots = Mapping[str, Sequence[tuple[int, float]]]
"""By resource, the slots that a call holds and how much of each: Ray's own form."""


class Given(Request):
    """A request with the devices that Ray has given for it.

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
    """The devices that Ray has chosen, or others where a vendor's rule needs that.

    It knows no rule and gives chips 1 and 3 where only 0 and 1, or 2 and 3, can work together. Then we choose in its
    place, among the devices that nobody on the node holds; Ray has seen to it that there are enough.

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


def located(grants: Sequence[Grant], taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
    """Say where shares are that somebody else chose devices for.

    Args:
        grants: The shares; their slots are not looked at.
        taken: What others hold, by device id.

    Returns:
        The same with slots of the devices that have some; None when a device has not so much left.
    """
    held = dict(taken)
    found = []
    for grant in grants:
        shares = []
        for given in grant.shares:
            extent = held.get(given.device.id, NOTHING)
            placed = _located(given.device, given.units, extent)
            if placed is None:
                return None
            shares.append(placed)
            held[given.device.id] = extent.joined(extent_of(placed))
        found.append(replace(grant, shares=tuple(shares)))
    return tuple(found)


def _located(device: Device, units: int, taken: Extent) -> Share | None:
    units = device.rounded(units)
    if device.slots == 1 or units == UNITS_PER_DEVICE:
        room = taken.units + units <= device.units and taken.slots in (0, ANY_SLOTS)
        return share(device, units) if room else None
    free = slot_mask(device.own_slots or range(device.slots)) & ~taken.slots
    count = units * device.slots // UNITS_PER_DEVICE
    if free.bit_count() < count:
        return None
    return share(device, units, slot_numbers(choose_slots(free, count, device.slots)))


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
    """Make what leases devices that Ray has chosen already.

    Ray may give a device anew while the process that had it before is on its way out, or is kept for later
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
    """Check that what Ray has given says it all, for holders that no ledger keeps apart.

    Raises:
        LedgerError: When it is a share of a device that is some of the slots of that.
    """
    parts = [device.id for device in _devices(request.grants) if device.slots > 1]
    if parts and any(term.fraction for term in request.terms):
        reason = f"a share of {parts[0]} is some of its slots, and the cluster does not say which"
        raise LedgerError(reason, hint="let leases say it (shared=True), or ask for whole devices")


def held_slots() -> Slots:
    """What Ray has given to the call or actor of this process."""
    ids: Slots = _core_worker().resource_ids()
    return {_plain(name): slots for name, slots in ids.items() if not re.search(r"_group_\d+_[0-9a-f]+$", name)}


@cache
def _core_worker() -> Any:
    return import_ray()._private.worker.global_worker.core_worker  # noqa: SLF001 - the public call leaves resources out


def given(request: Request, resources: Sequence[str], slots: Slots, inventory: Inventory) -> Given:
    """Say which devices the slots of a call are.

    Args:
        request: What was asked for.
        resources: For each term, the resource that it was asked of Ray as.
        slots: What Ray gave.
        inventory: What is on this node.

    Raises:
        WorkerStartError: When Ray does not count the devices one by one, or counts more than there are.
    """
    devices = by_resource(inventory.usable)
    left = {name: sorted(slots.get(name, ())) for name in set(resources)}
    grants = []
    for term, resource in zip(request.terms, resources, strict=True):
        _check_counted(resource)
        own, left[resource] = left[resource][: term.count], left[resource][term.count :]
        units = [round(part * UNITS_PER_DEVICE) for _, part in own]
        if len(own) != term.count or sum(units) != term.units:
            raise WorkerStartError(f"Ray gave {own} of {resource} for {term}, which are not devices one by one")
        found = [_device(devices, resource, slot) for slot, _ in own]
        wrong = [device.id for device in found if not serves(device, term, inventory)]
        if wrong:
            raise WorkerStartError(f"Ray gave {', '.join(wrong)} for {term}, which is none; start all nodes alike")
        shares = (share(device, part) for device, part in zip(found, units, strict=True))
        grants.append(Grant(term=term, shares=tuple(shares)))
    units_of = tuple((share.device.id, share.units) for grant in grants for share in grant.shares)
    return Given(terms=request.terms, else_cpu=request.else_cpu, grants=tuple(grants), units=units_of)


def _device(devices: Mapping[str, list[Device]], resource: str, slot: int) -> Device:
    found = devices.get(resource, [])
    if slot >= len(found):
        raise WorkerStartError(
            f"Ray gave {resource} number {slot} and this node has {len(found)}; start it with 'anyaccel ray start'"
        )
    return found[slot]


def _check_counted(resource: str) -> None:
    listed = started_with().get(UNIT_VARIABLE)
    names = own_unit_instances() if listed is None else tuple(listed.split(","))
    if resource != PREDEFINED and resource not in names:
        raise WorkerStartError(
            f"Ray counts {resource} as one pool on this node and cannot say which devices it gave;"
            " start the node with 'anyaccel ray start'"
        )


def _plain(name: str) -> str:
    """A resource of a placement group by the name that it has outside."""
    return re.sub(r"_group_[0-9a-f]+$", "", name)
