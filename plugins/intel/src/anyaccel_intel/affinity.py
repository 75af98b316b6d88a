"""The grammar of ``ZE_AFFINITY_MASK``, as the Level Zero driver parses it.

A comma list of ``D`` or ``D.S``: number of a device, and of a sub-device (oneapi-src/level-zero-spec
``scripts/core/PROG.rst``). The driver reads numbers like C's ``stoul`` with base 0, so ``0x1`` and ``010`` are numbers
and ``0-3`` is 0; it skips numbers that do not exist, and keeps its own order whatever the order of the list
(intel/compute-runtime ``ExecutionEnvironment::parseAffinityMask``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from anyaccel_intel.layout import Card, Slot

MASK = "ZE_AFFINITY_MASK"
NOTHING = "9999"
"""A device that no machine has: the mask that hides every device. An empty mask would hide none."""
MAX_PARTS = 3
ULONG_MAX = 2**64 - 1


def unset(mask: str | None) -> bool:
    """Whether a value of the variable means the same as none."""
    return mask in (None, "", "default")


def parse(mask: str) -> list[tuple[int, ...]]:
    """Parse a mask into numbers of devices and sub-devices.

    Raises:
        ValueError: When the driver would end the process on this value.
    """
    entries = []
    for text in mask.removesuffix(",").split(","):
        numbers = text.removesuffix(".").split(".")
        if len(numbers) > MAX_PARTS:
            raise ValueError(f"{MASK} must not name more than D.S.C in each entry (got {text!r} in {mask!r})")
        entries.append(tuple(_number(number, mask) for number in numbers))
    return entries


def remaining(mask: str | None, found: Sequence[Card], *, composite: bool) -> list[list[Slot]]:
    """Say which devices the driver shows, each as the tiles that are left of it.

    Args:
        mask: Value of the variable, or None.
        found: The cards in the driver's order.
        composite: Whether the driver counts cards.
    """
    numbered: dict[int, list[Slot]] = {}
    for card in found:
        slots = sorted(card.slots(None))
        numbered.update({card.number: slots} if composite else {card.first + slot[1]: [slot] for slot in slots})
    if unset(mask):
        return list(numbered.values())
    wanted: set[Slot] = set()
    for device, *parts in parse(mask or ""):
        slots = numbered.get(device, [])
        if not parts:
            wanted.update(slots)
        elif composite and len(parts) == 1:  # a third number names a part of a tile, which we do not hand out
            wanted.update(slots[parts[0] : parts[0] + 1])
    left = ([slot for slot in slots if slot in wanted] for slots in numbered.values())
    return [slots for slots in left if slots]


def _number(text: str, mask: str) -> int:
    match = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", text)
    if not match:
        raise ValueError(f"{MASK} must be a comma list of device numbers D or D.S (got {text!r} in {mask!r})")
    digits = match[2]
    number = int(digits, 16 if digits[:2] in ("0x", "0X") else 8 if digits.startswith("0") else 10)
    if number > ULONG_MAX:
        raise ValueError(f"{MASK} must name numbers of 64 bits at most (got {text!r} in {mask!r})")
    return (-number if match[1] == "-" else number) % 2**32  # the driver keeps the low 32 bits
