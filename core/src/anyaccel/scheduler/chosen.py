"""Devices that a program chooses itself: facts to choose by, the best-connected devices, a request for chosen ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from anyaccel.errors import UsageError
from anyaccel.model import UNITS_PER_DEVICE, Device, Inventory, Request, Term, bits, slot_mask
from anyaccel.scheduler.filters import BY_ID, FILTERS
from anyaccel.scheduler.topology import Topology


def facts(device: Device, inventory: Inventory, *, typed: bool = True) -> Mapping[str, str]:
    """Return the facts about a device, by name of the portable filters, for programs that choose devices instead of us.

    Unknown facts are left out.

    Args:
        device: The device.
        inventory: The machine of the device.
        typed: Whether to include facts that follow from the type.
    """
    found = {
        name: each.fact(device, inventory)
        for name, each in FILTERS.items()
        if each.portable and (typed or not each.typed)
    }
    return {name: fact for name, fact in found.items() if fact}


def shared_facts(devices: Sequence[Device], inventory: Inventory) -> Mapping[str, str]:
    """Return the facts that the devices have in common; see :func:`facts`. There must be at least one device."""
    first, *others = (facts(device, inventory).items() for device in devices)
    return dict(set(first).intersection(*others))


def choose_devices(devices: Sequence[Device], count: int, including: Collection[str] = ()) -> tuple[Device, ...]:
    """Choose the best-connected devices among given ones: by links, then NUMA nodes, then PCI neighbors.

    Args:
        devices: The devices to choose from.
        count: Number of devices.
        including: Ids of devices that must be among the chosen ones.

    Returns:
        The chosen devices, in the order of ``devices``.

    Raises:
        UsageError: If there are not so many devices, more must be included than chosen, or an id is unknown.

    Examples:
        >>> devices = anyaccel.detect("sim:H100:8").devices
        >>> chosen = anyaccel.choose_devices(devices, 2, including=[devices[3].id])
        >>> len(chosen), devices[3] in chosen
        (2, True)
    """
    positions = {device.id: position for position, device in enumerate(devices)}
    missing = [each for each in including if each not in positions]
    if missing:
        raise UsageError(f"including must name devices to choose from (got {missing[0]!r})")
    given: object = count  # callers without a type checker may pass any value
    if not isinstance(given, int) or not len(set(including)) <= given <= len(positions):
        raise UsageError(f"count must be a whole number from {len(set(including))} to {len(positions)} (got {given!r})")
    topology, free = Topology(devices), (1 << len(devices)) - 1
    if not including:
        return tuple(devices[position] for position in bits(topology.best_set(free, count) if count else 0))
    chosen = topology.grow(slot_mask(positions[each] for each in including), free, count)
    return tuple(devices[position] for position in bits(chosen))


def request_devices(devices: Iterable[Device], shares: Mapping[str, float | int] | None = None) -> Request:
    """Return a request for exactly the given devices, or shares of them, as one lease.

    Args:
        devices: The devices.
        shares: Shares by device id: less than 1 for a fraction of the device, else memory in bytes. The other devices
            are wanted whole.

    Raises:
        UsageError: If there is no device, or if a share is of another device, not positive or not finite.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2,TPU-V4:4")
        >>> request = anyaccel.request_devices(inventory.devices[1:3], {inventory.devices[1].id: 0.25})
        >>> len(request.terms)
        2
    """
    chosen, shares = tuple(devices), shares or {}
    if not chosen:
        raise UsageError("devices must name at least one device (got none)")
    other = shares.keys() - {device.id for device in chosen}
    if other:  # whole devices in place of a share would be a surprise
        raise UsageError(f"shares must be of the given devices (got one of {min(other)!r})")
    return Request(terms=tuple(_make_term(device, shares.get(device.id)) for device in chosen))


def _make_term(device: Device, share: float | None) -> Term:
    """Return the term of a request for a device, or for a share of it."""
    filters = ((BY_ID, device.id),)
    names = (device.resource,)
    if share is None:
        return Term(names=names, filters=filters)
    if not 0 < share < inf:
        raise UsageError(f"a share of {device.id} must be more than 0, and finite (got {share!r})")
    if share >= 1:
        return Term(names=names, units=0, filters=filters, memory_bytes=int(share))
    return Term(names=names, units=max(1, round(share * UNITS_PER_DEVICE)), filters=filters)
