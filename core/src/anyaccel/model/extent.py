"""How much of a device is held, and where: what the ledger counts and placement subtracts."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_

from anyaccel.model.device import UNITS_PER_DEVICE

TYPE_CHECKING = False  # that of typing, which takes longer to import than the model
if TYPE_CHECKING:
    from typing import NamedTuple

ANY_SLOTS = -1
"""Every slot may be meant: those of a whole device, and of a share whose position nobody knows."""
_MOST_DIGITS = 6


if TYPE_CHECKING:

    class _Fields(NamedTuple):
        units: int = UNITS_PER_DEVICE
        slots: int = ANY_SLOTS
        divided: bool = False

else:
    _Fields = namedtuple("Extent", ["units", "slots", "divided"], defaults=[UNITS_PER_DEVICE, ANY_SLOTS, False])  # noqa: PYI024 - see above


class Extent(_Fields):
    """How much of one device is held, and which of its slots.

    Attributes:
        units: Part of the device, in 1/10000.
        slots: The slots, as a bit mask; :data:`ANY_SLOTS` where no position is known.
        divided: Whether a part of it is held that is a device of its own: then nothing of the device itself is free.
    """

    __slots__ = ()

    def joined(self, other: Extent) -> Extent:
        """What two holders hold together, at most all of the device."""
        units = min(UNITS_PER_DEVICE, self.units + other.units)
        return Extent(units, self.slots | other.slots, self.divided or other.divided)

    def leaves(self, wanted: Extent) -> bool:
        """Whether what is wanted is free while this is held. Shares without a position and with one do not mix."""
        if wanted.divided:
            return not self.units
        overlap = self.slots & wanted.slots
        apart = not overlap or self.slots == wanted.slots == ANY_SLOTS
        return not self.divided and apart and self.units + wanted.units <= UNITS_PER_DEVICE


NOTHING = Extent(0, 0)
"""What is held of a device that is free."""

DIVIDED = Extent(0, 0, divided=True)
"""What is held of a device by whoever holds a part of it that is a device of its own."""


def slot_mask(slots: Iterable[int]) -> int:
    """Slots as a bit mask."""
    return sum(1 << slot for slot in set(slots))


def bits(mask: int) -> Iterator[int]:
    """Yield the positions in a bit mask, lowest first; none of :data:`ANY_SLOTS`."""
    while mask > 0:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Iterable[int]) -> int:
    """The positions that are in one of some bit masks."""
    return reduce(or_, masks, 0)


def slot_numbers(mask: int) -> tuple[int, ...]:
    """The slots of a bit mask in ascending order; nothing of :data:`ANY_SLOTS`."""
    return tuple(bits(mask))


def format_slots(slots: Iterable[int]) -> str:
    """Write numbers, such as those of slots, for people: ``0-3``, ``0-1,6``; empty for none."""
    return ",".join(map(format_row, rows_of(slots)))


def read_row(text: str) -> tuple[int, int] | None:
    """The first and the last number of a row as :func:`format_row` writes it; None where the text is none."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not all(each.isascii() and each.isdecimal() and len(each) <= _MOST_DIGITS for each in (first, last)):
        return None
    return int(first), int(last)


def format_row(row: tuple[int, int]) -> str:
    """Write the first and the last number of a row: ``0-3``, ``6``."""
    first, last = row
    return str(first) if first == last else f"{first}-{last}"


def rows_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The rows that numbers form, each as its first and its last one, in order."""
    rows: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if rows and rows[-1][1] == number - 1:
            rows[-1] = rows[-1][0], number
        else:
            rows.append((number, number))
    return rows
