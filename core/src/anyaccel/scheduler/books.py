"""The books of one machine: what is held there, and by whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import NamedTuple

from anyaccel.model import Allocation, Device, Extent, Grant, Health, Inventory, Request, Term, replace, slot_numbers
from anyaccel.model.extent import union
from anyaccel.scheduler.choice import extent_within, grants, share
from anyaccel.scheduler.placement import Layout, Occupancy, Spot, Validate, Wanted, place, want

Placed = tuple[tuple[Spot, ...], ...]
"""The devices that a request gets of one machine, term by term."""

_REQUESTS = 4_096


class Resolved(NamedTuple):
    """A request in the terms of one machine.

    Attributes:
        wanted: Its terms.
        mask: All devices that could serve it, and their parts, as a bit mask by their positions.
        ever_fits: Whether it would be served if nothing were held.
    """

    wanted: tuple[Wanted, ...]
    mask: int
    ever_fits: bool


class Books:
    """What is held on one machine. Nobody waits here; an allocator has the books of each of its machines.

    :meth:`free` and :meth:`holders` may be called by any thread. The other methods want the lock to be held, but for
    :meth:`resolve`.

    Args:
        inventory: The machine.
        validate: The vendors' rules.
        known: Names that are known though nothing on this machine goes by them.
        machine: Name of the machine, which its allocations say.
        lock: The lock of the allocator.

    Attributes:
        inventory: The machine, as it was last told.
        machine: Its name.
        there: Whether the machine is there: one that is gone has books as long as something is held.
        held: The allocations by id, first come first.
        layout: What is fixed about the machine, and about devices that are gone and held.
        occupancy: What is free.
        validate: The vendors' rules.
    """

    def __init__(
        self, inventory: Inventory, validate: Validate | None, known: Iterable[str], *, machine: str, lock: Lock
    ) -> None:
        self.inventory = inventory
        self.machine = machine
        self.there = True
        self.held: dict[str, Allocation] = {}
        self.layout = Layout(inventory, known)
        self.validate = validate
        self._lock = lock
        self._resolved = lru_cache(_REQUESTS)(partial(self._resolve, self.layout))
        self.occupancy = Occupancy(self.layout)
        self._short = False
        self._spots: dict[str, tuple[Spot, ...]] = {}
        self._notes: dict[str, str] = {}

    def free(self, device_id: str) -> int:
        """Free units of a device in 1/10000; 0 for one that is hidden or unhealthy.

        Raises:
            KeyError: When no device has this id.
        """
        with self._lock:
            return self.occupancy.units[self.layout.positions[device_id]]

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """The allocations that hold a device, first to come first.

        Raises:
            KeyError: When no device has this id.
        """
        with self._lock:
            return tuple(self._holders(self.layout.positions[device_id]))

    def _holders(self, position: int) -> Iterator[Allocation]:
        for key, spots in self._spots.items():
            if any(spot.position == position for spot in spots):
                yield self.held[key]

    def resolve(self, request: Request) -> Resolved:
        """What a request means here, and whether it can ever be served. Depends on nothing that is held.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        return self._resolved(request)

    def _resolve(self, layout: Layout, request: Request) -> Resolved:
        wanted = tuple(want(layout, term) for term in request.terms)
        mask = layout.with_parts(union(each.mask for each in wanted))
        ever = place(layout, Occupancy(layout), wanted, self.validate) is not None
        return Resolved(wanted, mask, ever)

    def update(self, inventory: Inventory | None) -> None:
        """Go on with the machine as it is now; None when it is gone. What is held counts until it is released.

        Raises:
            ValueError: When two devices have one id; then nothing has changed.
        """
        now = inventory or Inventory(machine=self.inventory.machine, devices=())
        there = {device.id for device in now.devices}
        lost = {
            each.device.id: _lost(each.device)
            for allocation in self.held.values()
            for each in allocation.shares
            if each.device.id not in there
        }
        layout = Layout(replace(now, devices=(*now.devices, *lost.values())))
        layout.names.keep(self.layout.names)
        self.inventory, self.there = now, inventory is not None
        self.layout, self._resolved = layout, lru_cache(_REQUESTS)(partial(self._resolve, layout))
        self.recount()

    def recount(self) -> None:
        """Count all that is held on the machine as it is now, first come first."""
        self.occupancy, self._short = Occupancy(self.layout), False
        for key, allocation in self.held.items():
            spots = []
            for each in allocation.shares:
                position = self.layout.positions[each.device.id]
                device = self.layout.devices[position]
                spot = self.occupancy.spot_within(position, extent_within(each, device))
                self.occupancy.take((spot,))
                self._short |= device.usable and spot.units < each.units
                spots.append(spot)
            self._spots[key] = tuple(spots)

    def find(self, wanted: Sequence[Wanted]) -> Placed | None:
        """Devices for all terms of a request, of what is free; nothing is taken."""
        return place(self.layout, self.occupancy, wanted, self.validate)

    def hold(self, key: str, request: Request, wanted: Sequence[Wanted], placed: Placed, note: str) -> Allocation:
        """Give to a request what was found for it."""
        made = grants(self.layout, wanted, placed)
        return self.enter(Allocation(id=key, request=request, grants=made, machine=self.machine), note)

    def occupy(self, held: Mapping[str, Extent], holder: str, note: str) -> Allocation:
        """Count parts of devices, by id, as held by somebody who did not ask; no more than is free is counted.

        Raises:
            KeyError: When no device has one of the ids.
        """
        made = tuple(self._occupied(device_id, extent) for device_id, extent in held.items())
        request = Request(terms=tuple(grant.term for grant in made))
        return self.enter(Allocation(id=holder, request=request, grants=made, machine=self.machine), note)

    def _occupied(self, device_id: str, extent: Extent) -> Grant:
        position = self.layout.positions[device_id]
        device = self.layout.devices[position]
        spot = self.occupancy.spot_within(position, extent)
        part = share(device, spot.units, slot_numbers(spot.slots))
        return Grant(term=Term(names=(device.type,), units=extent.units), shares=(part,))

    def enter(self, allocation: Allocation, note: str) -> Allocation:
        """Write an allocation into the books."""
        spots = tuple(self.occupancy.spot_of(each) for each in allocation.shares)
        self.occupancy.take(spots)
        self._spots[allocation.id] = spots
        self.held[allocation.id] = allocation
        if note:
            self._notes[allocation.id] = note
        return allocation

    def release(self, key: str) -> None:
        """Take back what an allocation holds."""
        del self.held[key]
        self._notes.pop(key, None)
        self.occupancy.give(self._spots.pop(key))
        if self._short:  # others hold more than a device that shrank still has: it is theirs before it is free
            self.recount()

    def describe_holders(self, position: int) -> dict[str, str]:
        """Who holds a device, a part of it, or one that it is a part of: ids, with what to call them."""
        parts = self.layout.parts.get(position, 0)
        found: dict[str, str] = {}
        for other in (position, *self.layout.kin.get(position, ())):
            device = self.layout.devices[other].id
            by = "" if other == position else f", its part {device}" if parts >> other & 1 else f", all of {device}"
            for holder in self._holders(other):
                found.setdefault(holder.id, f"{holder.id} ({self._notes.get(holder.id) or holder.request}{by})")
        return found


def _lost(device: Device) -> Device:
    """A device that is no longer there, though somebody holds it: given to nobody, near nothing."""
    return replace(
        device,
        links={},
        numa_node=None,
        pci_bus_id=None,
        health=Health.UNHEALTHY,
        health_reason="lost, though it is still held",
        health_remedy="",
    )
