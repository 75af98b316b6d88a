"""Connections between devices of a machine, and the search for well-connected sets.

Positions of devices are bits of an int, so that "the free ones among those that are linked to this one" is one
operation however many devices there are. Devices that are connected to everything alike form a *cell*; searching by
cells instead of devices is what keeps large machines cheap.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from itertools import combinations, islice

from anyaccel.model import Device, bits, slot_mask

EXACT_UP_TO = 16
"""Number of candidates up to which the search for the best-connected set is exact; above it is greedy."""
SEARCH_STEPS = 20_000
"""Steps after which an exact search returns the best set so far: a few tens of milliseconds."""
SETS = 512
"""Number of sets that are offered to a vendor's rule before the answer is no."""

_SEEDS = 4  # starting devices of the greedy search, which costs as much for each
_LINK_LEVELS = 8
_LINK = 1 << 60  # weight of a link: above any number of NUMA or PCI neighbors
_PCI_GAP = 16  # bus numbers between devices behind different switches, at least


def first(mask: int, count: int) -> int:
    """Return the lowest ``count`` positions of a mask, as a mask; every position if there are fewer."""
    return slot_mask(islice(bits(mask), count))


class Topology:
    """Connections between devices by position: links first, then NUMA nodes, then PCI neighbors.

    Args:
        devices: The devices, in the order of a grant.

    Attributes:
        linked: For each position, the mask of directly linked positions.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        size = len(devices)
        levels = _link_levels(devices)
        self.linked = levels[0] if levels else [0] * size
        # By position, the mask of other devices on the same NUMA node.
        numa = _same([device.numa_node for device in devices])
        pci = _same(_pci_groups(devices))
        everything = (1 << size) - 1
        # A connection that all pairs have, or none, tells sets apart nowhere: it costs nothing.
        self._layers = [
            (weight, near)
            for weight, near in (*((_LINK, level) for level in levels), (1 << 30, numa), (1, pci))
            if any(near) and any(mask | 1 << position != everything for position, mask in enumerate(near))
        ]
        self._closest = sum(weight for weight, _ in self._layers)
        self._neighborhoods = [*reversed(levels), numa, pci]
        signatures = [
            tuple(near[position] and near[position] | 1 << position for near in (*levels, numa, pci))
            for position in range(size)
        ]
        self._cell_of = [others | 1 << position for position, others in enumerate(_same(signatures))]

    def affinity(self, position: int, mask: int) -> int:
        """Return the strength of a device's connections to the devices of a mask, for comparisons only.

        Connections that every pair of devices has do not count.
        """
        total = 0
        for weight, near in self._layers:
            total += weight * (near[position] & mask).bit_count()
        return total

    def value(self, chosen: int, free: int) -> tuple[int, int]:
        """Return the value of taking ``chosen`` out of ``free``: inner connections first, then remaining ones."""
        inside = sum(self.affinity(position, chosen) for position in bits(chosen)) // 2
        return inside, -sum(self.affinity(position, free) for position in bits(chosen))

    def all_linked(self, chosen: int) -> bool:
        """Return whether every two devices of a mask are linked directly."""
        return all((self.linked[position] | 1 << position) & chosen == chosen for position in bits(chosen))

    def best_set(self, free: int, count: int, *, linked: bool = False) -> int:
        """Return the best-connected ``count`` devices of ``free``, as a mask; the search is greedy among many devices.

        Equally good sets are told apart by how well connected they leave the rest, then by position.

        Args:
            free: The devices to choose from.
            count: Number of devices.
            linked: Whether every two devices of the set must be linked directly.

        Returns:
            The set, or 0 when there is none, or with ``linked`` none was found in ``SEARCH_STEPS``.
        """
        available = free.bit_count()
        if available < count:
            return 0
        if count == 1:
            return self._loosest(free)
        if not linked and (available == count or not self._layers):
            return first(free, count)
        if available <= EXACT_UP_TO:
            return self._exact(free, count, linked=linked)
        return self._greedy(free, count, linked=linked) or (self._exact(free, count, linked=True) if linked else 0)

    def sets(self, free: int, count: int, *, linked: bool = False) -> Iterator[int]:
        """Yield sets of ``count`` devices, best first: the best, neighbors in order, then others, up to ``SETS``.

        None if there is no best set. With ``linked``, every two devices of a set are linked directly.
        """
        best = self.best_set(free, count, linked=linked)
        if not best:
            return
        yield best
        positions = list(bits(free))
        runs = (positions[start : start + count] for start in range(min(SETS, len(positions) - count + 1)))
        windows = sorted((slot_mask(run) for run in runs), key=lambda chosen: self.value(chosen, free), reverse=True)
        others = (slot_mask(chosen) for chosen in combinations(positions, count))
        for chosen in islice(dict.fromkeys((best, *windows, *islice(others, SETS))), 1, SETS):
            if not linked or self.all_linked(chosen):
                yield chosen

    def singles(self, free: int) -> Iterator[int]:
        """Yield the positions of free devices: first the one whose loss breaks least, then the others in order."""
        if free:
            best = self._loosest(free)
            yield best.bit_length() - 1
            yield from bits(free & ~best)

    def _loosest(self, free: int) -> int:
        """Return the free device, as a mask, whose loss breaks the fewest connections; the lowest of equal ones."""
        if not self._layers:
            return free & -free
        return 1 << min(self._lows(free), key=lambda low: (self.affinity(low, free), low))

    def _exact(self, free: int, count: int, *, linked: bool) -> int:
        """Return the best set by branch and bound over sets, where devices of one cell are interchangeable.

        After ``SEARCH_STEPS``, the best set so far; 0 if no set was found.
        """
        loss = {position: self.affinity(position, free) for position in bits(free)}
        scale = sum(loss.values()) + 1  # a set's own connections weigh more than all that it can break
        lightest = min(loss.values())
        best, best_value, steps = 0, -(scale**2), SEARCH_STEPS

        def extend(chosen: int, allowed: int, value: int, missing: int) -> None:
            nonlocal best, best_value, steps
            if not missing:
                if value > best_value or not best:
                    best, best_value = chosen, value
                return
            pairs = missing * (count - missing) + missing * (missing - 1) // 2
            # Upper bound of what this branch can reach: each missing pair connected in the closest way.
            hope = value + pairs * self._closest * scale - missing * lightest
            while allowed.bit_count() >= missing and steps > 0 and (hope > best_value or not best):
                steps -= 1
                low = allowed & -allowed
                position = low.bit_length() - 1
                rest = allowed ^ low
                gain = self.affinity(position, chosen) * scale - loss[position]
                extend(chosen | low, rest & self.linked[position] if linked else rest, value + gain, missing - 1)
                allowed &= ~self._cell_of[position]  # other devices of the cell would give the same value

        extend(0, free, 0, count)
        return best

    def _greedy(self, free: int, count: int, *, linked: bool) -> int:
        """Grow sets from a few promising devices, and return the best; 0 if none grows to ``count``."""
        seeds = sorted(self._lows(free), key=lambda low: self._room(low, free, count))[:_SEEDS]
        starts = [self._alike(seed, free, count, linked=linked) for seed in seeds]
        grown = {self.grow(start, free, count, linked=linked) for start in starts} - {0}
        return max(sorted(grown), key=lambda chosen: self.value(chosen, free), default=0)

    def _lows(self, mask: int) -> Iterator[int]:
        """Yield the lowest device of each cell in a mask."""
        while mask:
            low = (mask & -mask).bit_length() - 1
            yield low
            mask &= ~self._cell_of[low]

    def _room(self, low: int, free: int, count: int) -> tuple[bool, int, int]:
        """Return the sort key of a device as the start of a set.

        Devices with enough free neighbors of their closest kind come first, of these the closest kind, then the fewest
        neighbors.
        """
        kinds = len(self._neighborhoods)
        rank = next((rank for rank, near in enumerate(self._neighborhoods) if near[low]), kinds)
        around = self._cell_of[low] | (self._neighborhoods[rank][low] if rank < kinds else 0)
        size = (around & free).bit_count()
        return size < count, rank, size if size >= count else -size

    def grow(self, chosen: int, free: int, count: int, *, linked: bool = False) -> int:
        """Add devices of ``free`` to a set, those first that are connected best to the set and least to the rest.

        Returns:
            The set of ``count`` devices; 0 if there are not so many, or with ``linked`` not so many that are linked.
        """
        while (missing := count - chosen.bit_count()) > 0:
            rest = allowed = free & ~chosen
            for position in bits(chosen) if linked else ():
                allowed &= self.linked[position]
            if allowed.bit_count() < missing:
                return 0
            best = max(self._lows(allowed), key=partial(self._fit, chosen, rest))
            chosen |= self._alike(best, allowed, missing, linked=linked)
        return chosen

    def _alike(self, low: int, allowed: int, count: int, *, linked: bool) -> int:
        """Return the lowest device of a cell with the next ones of the cell, at most ``count`` in all.

        Each of them fits a set as well as the first does. With ``linked``, a cell without links gives one device.
        """
        cell = self._cell_of[low] & allowed
        return first(cell, count) if self.linked[low] & cell or not linked else 1 << low

    def _fit(self, chosen: int, rest: int, position: int) -> tuple[int, int, int]:
        """Return the sort key of a device to be added to a set."""
        return self.affinity(position, chosen), -self.affinity(position, rest), -position


def _link_levels(devices: Sequence[Device]) -> list[list[int]]:
    """Return the linked positions of each position, for each strength of link and above.

    A link that one side reports counts for both. Only the order of strengths counts, so each level weighs the same; if
    a machine has very many strengths, some are merged.
    """
    positions = {device.id: position for position, device in enumerate(devices)}
    strengths = sorted({strength for device in devices for strength in device.links.values() if strength > 0})
    strengths = strengths[:: -(-len(strengths) // _LINK_LEVELS) or 1]
    levels = [[0] * len(devices) for _ in strengths]
    for position, device in enumerate(devices):
        for other, strength in device.links.items():
            peer = positions.get(other, position)
            for least, near in zip(strengths, levels, strict=True):
                if peer != position and strength >= least:
                    near[position] |= 1 << peer
                    near[peer] |= 1 << position
    return levels


def _same(groups: Sequence[Hashable]) -> list[int]:
    """Return for each position the mask of other positions in its group; None is no group."""
    masks: dict[Hashable, int] = {}
    for position, group in enumerate(groups):
        if group is not None:
            masks[group] = masks.get(group, 0) | 1 << position
    return [masks.get(group, 1 << position) & ~(1 << position) for position, group in enumerate(groups)]


def _pci_groups(devices: Sequence[Device]) -> list[int | None]:
    """Number the groups of devices with close PCI buses, as behind one switch."""
    buses = [_bus(device.pci_bus_id) for device in devices]
    groups: dict[int | None, int] = {}
    group, last = 0, -_PCI_GAP
    for bus in sorted({bus for bus in buses if bus is not None}):  # a gap between bus numbers begins a new switch
        group += bus - last >= _PCI_GAP
        groups[bus] = group
        last = bus
    return [groups.get(bus) for bus in buses]


def _bus(address: str | None) -> int | None:
    """Return the bus of a PCI address as one number, with domains far apart; None when unknown."""
    try:
        domain, bus, _ = (address or "").split(":")
        return int(domain, 16) << 16 | int(bus, 16)
    except ValueError:
        return None
