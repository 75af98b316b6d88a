"""How much room there is around each free device, kept from one question to the next.

A set of free devices differs little from the set before. What was found out about that one is brought up to date for
the devices that changed and those near them, so that the cost of a decision does not grow with the others. Nothing here
is ever wrong about a set, whatever was asked before: answers depend on the question alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from operator import or_
from threading import Lock
from typing import TypeVar

K = TypeVar("K")

_KEPT = 4
"""Sets of free devices that are kept: those of a few types, and that of a machine on which nothing is held."""
_ALIKE = 512
"""Devices in which a set may differ from one that is kept, to be found out from it."""


def bits(mask: int) -> Iterator[int]:
    """The positions in a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Iterable[int]) -> int:
    """The positions that are in one of some masks."""
    return reduce(or_, masks, 0)


class Cells:
    """The cells of a machine: devices that are connected to everything alike.

    Args:
        cells: The cells, each as a mask of positions.
        levels: For each strength of link by which sets are told apart, who is near whom, by position.
        neighborhoods: Who is near whom, by position, the closest kind of neighborhood first.
    """

    def __init__(
        self, cells: Sequence[int], levels: Sequence[Sequence[int]], neighborhoods: Sequence[Sequence[int]]
    ) -> None:
        self.masks = cells
        self.of: dict[int, int] = {}
        lows = [next(bits(mask)) for mask in cells]
        self._levels = [[level[low] for low in lows] for level in levels]
        self._ranks = [
            next((rank for rank, near in enumerate(neighborhoods) if near[low]), len(neighborhoods)) for low in lows
        ]
        self._near = [
            neighborhoods[rank][low] | mask if rank < len(neighborhoods) else mask
            for rank, low, mask in zip(self._ranks, lows, cells, strict=True)
        ]
        by_rank = [0] * len(neighborhoods)
        for number, (mask, rank) in enumerate(zip(cells, self._ranks, strict=True)):
            self.of |= dict.fromkeys(bits(mask), number)
            if rank < len(neighborhoods):
                by_rank[rank] |= mask
        self._reach = [
            mask | union(level[low] for level in levels) | union(
                near[low] & ranked for near, ranked in zip(neighborhoods, by_rank, strict=True)
            )
            for mask, low in zip(cells, lows, strict=True)
        ]  # fmt: skip
        self._touched: dict[int, tuple[int, ...]] = {}
        self._lock = Lock()
        self._kept: list[_Free] = []

    def roomiest(self, free: int, count: int, most: int) -> list[int]:
        """Free devices around which there is room for so many, one of each cell.

        Those in the smallest neighborhoods that do come first, of the closest kind; then the largest that do not.
        """
        with self._lock:
            found = self._at(free)

            def order(key: tuple[int, int]) -> tuple[bool, int, int]:
                rank, size = key
                return size < count, rank, size if size >= count else -size

            keys = sorted(found.rooms, key=order)
            cells = (cell for key in keys for cell in bits(found.rooms[key]))
            return [self._low(cell, free) for cell in islice(cells, most)]

    def loosest(self, free: int, most: int) -> list[int]:
        """Free devices, one of each cell: of all cells where there are few, else some that are linked the least."""
        if len(self.masks) <= most:
            return [(own & -own).bit_length() - 1 for mask in self.masks if (own := mask & free)]
        with self._lock:
            found = self._at(free)
            return [self._low(cell, free) for cell in islice(bits(found.links[min(found.links)]), most)]

    def near(self, mask: int, most: int) -> list[int]:
        """The lowest devices of a mask, one of each cell."""
        found: list[int] = []
        while mask and len(found) < most:
            low = (mask & -mask).bit_length() - 1
            found.append(low)
            mask &= ~self.masks[self.of[low]]
        return found

    def _low(self, cell: int, free: int) -> int:
        own = self.masks[cell] & free
        return (own & -own).bit_length() - 1

    def _at(self, free: int) -> _Free:
        """What is known of a set of free devices."""
        differ, found = min(
            (((kept.free ^ free).bit_count(), kept) for kept in self._kept), key=lambda pair: pair[0], default=(0, None)
        )
        if found is None or differ > _ALIKE:
            found = _Free()
            self._kept = self._kept[1 - _KEPT :]
        else:
            self._kept.remove(found)  # until it is right again: an interrupt may come in between
        changed, found.free = found.free ^ free, free
        cells: set[int] = set()
        while changed:
            cell = self.of[(changed & -changed).bit_length() - 1]
            changed &= ~self.masks[cell]
            cells.update(self._around(cell))
        for cell in cells:
            found.update(cell, *self._found(cell, free))
        self._kept.append(found)
        return found

    def _around(self, cell: int) -> tuple[int, ...]:
        """The cells of which something changes when a device of one does."""
        if cell not in self._touched:
            reach, found = self._reach[cell], []
            while reach:
                found.append(self.of[(reach & -reach).bit_length() - 1])
                reach &= ~self.masks[found[-1]]
            self._touched[cell] = tuple(found)
        return self._touched[cell]

    def _found(self, cell: int, free: int) -> tuple[tuple[int, int] | None, int | None]:
        """The kind and the room of a cell's neighborhood, and how much its devices are linked; None without any."""
        own = self.masks[cell] & free
        if not own:
            return None, None
        # Each device of a cell is near the cell's others where it is near one of them.
        links = sum(((level[cell] | own) & free).bit_count() if level[cell] else 1 for level in self._levels)
        return (self._ranks[cell], (self._near[cell] & free).bit_count()), links


class _Free:
    """What is known of one set of free devices.

    Attributes:
        free: The devices.
        rooms: By the kind and the room of their neighborhoods, cells as a mask of their numbers.
        links: By the number of links to free devices, cells likewise.
    """

    __slots__ = ("_links", "_rooms", "free", "links", "rooms")

    def __init__(self) -> None:
        self.free = 0
        self.rooms: dict[tuple[int, int], int] = {}
        self.links: dict[int, int] = {}
        self._rooms: dict[int, tuple[int, int] | None] = {}
        self._links: dict[int, int | None] = {}

    def update(self, cell: int, room: tuple[int, int] | None, links: int | None) -> None:
        """Note what was found out about a cell."""
        _move(self.rooms, cell, self._rooms.get(cell), room)
        _move(self.links, cell, self._links.get(cell), links)
        self._rooms[cell], self._links[cell] = room, links


def _move(table: dict[K, int], cell: int, old: K | None, new: K | None) -> None:
    """Move a cell from one entry of a table to another; an entry without cells is none."""
    if old == new:
        return
    bit = 1 << cell
    if old is not None:
        left = table[old] ^ bit
        if left:
            table[old] = left
        else:
            del table[old]
    if new is not None:
        table[new] = table.get(new, 0) | bit
