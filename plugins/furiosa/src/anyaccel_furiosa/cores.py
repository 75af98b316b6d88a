"""The variable ``FURIOSA_DEVICES``: cards and cores as in furiosa-ai/device-api (``src/config``), and as in Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from anyaccel.kit import Mask
from anyaccel.plugin import Device, Share, VisiblePart

FUSED = (1, 2, 4)
"""Cores of a partition: ``cur_pe_ids`` lists 0 to 7, 0-1, 2-3, 4-5, 6-7, 0-3 and 4-7 (furiosa-ai/device-api, tests)."""
CORES = r"(\d{1,2})(?:-(\d{1,2}))?"
ENTRY = re.compile(rf"(?:npu:)?(\d{{1,3}})(?::(?:{CORES}|\*))?|npu(\d{{1,3}})pe{CORES}", re.ASCII)


class Cores(Mask):
    """``npu:0`` is a card, ``npu:0:1`` a core, ``npu:0:0-3`` four fused cores, ``npu0pe0-3`` the old form.

    Ray also reads ``0``. A missing or repeated card or core stops the runtime. ``warboy(2)*1`` leaves the choice to the
    runtime, so its effect is unknown: it is refused.
    """

    def write_shares(self, devices: Sequence[Device], shares: Mapping[str, Share]) -> str:
        """Return the value for devices: of shares their cores, in the largest partitions."""
        slots = [(card.index, shares[card.id].slots if card.id in shares else ()) for card in devices]
        return ",".join(f"npu:{number}{cores}" for number, own in slots for cores in _cut(own)) or self.nothing

    def read_shares(self, environ: Mapping[str, str], devices: Sequence[Device]) -> list[str | VisiblePart] | None:
        """Return the devices, or cores of devices, left by the variable; None if it hides none."""
        value = environ.get(self.variable)
        if value is None:
            return None
        if value.strip() in ("", self.nothing):  # the effect of "" is not published; only narrowing is safe
            return []
        by_number = {device.index: device for device in devices}
        found: dict[int, list[int]] = {}
        for part in value.split(","):
            match = ENTRY.fullmatch(part.strip())
            number, *ends = (int(group) for group in match.groups() if group is not None) if match else (-1,)
            cores = _cores(by_number[number].slots, ends) if number in by_number else []
            if not cores or not {*cores}.isdisjoint(found.setdefault(number, [])):
                raise self.refusal(value)
            found[number] += cores
        return [
            card.id if len(cores) == card.slots else VisiblePart(id=card.id, slots=tuple(sorted(cores)))
            for card, cores in ((by_number[number], cores) for number, cores in found.items())
        ]


MASK = Cores(
    "FURIOSA_DEVICES",
    nothing="npu:255",  # no value for "none" is documented; a missing device stops the runtime
    entries="devices and cores that are here, each once, such as 'npu:0,npu:1:0-3'",
)


def _cut(slots: Sequence[int]) -> Iterator[str]:
    """Cut cores into partitions: ``:0-3``, ``:4``; only the card itself for its whole."""
    left, names = {*slots}, {}
    # Largest first, so that a half card is one partition and not two.
    for size in sorted(FUSED, reverse=True):
        for first in range(0, max(slots, default=-1) + 1, size):
            if left.issuperset(cores := range(first, first + size)):
                left -= {*cores}
                names[first] = f":{first}-{cores[-1]}" if size > 1 else f":{first}"
    yield from (names[first] for first in sorted(names)) if names else [""]


def _cores(count: int, ends: Sequence[int]) -> list[int]:
    """Return the cores of an entry: every core, a single core, or a partition; empty for an invalid partition."""
    first, last = (ends[0], ends[-1]) if ends else (0, count - 1)
    size = last - first + 1
    # Fused cores are aligned: 2-3 exists, 1-2 does not.
    exists = last < count and (size == count or (size in FUSED and not first % size))
    return list(range(first, last + 1)) if exists else []
