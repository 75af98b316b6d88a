"""The devices assigned to a call by Ray, and the broker of leases on the node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from anyaccel.errors import LedgerError, WorkerStartError
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
from anyaccel.vendors import KnownNames, validate
from anyaccel_export.ray import PREDEFINED, UNIT_VARIABLE, by_resource, own_unit_instances

from anyaccel_ray.connection import import_ray
from anyaccel_ray.snapshot import started_with

Slots = Mapping[str, Sequence[tuple[int, float]]]
"""Slots that a call holds by resource, each with its quantity: the form of Ray's ``resource_ids()``."""


class Given(Request):
    """A request with the devices assigned by Ray.

    Two of them are equal if their devices are, so that a process is reused only for calls with the same devices.

    Attributes:
        grants: The devices; not compared, because ``units`` has the same content.
        units: Ids of the devices, and the units of each.
    """

    grants: tuple[Grant, ...]
    units: tuple[tuple[str, int], ...] = ()

    # Not the comparison of Value: it would include the grants, whose mappings have no hash.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and (self.terms, self.units) == (other.terms, other.units)

    def __hash__(self) -> int:
        return hash((self.terms, self.units))


class Preferred(Choice):
    """The choice of the devices assigned by Ray, or of different devices if a vendor's rule forbids the assignment.

    Ray knows no rules: it may assign chips 1 and 3 where only 0 and 1, or 2 and 3, work together. Then the choice is
    among all free devices of the node; Ray's quantities guarantee that enough of them are free.

    Args:
        inventory: The inventory of the node.
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
    def ever_fits(self) -> bool:
        """Whether there are devices to choose if nothing is held."""
        return self.choose({}) is not None

    @cached_property
    def candidates(self) -> tuple[Device, ...]:
        """Candidates of the choice."""
        return _devices(self._given) if self._any is None else self._any.candidates

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """Needed quantities, each with the ids of its devices."""
        if self._any is not None:
            return self._any.needs
        shares = (share for grant in self._given for share in grant.shares)
        return tuple(Need(count=1, units=share.units, among=frozenset({share.device.id})) for share in shares)

    def choose(self, taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
        """Choose the devices, given the taken extents; None if the devices are in use."""
        if self._accepted and (free := located(self._given, taken)) is not None:
            return free
        return None if self._any is None else self._any.choose(taken)


def located(grants: Sequence[Grant], taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
    """Choose slots for shares whose devices Ray has chosen.

    Args:
        grants: The shares; their slots are ignored.
        taken: What is held, by device id.

    Returns:
        The shares with slots on devices that have slots; None if too little of a device is free.
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
    # Ray computes in floats, and may give a little more or less than the grain of the device.
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
    """Return a request without the devices."""
    return Request(terms=request.terms, else_cpu=request.else_cpu)


def _accepted(grant: Grant) -> bool:
    return validate(grant.term, [share.device for share in grant.shares]) is None


def has_rules(like: Device, inventory: Inventory) -> bool:
    """Return whether the vendor refuses some set of such devices."""
    devices = [device for device in inventory.usable if device.type == like.type]
    # The smallest set that is refused may be of any size, so each size is asked for once.
    terms = (Term(names=(like.resource,), units=UNITS_PER_DEVICE * count) for count in range(1, len(devices) + 1))
    return any(validate(term, devices[: term.count]) is not None for term in terms)


def given_broker(inventory: Inventory, *, shared: bool, note: str) -> Broker:
    """Make the broker of a node, which leases the devices that Ray has assigned.

    Ray may assign a device while its previous process still exits, while an idle worker of another pool holds it, or
    while a process unknown to Ray holds it. The ledger makes the call wait for all of these.

    Args:
        inventory: The inventory of the node.
        shared: Whether every process on the node sees the leases.
        note: Text for the note of each lease.
    """
    ruled: dict[str, bool] = {}

    def choice(request: Request) -> Choice:
        assert isinstance(request, Given)  # noqa: S101 - options() of the node makes no other requests
        for device in _devices(request.grants):
            if device.type not in ruled:
                ruled[device.type] = has_rules(device, inventory)
        return Preferred(inventory, request, ruled=any(ruled[device.type] for device in _devices(request.grants)))

    return Broker(inventory, shared=shared, choice=choice, note=f" ({note})")


def check_known(request: Given) -> None:
    """Check that Ray's assignment determines the slots of each share, for pools without shared leases.

    Raises:
        LedgerError: When a share has some of the slots of a device, which only a shared ledger can choose.
    """
    parts = [device.id for device in _devices(request.grants) if device.slots > 1]
    if parts and any(term.fraction for term in request.terms):
        reason = f"a share of {parts[0]} is some of its slots, and the cluster does not say which"
        raise LedgerError(reason, hint="let leases say it (shared=True), or ask for whole devices")


def held_slots() -> Slots:
    """Return the slots that Ray has assigned to the call or actor of this process."""
    ids: Slots = _core_worker().resource_ids()
    # Ray lists a resource that a placement group reserves again, under the name of the group.
    return {_plain(name): slots for name, slots in ids.items() if not re.search(r"_group_\d+_[0-9a-f]+$", name)}


@cache
def _core_worker() -> Any:
    return import_ray()._private.worker.global_worker.core_worker  # noqa: SLF001 - the public call omits some resources


def identify_devices(request: Request, resources: Sequence[str], slots: Slots, inventory: Inventory) -> Given:
    """Return the request with the devices of the slots that Ray has assigned.

    Args:
        request: The request.
        resources: For each term, its resource on Ray.
        slots: The slots.
        inventory: The inventory of this node.

    Raises:
        WorkerStartError: When Ray does not count the devices one by one, or counts more than there are.
    """
    devices = by_resource(inventory.usable)
    left = {name: sorted(slots.get(name, ())) for name in set(resources)}
    grants = []
    for term, resource in zip(request.terms, resources, strict=True):
        _check_counted(resource)
        # Ray has one quantity for all terms of a resource: the terms take its slots in their order.
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
    """Return the name of a resource without the suffix of a placement group."""
    return re.sub(r"_group_[0-9a-f]+$", "", name)
