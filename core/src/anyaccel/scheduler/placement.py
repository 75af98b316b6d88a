"""Placement: which devices a request gets, as a pure function of a machine and of what is taken there.

A share goes to the fullest device that still has room, before a fresh one is broken; of a device with slots it gets as
many whole ones as it needs, where that leaves the others together. Whole devices go to the best-connected set. Several
terms are placed together or not at all: a term that took the only device that another one could use gives it back and
tries the next. Devices of two vendors that obey one variable are never given out together, where one of them borrows
it. The search is bounded by ``PLACEMENTS``, some tens of milliseconds at worst; past it the answer is no.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from typing import NamedTuple

from anyaccel.model import UNITS_PER_DEVICE, Device, Extent, Inventory, Share, Term, Value, parts_of, slot_mask
from anyaccel.model.extent import bits, union
from anyaccel.policy import Need
from anyaccel.scheduler.filters import counted
from anyaccel.scheduler.names import DeviceNames
from anyaccel.scheduler.serving import rules
from anyaccel.scheduler.topology import Topology, first
from anyaccel.text import shown

PLACEMENTS = 2_000
"""Tentative placements of terms after which a request counts as impossible to place."""

Validate = Callable[[Term, Sequence[Device]], str | None]
"""A vendor's rule: why the hardware cannot serve a term with exactly these devices of one vendor, or None."""


class Layout:
    """What is fixed about a machine: its devices by position, their names and their connections.

    Args:
        inventory: The machine.
        known: Names that are known though nothing on this machine goes by them.

    Raises:
        ValueError: When two devices have one id.
    """

    def __init__(self, inventory: Inventory, known: Iterable[str] = ()) -> None:
        self.inventory = inventory
        self.devices = inventory.devices
        self.positions = {device.id: position for position, device in enumerate(self.devices)}
        if len(self.positions) < len(self.devices):
            name, count = Counter(device.id for device in self.devices).most_common(1)[0]
            raise ValueError(f"devices of a machine must have ids of their own (got {shown(name)} {count} times)")
        self.names = DeviceNames(inventory, known)
        self.topology = Topology(self.devices)
        self.usable = self.mask(lambda device: device.usable)
        self.ours = self.mask(lambda device: device.units == UNITS_PER_DEVICE)
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
        self.vendors: dict[str, int] = {}
        for position, device in enumerate(self.devices):
            self.vendors[device.vendor] = self.vendors.get(device.vendor, 0) | 1 << position
        self.rivals = {vendor: rivals for vendor in self.vendors if (rivals := self._rivals(vendor))}
        self.kin: dict[int, list[int]] = {}
        for whole, parts in self.parts.items():
            for part in bits(parts):
                self.kin.setdefault(whole, []).append(part)
                self.kin.setdefault(part, []).append(whole)

    def mask(self, holds: Callable[[Device], bool]) -> int:
        """The positions of the devices for which something holds, as a bit mask."""
        return sum(1 << position for position, device in enumerate(self.devices) if holds(device))

    def with_parts(self, mask: int) -> int:
        """Devices and all that are parts of them: two such masks overlap when one of the devices excludes another."""
        for whole, parts in self.parts.items():
            if mask >> whole & 1:
                mask |= parts
        return mask

    def _rivals(self, vendor: str) -> int:
        """The devices of which a worker that has some of this vendor's gets none."""
        others = self.inventory.excluded_vendors(vendor) if len(self.vendors) > 1 else ()
        return union(self.vendors.get(other, 0) for other in others)

    def without_rivals(self) -> Layout:
        """The same machine, were there no variable that two vendors obey."""
        twin = copy(self)
        twin.rivals = {}
        return twin

    def compatible(self, mask: int) -> tuple[int, ...]:
        """Split devices into sets of which one worker may have any."""
        for vendor, rivals in self.rivals.items():
            own = self.vendors[vendor]
            if mask & own and mask & rivals:
                return tuple(dict.fromkeys((*self.compatible(mask & ~rivals), *self.compatible(mask & ~own))))
        return (mask,)

    def barred_by(self, spots: Iterable[Spot]) -> int:
        """The devices that are out of the question for who has some already."""
        if not self.rivals:
            return 0
        return union(self.rivals.get(self.devices[spot.position].vendor, 0) for spot in spots)

    def apart(self, mask: int) -> tuple[int, ...]:
        """Devices of which none is a part of another one: those that are no parts, and those that have none."""
        wholes = slot_mask(whole for whole, parts in self.parts.items() if mask >> whole & 1 and mask & parts)
        if not wholes:
            return (mask,)
        return mask & ~union(self.parts[whole] for whole in bits(wholes)), mask & ~wholes

    def named(self, term: Term) -> int:
        """The devices that a term's names mean, whatever state they are in."""
        return union(self.names.devices(name) for name in term.names)

    def serving(self, term: Term) -> int:
        """The devices that serve a term when nothing is held."""
        asked = tuple(rules(term, self.inventory))
        named = ((position, self.devices[position]) for position in bits(self.named(term)))
        return slot_mask(position for position, device in named if all(rule.passes(device) for rule in asked))


class Spot(NamedTuple):
    """A part of a device.

    Attributes:
        position: The device.
        units: How much of it, in 1/10000.
        slots: Which of its slots, as a bit mask: all of them for a whole device, 0 where it has none.
    """

    position: int
    units: int
    slots: int = 0


class Occupancy:
    """How much of each device is free, in 1/10000, by position.

    Attributes:
        units: Free units by position.
        whole: The devices of which nothing is taken, as a bit mask.
        slots: Free slots, as a bit mask, by position of those devices that have slots.
    """

    def __init__(self, layout: Layout) -> None:
        """A machine on which nothing is taken. Devices that cannot be used have nothing free."""
        self._layout = layout
        self.units, self.slots = layout.units.copy(), layout.slots.copy()
        self.whole = layout.ours & layout.usable
        # Of devices that are parts of others, or have parts: what is free were it not for these, and how often these
        # are held. As long as one is, nothing of the device is free.
        self._own = {position: self.units[position] for position in layout.kin}
        self._barred = dict.fromkeys(layout.kin, 0)

    def copy(self) -> Occupancy:
        """An occupancy that changes on its own."""
        twin = object.__new__(Occupancy)
        twin._layout, twin.whole = self._layout, self.whole
        twin.units, twin.slots = self.units.copy(), self.slots.copy()
        twin._own, twin._barred = self._own.copy(), self._barred.copy()
        return twin

    def spot(self, position: int, units: int) -> Spot:
        """Where a device that has room takes a share, or all of it."""
        free = self.slots.get(position)
        if free is None:
            return Spot(position, units)
        device = self._layout.devices[position]
        units = device.rounded(units)
        return Spot(position, units, choose_slots(free, units * device.slots // UNITS_PER_DEVICE, device.slots))

    def spot_of(self, share: Share) -> Spot:
        """Where a share of one of the devices is."""
        position = self._layout.positions[share.device.id]
        slots = self._layout.slots.get(position, 0) if share.whole else slot_mask(share.slots)
        return Spot(position, share.units, slots)

    def spot_within(self, position: int, extent: Extent) -> Spot:
        """What is free of a device and taken by somebody who did not ask us."""
        free = self.slots.get(position)
        if free is None:  # a position that this device has not: somebody else sees it differently
            units = extent.units if extent.slots < 0 else UNITS_PER_DEVICE
            return Spot(position, min(units, self._own.get(position, self.units[position])))
        device = self._layout.devices[position]
        slots = free & extent.slots if device.usable else 0
        return Spot(position, slots.bit_count() * UNITS_PER_DEVICE // device.slots, slots)

    def take(self, spots: Iterable[Spot]) -> None:
        """Take parts of devices."""
        for spot in spots:
            self._change(spot, -1)

    def give(self, spots: Iterable[Spot]) -> None:
        """Give parts of devices back."""
        for spot in spots:
            self._change(spot, 1)

    def _change(self, spot: Spot, sign: int) -> None:
        position = spot.position
        if spot.slots:
            self.slots[position] ^= spot.slots
        kin = self._layout.kin.get(position)
        if kin is None:
            self._set(position, self.units[position] + sign * spot.units)
            return
        self._own[position] += sign * spot.units
        for other in kin:
            self._barred[other] -= sign
        for each in (position, *kin):
            self._set(each, 0 if self._barred[each] else self._own[each])

    def _set(self, position: int, units: int) -> None:
        self.units[position] = units
        bit = 1 << position
        self.whole = self.whole | bit if units == UNITS_PER_DEVICE else self.whole & ~bit


def choose_slots(free: int, count: int, total: int) -> int:
    """Choose slots for a share so that those that are left lie together: as memory is given out in buddies.

    Shares lie in aligned blocks, whose size divides the number of slots, in the block that is broken already where
    there is one; else in a row; else anywhere.

    Args:
        free: The free slots, as a bit mask; at least ``count`` of them.
        count: Number of slots.
        total: Number of the device's slots.
    """
    sizes = [size for size in range(count, total + 1) if total % size == 0]
    row = (1 << count) - 1
    best, smallest = 0, total + 1
    for start in range(0, total, sizes[0]):
        if free >> start & row == row:
            whole = [size for size in sizes if _is_free(free, start - start % size, size)]
            room = max(whole, default=0)
            if room < smallest:
                best, smallest = row << start, room
    if best:
        return best
    rows = (row << start for start in range(total - count + 1) if free >> start & row == row)
    return next(rows, 0) or first(free, count)


def _is_free(free: int, start: int, size: int) -> bool:
    block = (1 << size) - 1
    return free >> start & block == block


class Wanted(Value):
    """A term in the terms of one machine.

    Attributes:
        term: The term.
        units: Units of each device that are asked for: a share, or the whole device.
        choices: In order of preference, groups of devices as bit masks. Each group alone may serve the term; those
            of one choice are equally good.
        mask: All devices of the choices.
    """

    term: Term
    units: int
    choices: tuple[tuple[int, ...], ...]
    mask: int


def want(layout: Layout, term: Term) -> Wanted:
    """Find the devices that could serve a term.

    Raises:
        UnknownNameError: When nothing goes by one of the names.
    """
    together = layout.serving(term)
    choices = [_groups(layout, term, layout.names.devices(name) & together) for name in term.names]
    if term.count > 1 and (term.mixed or counted(term)):
        choices.append(layout.compatible(together))
    return Wanted(term=term, units=min(term.units, UNITS_PER_DEVICE), choices=tuple(choices), mask=together)


def needs(wanted: Iterable[Wanted], name: Callable[[int], Hashable]) -> tuple[Need, ...]:
    """What terms need, as the policy sees it.

    Args:
        wanted: The terms.
        name: What the policy calls the device at a position.
    """
    return tuple(
        Need(count=each.term.count, units=each.units, among=frozenset(map(name, bits(each.mask)))) for each in wanted
    )


def place(
    layout: Layout, free: Occupancy, wanted: Sequence[Wanted], validate: Validate | None = None
) -> tuple[tuple[Spot, ...], ...] | None:
    """Find devices for all terms of a request, or for none.

    Args:
        layout: The machine.
        free: What is free; left as it is.
        wanted: The terms.
        validate: The vendors' rules.

    Returns:
        Parts of devices, term by term, each in the order in which devices are handed out; None when there are none.
    """
    if len(wanted) == 1:
        return next(((spots,) for spots in _candidates(layout, free, wanted[0], validate)), None)
    if not _enough(free, wanted):
        return None
    free = free.copy()
    order = sorted(range(len(wanted)), key=lambda index: _choice(wanted[index]))
    placed: list[tuple[Spot, ...]] = [()] * len(wanted)
    left = PLACEMENTS

    def serve(rank: int, barred: int) -> bool:
        nonlocal left
        if rank == len(order):
            return True
        index = order[rank]
        for spots in _candidates(layout, free, wanted[index], validate, barred):
            left -= 1
            if left < 0:
                return False
            placed[index] = spots
            free.take(spots)
            if serve(rank + 1, barred | layout.barred_by(spots)):
                return True
            free.give(spots)
        return False

    return tuple(placed) if serve(0, 0) else None


def vetoed(layout: Layout, term: Term, positions: Sequence[int], validate: Validate | None) -> str:
    """Ask each vendor concerned about a set; the answer is its reason, or empty when all agree."""
    if validate is None:
        return ""
    by_vendor: dict[str, list[Device]] = {}
    for position in positions:
        device = layout.devices[position]
        by_vendor.setdefault(device.vendor, []).append(device)
    for vendor, devices in by_vendor.items():
        try:
            reason = validate(term, devices)
        except Exception as error:  # noqa: BLE001 -- a faulty rule refuses; it must not strand whoever releases
            reason = f"the rule of vendor {vendor!r} failed: {type(error).__name__}: {error}"
        if reason:
            return reason
    return ""


def _groups(layout: Layout, term: Term, mask: int) -> tuple[int, ...]:
    """Split devices by vendor and type where a term takes several and all must be alike."""
    if term.count == 1:
        return (mask,) if mask else ()
    groups: dict[tuple[str, str], int] = {}
    for position in bits(mask):
        device = layout.devices[position]
        alike = (device.vendor, device.type)
        groups[alike] = groups.get(alike, 0) | 1 << position
    return tuple(group for group in groups.values() if group.bit_count() >= term.count)


def _choice(wanted: Wanted) -> tuple[int, int]:
    """Who goes first: terms with the least choice, then large ones, as they are the hardest to fit in."""
    return wanted.mask.bit_count(), -wanted.term.units


def _enough(free: Occupancy, wanted: Sequence[Wanted]) -> bool:
    """Whether no set of devices is asked for more than it has: spares most searches that would fail."""
    for mask in {each.mask for each in wanted}:
        inside = [each for each in wanted if not each.mask & ~mask]
        whole = sum(each.term.count for each in inside if not each.term.fraction)
        shares = sum(each.units for each in inside if each.term.fraction)
        if whole > (mask & free.whole).bit_count():
            return False
        if shares + whole * UNITS_PER_DEVICE > sum(free.units[position] for position in bits(mask)):
            return False
    return True


def _candidates(
    layout: Layout, free: Occupancy, wanted: Wanted, validate: Validate | None, barred: int = 0
) -> Iterator[tuple[Spot, ...]]:
    """Sets of devices that could serve a term now and that no vendor vetoes, best first; none of those barred."""
    for choice in wanted.choices:
        groups = [group & ~barred for group in choice] if barred else choice
        for positions in _sets(layout, free, wanted, groups):
            if not vetoed(layout, wanted.term, positions, validate):
                yield tuple(free.spot(position, wanted.units) for position in positions)


def _sets(layout: Layout, free: Occupancy, wanted: Wanted, groups: Sequence[int]) -> Iterator[tuple[int, ...]]:
    term, topology = wanted.term, layout.topology
    if term.count > 1:
        masks = [mask for group in groups for mask in layout.apart(group & free.whole)]
        if len(masks) > 1:
            masks.sort(key=lambda mask: _best_value(topology, term, mask), reverse=True)
        for mask in masks:
            yield from (tuple(bits(chosen)) for chosen in topology.sets(mask, term.count, linked=term.linked))
        return
    for group in groups:
        if term.fraction:
            broken = (at for at in bits(group & ~free.whole) if free.units[at] >= wanted.units)
            yield from ((position,) for position in sorted(broken, key=free.units.__getitem__))
        yield from ((position,) for position in topology.singles(free.whole & group))


def _best_value(topology: Topology, term: Term, mask: int) -> tuple[int, int]:
    best = topology.best_set(mask, term.count, linked=term.linked)
    return topology.value(best, mask) if best else (-1, 0)
