"""Sets of devices as the bits of an int: bit n is the device at position n."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_


def bits(mask: int) -> Iterator[int]:
    """The positions in a mask, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Iterable[int]) -> int:
    """The positions that are in one of some masks."""
    return reduce(or_, masks, 0)
