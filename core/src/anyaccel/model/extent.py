"""How much of a device is held, and where: what the ledger counts and placement subtracts."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable

from anyaccel.model.device import UNITS_PER_DEVICE

TYPE_CHECKING = False  # that of typing, which takes longer to import than the model
if TYPE_CHECKING:
    from typing import NamedTuple

ANY_SLOTS = -1
"""Every slot may be meant: those of a whole device, and of a share whose position nobody knows."""


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


def slot_numbers(mask: int) -> tuple[int, ...]:
    """The slots of a bit mask in ascending order; nothing of :data:`ANY_SLOTS`."""
    return tuple(slot for slot in range(max(0, mask).bit_length()) if mask >> slot & 1)


def format_slots(slots: Iterable[int]) -> str:
    """Write slots for people: ``0-3``, ``0-1,6``; empty for none."""
    runs: list[list[int]] = []
    for slot in sorted(slots):
        if runs and runs[-1][-1] == slot - 1:
            runs[-1][1:] = [slot]
        else:
            runs.append([slot])
    return ",".join("-".join(map(str, run)) for run in runs)
