"""Books of machines: active allocations and free devices, and plans: requests resolved against the books once."""

from __future__ import annotations

from _weakrefset import WeakSet
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain

from anyaccel._typing import NamedTuple
from anyaccel.model import (
    DIVIDED,
    Allocation,
    Extent,
    Grant,
    Health,
    Inventory,
    Request,
    Term,
    bits,
    replace,
    slot_numbers,
)
from anyaccel.policy import Holding
from anyaccel.scheduler.placement import (
    Layout,
    NameRegistry,
    Occupancy,
    Placed,
    Resolved,
    Spot,
    Validate,
    extent_of,
    grants,
    place,
    share,
)
from anyaccel.text import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from threading import Lock
    from typing import Any

    from anyaccel.model import Share

NO_TERMS = Holding(device=None)
"""Terms of a foreign holder, and of every holder without a policy."""
_REQUESTS = 4_096  # resolved requests per machine: a queue of that many different ones is resolved once


class HeldAllocation(NamedTuple):
    """An allocation in the books.

    Attributes:
        allocation: The allocation.
        spots: The counted part of each of its devices.
        note: Description of its holder; may be empty.
        terms: User and times for the queue policy, without a device.
    """

    allocation: Allocation
    spots: tuple[Spot, ...]
    note: str
    terms: Holding


class Books:
    """Allocations on one machine. Requests wait in the allocator, which has books for each machine.

    :meth:`free` and :meth:`holders` are thread-safe. The other methods need the lock.

    Args:
        inventory: The machine.
        validate: The vendors' rules.
        names: The known names, which all machines share.
        machine: Name of the machine, for its allocations.
        lock: The lock of the allocator.

    Attributes:
        inventory: The machine, as of the last update.
        machine: Name of the machine.
        there: Whether the machine exists: books of a removed machine stay as long as something is held.
        number: Number of the machine among the present ones.
        offset: Position of its first device among the devices of all machines.
        resolve: Resolves a request against the machine, whatever is held. Raises UnknownNameError when no device has
            one of its names.
        held: Allocations by id, in order of arrival.
        refused: The plans in use that the machine has refused since the last release here.
        layout: The fixed facts about the machine, and about held devices that are gone.
        occupancy: The free parts of devices.
        list_holders: Makes a clause about holders of their descriptions by id, for a reason; :func:`list_holders` if
            not replaced.
    """

    def __init__(
        self, inventory: Inventory, validate: Validate | None, names: NameRegistry, *, machine: str, lock: Lock
    ) -> None:
        self.inventory = inventory
        self.machine = machine
        self.there = True
        self.number = self.offset = 0
        self.held: dict[str, HeldAllocation] = {}
        self.refused: WeakSet[RequestPlan] = WeakSet()
        self.layout = Layout(inventory, names, validate)
        self.list_holders: Callable[[Mapping[str, str]], str] = list_holders
        self._lock = lock
        self.resolve = lru_cache(_REQUESTS)(lambda request: Resolved(self.layout, request))
        self.occupancy = Occupancy(self.layout)
        self._short = False  # whether a device has less than its allocations hold

    def free(self, device_id: str) -> int:
        """Return the free units of a device in 1/10000; 0 for a hidden or unhealthy device.

        Raises:
            KeyError: When no device has this id.
        """
        with self._lock:
            return self.occupancy.units[self.layout.positions[device_id]]

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """Return the allocations of a device, in order of arrival.

        Raises:
            KeyError: When no device has this id.
        """
        with self._lock:
            return tuple(entry.allocation for entry in self._holders(self.layout.positions[device_id]))

    def _holders(self, position: int, *, divided: bool = True) -> Iterator[HeldAllocation]:
        """Yield the allocations of the device at a position, in order of arrival.

        Args:
            position: The device.
            divided: Whether to include allocations of parts of the device that are not listed.
        """
        for entry in self.held.values():
            if any(spot.position == position and (divided or not spot.divided) for spot in entry.spots):
                yield entry

    def update(self, inventory: Inventory | None) -> None:
        """Adopt the present state of the machine; None for a removed machine. Allocations stay until their release.

        Raises:
            ValueError: When two devices have one id; then nothing has changed.
        """
        now = inventory or Inventory(machine=self.inventory.machine, devices=())
        there = {device.id for device in now.devices}
        fault = {"health": Health.UNHEALTHY, "health_reason": "lost, though it is still held", "health_remedy": ""}
        lost = {
            each.device.id: replace(each.device, **fault)
            for entry in self.held.values()
            for each in entry.allocation.shares
            if each.device.id not in there
        }
        known = replace(now, devices=(*now.devices, *lost.values()))
        layout = Layout(known, self.layout.names, self.layout.validate)
        self.inventory, self.there = now, inventory is not None
        self.layout = layout
        self.resolve.cache_clear()
        self.recount()

    def keep(self, ids: Collection[str]) -> None:
        """Drop all other allocations than these, and count these again: for books that were left half changed."""
        for key in self.held.keys() - ids:
            del self.held[key]
        self.refused.clear()
        self.resolve.cache_clear()
        self.recount()

    def recount(self) -> None:
        """Count the allocations on the present machine again, in order of arrival.

        A device that shrank below its allocations is noted, so that each release counts again.
        """
        self.occupancy, self._short = Occupancy(self.layout), False
        for key, entry in self.held.items():
            shares = zip(entry.allocation.shares, entry.spots, strict=True)
            spots = tuple([self._take(each, divided=former.divided) for each, former in shares])
            self.held[key] = entry._replace(spots=spots)

    def _take(self, share: Share, *, divided: bool = False) -> Spot:
        """Take a share that was given before, as far as the device has it free, and return the taken part.

        Args:
            share: The share, of a device that is listed.
            divided: Whether parts of the device are held that are not listed.
        """
        position = self.layout.positions[share.device.id]
        device = self.layout.devices[position]
        # The share may be anywhere on a device that has other slots by now.
        extent = extent_of(share) if device.slots == share.device.slots else Extent()
        spot = self.occupancy.spot_within(position, DIVIDED if divided else extent)
        self.occupancy.take((spot,))
        self._short |= device.usable and spot.units < share.units
        return spot

    def hold(self, key: str, found: Resolved, placed: Placed, note: str, terms: Holding) -> Allocation:
        """Book the placed devices for a request, under the identity ``key``, and return the allocation."""
        made = grants(self.layout, found.wanted, placed)
        allocation = Allocation(id=key, request=found.request, grants=made, machine=self.machine)
        spots = tuple(chain.from_iterable(placed))
        self.occupancy.take(spots)
        return self._enter(allocation, spots, note, terms)

    def restore(self, allocation: Allocation, note: str, terms: Holding) -> None:
        """Book an allocation that was made before, as far as its devices, which are all listed, have it free."""
        self._enter(allocation, tuple([self._take(each) for each in allocation.shares]), note, terms)

    def occupy(self, held: Mapping[str, Extent], holder: str, note: str) -> Allocation:
        """Count parts of devices, by id, as held by a foreign holder, as far as they are free; return the allocation.

        Raises:
            KeyError: When no device has one of the ids.
        """
        spots = tuple(
            self.occupancy.spot_within(self.layout.positions[device_id], extent) for device_id, extent in held.items()
        )
        made = []
        for spot, extent in zip(spots, held.values(), strict=True):
            device = self.layout.devices[spot.position]
            part = share(device, spot.units, slot_numbers(spot.slots))
            made.append(Grant(term=Term(names=(device.type,), units=extent.units), shares=(part,)))
        request = Request(terms=tuple(grant.term for grant in made))
        allocation = Allocation(id=holder, request=request, grants=tuple(made), machine=self.machine)
        self.occupancy.take(spots)
        return self._enter(allocation, spots, note, NO_TERMS)

    def _enter(self, allocation: Allocation, spots: tuple[Spot, ...], note: str, terms: Holding) -> Allocation:
        """Enter an allocation in the books, whose parts of devices are taken. Returns the allocation."""
        self.held[allocation.id] = HeldAllocation(allocation, spots, note, terms)
        return allocation

    def release(self, key: str) -> Holding:
        """Remove an allocation from the books, and free its parts of devices; refused plans may ask again.

        Returns:
            The terms of the allocation.

        Raises:
            KeyError: When nothing is held under this identity.
        """
        entry = self.held.pop(key)
        self.occupancy.give(entry.spots)
        if self._short:  # a device shrank below its allocations: the released part belongs to the other holders
            self.recount()
        for plan in self.refused:
            plan.open |= 1 << self.number
        self.refused.clear()
        return entry.terms

    def describe_holders(self, position: int) -> dict[str, str]:
        """Describe the allocations of a device, of its parts and of its whole, by id of the allocation.

        A description is the id and, in parentheses, the note or else the request, with the part or whole that is held.
        """
        parts = self.layout.parts.get(position, 0)
        found: dict[str, str] = {}
        for other in (position, *self.layout.kin.get(position, ())):
            device = self.layout.devices[other].id
            by = "" if other == position else f", its part {device}" if parts >> other & 1 else f", all of {device}"
            for entry in self._holders(other, divided=other == position):
                holder = entry.allocation
                found.setdefault(holder.id, f"{holder.id} ({entry.note or holder.request}{by})")
        return found


def list_holders(holders: Mapping[str, str]) -> str:
    """Return a clause about the holders of devices, given the description of each by id, as the scheduler knows it."""
    return f"held by {listed(list(holders.values()))}"


class RequestPlan:
    """A request resolved against every machine.

    Raises:
        UnknownNameError: When no device has one of its names.

    Attributes:
        books: The books of every machine, by number.
        request: The request.
        hosts: Number of machines to be served on.
        resolved: The request on each machine that can ever serve it, by number.
        open: The machines that have not refused the request since their last release, as a bit mask.
        mask: The devices that could serve the request, and their parts, by position among the devices of every machine:
            requests with overlapping masks are rivals.
        ever_fits: Whether the request is served if nothing is held.
    """

    def __init__(self, books: Sequence[Books], request: Request, hosts: int) -> None:
        self.books = books
        self.request = request
        self.hosts = hosts
        self.resolved: dict[int, Resolved] = {}
        masks = [0, 0]  # for machines that can never serve the request, and for machines that can
        for each in books:
            found = each.resolve(request)
            masks[found.ever_fits] |= each.layout.with_parts(found.mask) << each.offset
            if found.ever_fits:
                self.resolved[each.number] = found
        self.open = sum(1 << number for number in self.resolved)
        self.mask = masks[True] or masks[False]
        self.ever_fits = len(self.resolved) >= hosts

    @cached_property
    def quantities(self) -> Mapping[str, Any]:
        """The fields of :class:`~anyaccel.policy.Waiting` that follow from the plan."""
        sites = tuple(each.make_needs(self.books[number].offset.__add__) for number, each in self.resolved.items())
        return {
            "needs": sites[0] if sites else (),
            "sites": sites if len(sites) > 1 else (),
            "hosts": self.hosts,
            "wants": frozenset(bits(self.mask)),
        }

    def find(self) -> dict[int, Placed] | None:
        """Find free devices for the request, by machine number, without taking them; None if too few machines fit.

        A machine that refuses is asked again only after a release there. For a gang, the first machines that fit are
        chosen.
        """
        found: dict[int, Placed] = {}
        for number in bits(self.open):
            if self.open.bit_count() < self.hosts:  # too few machines are left for the gang
                break
            placed = place(self.books[number].occupancy, self.resolved[number].wanted)
            if placed is None:
                self.books[number].refused.add(self)
                self.open ^= 1 << number
                continue
            found[number] = placed
            if len(found) == self.hosts:
                return found
        return None
