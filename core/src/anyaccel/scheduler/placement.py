"""Placement: the devices of a request, as a pure function of a machine and its free devices.

A share goes to the fullest device that still has room, before a fresh one is broken; of a device with slots it gets as
many whole ones as it needs, where that leaves the others together. Whole devices go to the best-connected set. Several
terms are placed together or not at all: a term that took the only device that another one could use gives it back and
tries the next. Devices of two vendors that obey one variable are never given out together, where one of them borrows
it. The search is bounded by ``PLACEMENTS``, some tens of milliseconds at worst; past it the answer is no.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations

from anyaccel._typing import NamedTuple
from anyaccel.errors import UnknownNameError
from anyaccel.model import (
    AGREEMENT,
    ANY_SLOTS,
    UNITS_PER_DEVICE,
    Device,
    Extent,
    Grant,
    Inventory,
    Request,
    Share,
    Term,
    Value,
    VendorState,
    bits,
    parts_of,
    replace,
    slot_mask,
    slot_numbers,
    union,
)
from anyaccel.policy import Need
from anyaccel.scheduler.filters import asked, counted, rules
from anyaccel.scheduler.topology import Topology, first
from anyaccel.text import shown, suggest

PLACEMENTS = 2_000
"""Number of tentative placements after which a request counts as impossible to place."""

Validate = Callable[[Term, Sequence[Device]], str | None]
"""A vendor's rule: the reason why the hardware cannot serve a term with exactly these devices, or None."""


class NameRegistry:
    """Names that requests may use, in their original spelling. All machines of a scheduler share one registry.

    Args:
        further: Names that installed plug-ins know, beside those that :meth:`add` gets: a request for one of them is
            not a typing error. They may be costly to compute, and are read once, for the first name that is unknown.
    """

    def __init__(self, further: Iterable[str] = ()) -> None:
        self._spelled: dict[str, str] = {}
        self._further = further

    def add(self, names: Iterable[str]) -> None:
        """Add names, of devices or of none; empty names are left out. A name stays known when its device is lost."""
        for name in filter(None, names):
            self._spelled.setdefault(name.lower(), name)

    def find_unknown(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that no device and no installed plug-in has."""
        unknown = tuple(name for name in names if name.lower() not in self._spelled)
        if not unknown:
            return ()
        self.add(self._further)  # reading the plug-ins' catalogs takes longer than most placements
        self._further = ()
        return tuple(name for name in unknown if name.lower() not in self._spelled)

    def label(self, term: Term) -> str:
        """Return the names of a term, joined by ``|``: known names in their original spelling, others as they are."""
        return "|".join(self._spelled.get(name.lower(), name) for name in term.names)

    def __iter__(self) -> Iterator[str]:
        """Yield the known names."""
        self.add(self._further)
        self._further = ()
        return iter(tuple(self._spelled.values()))

    def make_error(
        self, name: str, there: Iterable[str], silent: Sequence[str] = (), *, where: str = "this machine"
    ) -> UnknownNameError:
        """Make the error for an unknown name, with similar names, or else the names on the machine, as the way out.

        Args:
            name: The name.
            there: Names on the machine.
            silent: Vendors whose plug-ins failed before they gave their names: these may be meant.
            where: The machine, or the cluster, in the message.
        """
        from anyaccel.extras import plugin_remedy  # only errors need it

        if silent:
            reason = f"no device goes by it, and the plug-in of {silent[0]} failed before it gave its names"
            return UnknownNameError(f"unknown name {name!r}: {reason}; see 'anyaccel plugins {silent[0]}'")
        here = [self._spelled[each] for each in sorted(there)]
        on_machine = f"on {where} there are {', '.join(here)}."
        otherwise = on_machine if here else f"{where} has no devices; is the vendor's plug-in installed?"
        if name.lower() == "cpu":
            way_out = "the CPU is what a request may fall back to, as in GPU:1,else=cpu"
        else:
            way_out = plugin_remedy(name) or suggest(name, self._spelled.values(), otherwise)
        return UnknownNameError(f"unknown name {name!r}: no device and no installed plug-in goes by it; {way_out}")


class Layout:
    """The fixed facts about a machine: devices by position, names and connections.

    Args:
        inventory: The machine.
        names: The known names, to which those of this machine are added.
        validate: The vendors' rules.

    Raises:
        ValueError: When two devices have one id.
    """

    def __init__(self, inventory: Inventory, names: NameRegistry, validate: Validate | None = None) -> None:
        self.inventory = inventory
        self.validate = validate
        self.devices = inventory.devices
        self.positions = {device.id: position for position, device in enumerate(self.devices)}
        if len(self.positions) < len(self.devices):
            name, count = Counter(device.id for device in self.devices).most_common(1)[0]
            raise ValueError(f"devices of a machine must have ids of their own (got {shown(name)} {count} times)")
        self.names = names
        self._named: dict[str, int] = {}
        for position, device in enumerate(self.devices):
            names.add(device.names)
            for name in map(str.lower, device.names):
                self._named[name] = self._named.get(name, 0) | 1 << position
        for report in inventory.vendors:
            names.add((report.resource, report.vendor))
        self.topology = Topology(self.devices)
        self.usable = slot_mask(at for at, device in enumerate(self.devices) if device.usable)
        self.ours = slot_mask(at for at, device in enumerate(self.devices) if device.units == UNITS_PER_DEVICE)
        self.units = [device.units if device.usable else 0 for device in self.devices]
        self.slots = {
            position: slot_mask(device.own_slots or range(device.slots))
            for position, device in enumerate(self.devices)
            if device.slots > 1
        }
        self.parts = {
            self.positions[whole]: slot_mask(self.positions[part] for part in parts)
            for whole, parts in parts_of(self.devices).items()
        }
        vendors = {device.vendor for device in self.devices}
        self.rivals = {
            (one, other): variable
            for one in (vendors if len(vendors) > 1 else ())
            for other, variable in inventory.excluded_vendors(one).items()
        }
        self.kin: dict[int, list[int]] = {}
        for whole, parts in self.parts.items():
            for part in bits(parts):
                self.kin.setdefault(whole, []).append(part)
                self.kin.setdefault(part, []).append(whole)

    def with_parts(self, mask: int) -> int:
        """Add the parts of devices to a mask. Two such masks overlap if their devices exclude each other."""
        for whole, parts in self.parts.items():
            if mask >> whole & 1:
                mask |= parts
        return mask

    def conflicts(self, spots: Iterable[Spot]) -> list[tuple[str, str, str]]:
        """Return each two vendors of parts of devices that no worker gets together, with the variable of both."""
        vendors = dict.fromkeys(self.devices[spot.position].vendor for spot in spots) if self.rivals else ()
        return [(*pair, self.rivals[pair]) for pair in combinations(vendors, 2) if pair in self.rivals]

    def apart(self, mask: int) -> tuple[int, ...]:
        """Split devices into sets without a whole beside its parts: without these parts, and without these wholes.

        Without such a whole, the mask itself is the only set. The sets overlap in unrelated devices.
        """
        wholes = slot_mask(whole for whole, parts in self.parts.items() if mask >> whole & 1 and mask & parts)
        if not wholes:
            return (mask,)
        return mask & ~union(self.parts[whole] for whole in bits(wholes)), mask & ~wholes

    def named(self, term: Term) -> int:
        """Return the devices with one of a term's names, in any state, as a bit mask.

        Raises:
            UnknownNameError: When no device and no installed plug-in has any of the names.
        """
        return union(self.named_each(term))

    def named_each(self, term: Term) -> tuple[int, ...]:
        """Return the devices with each of a term's names, as bit masks; 0 for a name without devices here.

        An unknown name beside a known one is no error: the request may be for several machines, with different
        plug-ins.

        Raises:
            UnknownNameError: As for :meth:`named`.
        """
        masks = tuple(self._named.get(name.lower(), 0) for name in term.names)
        if not any(masks) and len(self.names.find_unknown(term.names)) == len(term.names):
            failed = [each for each in self.inventory.vendors if each.state is VendorState.FAILED]
            silent = [report.vendor for report in failed if not report.resource]
            raise self.names.make_error(term.names[0], self._named, silent)
        return masks

    def serving(self, term: Term) -> int:
        """Return the devices, as a bit mask, that pass a term's names and rules if nothing is held.

        Raises:
            UnknownNameError: When no device and no installed plug-in has any of the names.
            ValueError: When a filter is unknown, or its value invalid.
        """
        conditions = tuple(rules(term, self.inventory))
        named = ((position, self.devices[position]) for position in bits(self.named(term)))
        return slot_mask(position for position, device in named if all(rule.passes(device) for rule in conditions))


class Spot(NamedTuple):
    """A part of a device.

    Attributes:
        position: The device.
        units: Units of the device, in 1/10000.
        slots: Slots of the device, as a bit mask: every slot for a whole device, 0 for a device without slots.
        divided: Whether this stands for a part that is not listed: it bars the device, and none of the listed parts.
    """

    position: int
    units: int
    slots: int = 0
    divided: bool = False


Placed = tuple[tuple[Spot, ...], ...]
"""Parts of devices of one machine for a request, term by term."""


class Occupancy:
    """The free parts of each device, in 1/10000, by position.

    Attributes:
        layout: The machine.
        units: Free units by position.
        whole: The devices without a taken part, as a bit mask.
        slots: Free slots as a bit mask, by position of devices with slots.
    """

    def __init__(self, layout: Layout) -> None:
        """Make the occupancy of an idle machine. Unusable devices have no free units."""
        self.layout = layout
        self.units, self.slots = layout.units.copy(), layout.slots.copy()
        self.whole = layout.ours & layout.usable
        # For devices that are parts, or have parts: the free units without regard to the related devices, and the
        # number of held related devices. As long as one of them is held, the device has no free units.
        self._own = {position: self.units[position] for position in layout.kin}
        self._barred = dict.fromkeys(layout.kin, 0)

    def copy(self) -> Occupancy:
        """Return an independent copy."""
        twin = object.__new__(Occupancy)
        twin.layout, twin.whole = self.layout, self.whole
        twin.units, twin.slots = self.units.copy(), self.slots.copy()
        twin._own, twin._barred = self._own.copy(), self._barred.copy()
        return twin

    def spot(self, position: int, units: int) -> Spot:
        """Return the place of a share on a device with enough room, rounded to whole slots; nothing is taken."""
        free = self.slots.get(position)
        if free is None:
            return Spot(position, units)
        device = self.layout.devices[position]
        units = device.rounded(units)
        return Spot(position, units, choose_slots(free, units * device.slots // UNITS_PER_DEVICE, device.slots))

    def spot_within(self, position: int, extent: Extent) -> Spot:
        """Return the free part of a foreign extent on a device; nothing is taken.

        Only free slots of the extent count. On a device without slots, an extent with slots means the whole device, and
        so does a divided one on a device without listed parts.
        """
        if extent.divided:
            if position in self.layout.parts:
                return Spot(position, 0, divided=True)
            extent = Extent()
        free = self.slots.get(position)
        if free is None:  # the extent may name slots that this device lacks: its holder sees another partitioning
            units = extent.units if extent.slots < 0 else UNITS_PER_DEVICE
            return Spot(position, min(units, self._own.get(position, self.units[position])))
        device = self.layout.devices[position]
        slots = free & extent.slots if device.usable else 0
        return Spot(position, slots.bit_count() * UNITS_PER_DEVICE // device.slots, slots)

    def take(self, spots: Iterable[Spot]) -> None:
        """Take parts of devices, which the caller found to be free; related wholes and parts get no free units."""
        for spot in spots:
            self._change(spot, -1)

    def give(self, spots: Iterable[Spot]) -> None:
        """Free parts of devices that were taken; related wholes and parts regain their units once none is held."""
        for spot in spots:
            self._change(spot, 1)

    def _change(self, spot: Spot, sign: int) -> None:
        """Take a part of a device, or free the part again, and update the related wholes and parts.

        Args:
            spot: The part.
            sign: -1 to take, 1 to free.
        """
        position = spot.position
        if spot.slots:
            self.slots[position] ^= spot.slots
        kin = self.layout.kin.get(position)
        if kin is None:
            self._set(position, self.units[position] + sign * spot.units)
            return
        self._own[position] += sign * spot.units
        for other in (position,) if spot.divided else kin:
            self._barred[other] -= sign
        for each in (position, *kin):
            self._set(each, 0 if self._barred[each] else self._own[each])

    def _set(self, position: int, units: int) -> None:
        """Set the free units of a device, and whether it is whole."""
        self.units[position] = units
        bit = 1 << position
        self.whole = self.whole | bit if units == UNITS_PER_DEVICE else self.whole & ~bit


def choose_slots(free: int, count: int, total: int) -> int:
    """Choose slots for a share so that the free slots stay together, like a buddy allocator.

    Shares lie in aligned blocks, whose size divides the number of slots, preferably in a block that is in use already;
    else in a row; else anywhere.

    Args:
        free: The free slots, as a bit mask; at least ``count`` of them.
        count: Number of slots.
        total: Number of the device's slots.
    """
    sizes = [size for size in range(count, total + 1) if total % size == 0]  # of blocks that tile the device
    starts = [start for start in range(total - count + 1) if _is_free(free, start, count)]
    aligned = [start for start in starts if start % sizes[0] == 0]

    def room(start: int) -> int:
        """Return the size of the largest free block around a slot; 0 for none."""
        return max((size for size in sizes if _is_free(free, start - start % size, size)), default=0)

    if not starts:
        return first(free, count)
    return (1 << count) - 1 << (min(aligned, key=room) if aligned else starts[0])


def _is_free(free: int, start: int, size: int) -> bool:
    """Return whether a block of slots is wholly free."""
    block = (1 << size) - 1
    return free >> start & block == block


class Wanted(Value):
    """A term with the devices of a machine that could serve the term.

    Attributes:
        term: The term.
        choices: In order of preference, groups of devices as bit masks. Each group alone may serve the term; groups of
            one choice are equally good.
        mask: The devices of every choice.
    """

    term: Term
    choices: tuple[tuple[int, ...], ...]
    mask: int


def want(layout: Layout, term: Term) -> Wanted:
    """Resolve a term against a machine: the devices that could serve it, in groups, whatever is held.

    Raises:
        UnknownNameError: When no device and no installed plug-in has any of the names.
        ValueError: When a filter is unknown, or its value invalid.
    """
    together = layout.serving(term)
    choices = [_groups(layout, term, named & together) for named in layout.named_each(term)]
    if term.count > 1 and (term.mixed or counted(asked(term))):  # named devices may be of several types
        choices.append((together,))
    return Wanted(term=term, choices=tuple(choices), mask=together)


def place(free: Occupancy, wanted: Sequence[Wanted]) -> Placed | None:
    """Place every term of a request, or none.

    Args:
        free: The free devices of a machine; not changed.
        wanted: The terms.

    Returns:
        Parts of devices, term by term, each in the order of the grant; None if the free devices do not suffice, or the
        search for several terms has taken :data:`PLACEMENTS` steps.
    """
    if len(wanted) == 1:  # the common case needs no search
        return next(((spots,) for spots in _candidates(free, wanted[0])), None)
    if not _enough(free, wanted):
        return None
    free = free.copy()  # the search takes and gives back devices
    # Backtracking: terms with the least choice first, so that wrong turns end early; of these, the largest.
    order = sorted(range(len(wanted)), key=lambda index: (wanted[index].mask.bit_count(), -wanted[index].term.units))
    placed: list[tuple[Spot, ...]] = [()] * len(wanted)
    left = PLACEMENTS

    def serve(rank: int, before: tuple[Spot, ...]) -> bool:
        nonlocal left
        if rank == len(order):
            return True
        index = order[rank]
        for spots in _candidates(free, wanted[index], before):
            left -= 1
            if left < 0:
                return False
            placed[index] = spots
            free.take(spots)
            if serve(rank + 1, before + spots):
                return True
            free.give(spots)
        return False

    return tuple(placed) if serve(0, ()) else None


def vetoed(layout: Layout, term: Term, positions: Sequence[int]) -> str:
    """Ask the vendors of a set of devices; return the first refusal, or empty. A rule that raises also refuses."""
    if layout.validate is None:
        return ""
    by_vendor: dict[str, list[Device]] = {}
    for position in positions:
        device = layout.devices[position]
        by_vendor.setdefault(device.vendor, []).append(device)
    for vendor, devices in by_vendor.items():
        try:
            reason = layout.validate(with_units(term, devices[0]), devices)
        except Exception as error:  # noqa: BLE001 -- a faulty rule refuses, and must not break another request's release
            reason = f"the rule of vendor {vendor!r} failed: {type(error).__name__}: {error}"
        if reason:
            return reason
    return ""


def with_units(term: Term, device: Device) -> Term:
    """Return a term that asks a device for the same in units: vendors and clusters know no shares by memory.

    The memory becomes a filter; a term without a share by memory is returned as it is.
    """
    if not term.memory_bytes:
        return term
    filters = (*term.filters, ("mem", term.quantity))
    return replace(term, units=term.units_on(device), memory_bytes=0, filters=filters)


def _groups(layout: Layout, term: Term, mask: int) -> tuple[int, ...]:
    """Split devices by vendor and type, leaving out groups that are too small for the term.

    A term for one device, or a share, needs no split: the mask is the only group, and there is none if it is empty.
    """
    if term.count == 1:
        return (mask,) if mask else ()
    groups: dict[tuple[str, str], int] = {}
    for position in bits(mask):
        device = layout.devices[position]
        alike = (device.vendor, device.type)
        groups[alike] = groups.get(alike, 0) | 1 << position
    return tuple(group for group in groups.values() if group.bit_count() >= term.count)


def _enough(free: Occupancy, wanted: Sequence[Wanted]) -> bool:
    """Return False if the devices of some terms surely have too little room: this saves most searches that would fail.

    True is no promise that the terms fit.
    """
    for mask in {each.mask for each in wanted}:
        inside = [each for each in wanted if not each.mask & ~mask]
        whole = sum(each.term.count for each in inside if not each.term.fraction)
        shares = sum(each.term.units for each in inside if each.term.fraction)
        if whole > (mask & free.whole).bit_count():
            return False
        if shares + whole * UNITS_PER_DEVICE > sum(free.units[position] for position in bits(mask)):
            return False
    return True


def _candidates(free: Occupancy, wanted: Wanted, before: tuple[Spot, ...] = ()) -> Iterator[tuple[Spot, ...]]:
    """Yield parts of free devices for a term, best first: sets that the vendors accept, also together with ``before``.

    Each set is from one group of a choice, and choices come in order.
    """
    layout = free.layout
    for groups in wanted.choices:
        for positions in _sets(free, wanted.term, groups):
            spots = tuple(free.spot(at, wanted.term.units_on(layout.devices[at])) for at in positions)
            if not vetoed(layout, wanted.term, positions) and not layout.conflicts(before + spots):
                yield spots


def _sets(free: Occupancy, term: Term, groups: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield sets of free devices for a term as positions, best first, without asking the vendors.

    A share tries devices in use first, the fullest of them foremost.
    """
    layout, topology = free.layout, free.layout.topology
    if term.count > 1:
        masks = [mask for group in groups for mask in layout.apart(group & free.whole)]
        if len(masks) > 1:
            masks.sort(key=lambda mask: _best_value(topology, term, mask), reverse=True)
        for mask in masks:
            yield from (tuple(bits(chosen)) for chosen in topology.sets(mask, term.count, linked=term.linked))
        return
    for group in groups:
        if term.fraction:
            broken = (at for at in bits(group & ~free.whole) if free.units[at] >= term.units_on(layout.devices[at]))
            yield from ((position,) for position in sorted(broken, key=free.units.__getitem__))
        yield from ((position,) for position in topology.singles(free.whole & group))


def _best_value(topology: Topology, term: Term, mask: int) -> tuple[int, int]:
    """Return the sort key of a group of devices, by the value of its best set for a term; lowest without a set."""
    best = topology.best_set(mask, term.count, linked=term.linked)
    return topology.value(best, mask) if best else (-1, 0)


class Resolved:
    """A request with the devices of a machine that could serve it, whatever is held.

    Args:
        layout: The machine.
        request: The request.

    Raises:
        UnknownNameError: When no device has one of the names.

    Attributes:
        request: The request.
        wanted: The terms.
        mask: The devices that could serve a term, as a bit mask.
    """

    def __init__(self, layout: Layout, request: Request) -> None:
        self._layout = layout
        self.request = request
        self.wanted = tuple(want(layout, term) for term in request.terms)
        self.mask = union(each.mask for each in self.wanted)

    @cached_property
    def ever_fits(self) -> bool:
        """Whether the machine serves the request if nothing is held."""
        return place(Occupancy(self._layout), self.wanted) is not None

    def make_needs(self, name: Callable[[int], Hashable]) -> tuple[Need, ...]:
        """Return the needs of the terms for the queue policy, which names the device at a position by ``name``."""
        found = []
        for each in self.wanted:
            term, sizes = each.term, {}
            if term.memory_bytes:
                sizes = {name(at): term.units_on(self._layout.devices[at]) for at in bits(each.mask)}
            units = max(sizes.values(), default=min(term.units, UNITS_PER_DEVICE))
            among = frozenset(map(name, bits(each.mask)))
            found.append(Need(count=term.count, units=units, among=among, sizes=sizes))
        return tuple(found)


class Choice(Resolved):
    """Chooses devices for one request, repeatedly as leases come and go.

    Args:
        inventory: The machine.
        request: The request.
        validate: The vendors' rules.
        known: Further known names, of no device on this machine.

    Raises:
        UnknownNameError: When no device has one of the names.
    """

    def __init__(
        self, inventory: Inventory, request: Request, validate: Validate | None = None, known: Iterable[str] = ()
    ) -> None:
        super().__init__(Layout(inventory, NameRegistry(known), validate), request)

    @cached_property
    def candidates(self) -> tuple[Device, ...]:
        """The devices that could serve a term of the request."""
        return tuple(self._layout.devices[position] for position in bits(self.mask))

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """The needs of each term, with devices by id."""
        return self.make_needs(lambda position: self._layout.devices[position].id)

    def choose(self, taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
        """Choose free devices; nothing is taken.

        Args:
            taken: Taken extents by device id. Unknown devices are ignored.

        Returns:
            One grant per term; None if the free devices do not suffice.
        """
        free = Occupancy(self._layout)  # from scratch: leases come and go between two calls
        for device_id, extent in taken.items():
            position = self._layout.positions.get(device_id)
            if position is not None:
                free.take((free.spot_within(position, extent),))
        placed = place(free, self.wanted)
        return None if placed is None else grants(self._layout, self.wanted, placed)


def grants(layout: Layout, wanted: Sequence[Wanted], placed: Placed) -> tuple[Grant, ...]:
    """Return the grants for placed terms of a request."""
    return tuple(
        Grant(
            term=each.term,
            shares=tuple(share(layout.devices[spot.position], spot.units, slot_numbers(spot.slots)) for spot in spots),
        )
        for each, spots in zip(wanted, placed, strict=True)
    )


def extent_of(given: Share) -> Extent:
    """Return the extent of a share: its units, and its slots, or any slots if it names none."""
    return Extent(given.units, slot_mask(given.slots) if given.slots else ANY_SLOTS)


def share(device: Device, units: int, slots: tuple[int, ...] = ()) -> Share:
    """Return a share of a device, with its part of the memory, rounded down; a whole device has no ``slots``."""
    if units == UNITS_PER_DEVICE:
        return Share(device=device, units=units, memory_bytes=device.memory_bytes)
    memory = None if device.memory_bytes is None else device.memory_bytes * units // UNITS_PER_DEVICE
    return Share(
        device=device, units=units, slots=slots, memory_bytes=memory, memory_by=AGREEMENT, compute_by=AGREEMENT
    )
