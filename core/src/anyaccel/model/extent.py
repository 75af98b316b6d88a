"""Extents: how much of a device is held, and which slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_

from anyaccel._typing import NamedTuple
from anyaccel.model.device import UNITS_PER_DEVICE

ANY_SLOTS = -1
"""Stands for any slots: of a whole device, and of a share without a position."""
_MOST_DIGITS = 6


class Extent(NamedTuple):
    """A held part of a device, with its slots.

    Attributes:
        units: Part of the device, in 1/10000.
        slots: The slots as a bit mask; :data:`ANY_SLOTS` for an unknown position.
        divided: Whether a part of the device is held that is a device by itself: then no share of the device is free.
    """

    units: int = UNITS_PER_DEVICE
    slots: int = ANY_SLOTS
    divided: bool = False

    def joined(self, other: Extent) -> Extent:
        """Return the sum of two extents, at most the whole device."""
        units = min(UNITS_PER_DEVICE, self.units + other.units)
        return Extent(units, self.slots | other.slots, self.divided or other.divided)

    def leaves(self, wanted: Extent) -> bool:
        """Return whether another extent is free beside this extent. Shares with and without a position do not mix."""
        if wanted.divided:
            return not self.units
        overlap = self.slots & wanted.slots
        # ANY_SLOTS is -1, which overlaps every mask: a share with a position never joins shares without.
        apart = not overlap or self.slots == wanted.slots == ANY_SLOTS
        return not self.divided and apart and self.units + wanted.units <= UNITS_PER_DEVICE


NOTHING = Extent(0, 0)
"""The extent of a free device."""

DIVIDED = Extent(0, 0, divided=True)
"""The extent by which the lease of a part blocks the whole device."""


def slot_mask(slots: Iterable[int]) -> int:
    """Return slots as a bit mask."""
    return sum(1 << slot for slot in set(slots))


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits in a mask, lowest first; none for :data:`ANY_SLOTS`."""
    while mask > 0:  # ANY_SLOTS is negative
        low = mask & -mask  # the lowest bit
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Iterable[int]) -> int:
    """Return the union of bit masks."""
    return reduce(or_, masks, 0)


def slot_numbers(mask: int) -> tuple[int, ...]:
    """Return the slots of a bit mask in ascending order; none for :data:`ANY_SLOTS`."""
    return tuple(bits(mask))


def format_slots(slots: Iterable[int]) -> str:
    """Write numbers as ranges: ``0-3``, ``0-1,6``; empty for none."""
    return ",".join(map(format_row, rows_of(slots)))


def join_names(names: Iterable[str]) -> str:
    """Write names of devices in ranges, as a request has them: ``acme/0-3,6``; unchanged if one has another form."""
    listed = list(names)
    by_vendor: dict[str, list[int]] = {}
    for name in listed:
        vendor, _, index = name.rpartition("/")
        if not vendor or not index.isdecimal():
            return ", ".join(listed)
        by_vendor.setdefault(vendor, []).append(int(index))
    return " ".join(f"{vendor}/{format_slots(numbers)}" for vendor, numbers in by_vendor.items())


def read_row(text: str) -> tuple[int, int] | None:
    """Parse ``0-3`` or ``6``; return the first and the last number, or None."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not all(each.isascii() and each.isdecimal() and len(each) <= _MOST_DIGITS for each in (first, last)):
        return None
    return int(first), int(last)


def format_row(row: tuple[int, int]) -> str:
    """Write a first and a last number: ``0-3``, ``6``."""
    first, last = row
    return str(first) if first == last else f"{first}-{last}"


def rows_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive numbers, each as its first and its last number, in order."""
    rows: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if rows and rows[-1][1] == number - 1:
            rows[-1] = rows[-1][0], number
        else:
            rows.append((number, number))
    return rows
