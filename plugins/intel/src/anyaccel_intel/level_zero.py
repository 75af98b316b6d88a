"""Level Zero's numbers of GPUs and tiles, and the variables that choose among them.

Discrete cards come first, then PCI address counts; PCI address alone with ``ZE_ENABLE_PCI_ID_DEVICE_ORDER=1``
(intel/compute-runtime ``shared/source/execution_environment/execution_environment.cpp``). With
``ZE_FLAT_DEVICE_HIERARCHY=FLAT`` or ``COMBINED`` numbers count tiles, with ``COMPOSITE`` cards.

``ZE_AFFINITY_MASK`` is a comma list of ``D`` or ``D.S``: number of a device, and of a sub-device
(oneapi-src/level-zero-spec ``scripts/core/PROG.rst``). The driver reads numbers like C's ``stoul`` with base 0, so
``0x1`` and ``010`` are numbers and ``0-3`` is 0; it skips numbers that do not exist, and keeps its own order whatever
the order of the list (intel/compute-runtime ``ExecutionEnvironment::parseAffinityMask``). SYCL's selector works on the
devices left by the mask, renumbered. Variables beside the mask fix numbers and order, so the mask means the same in the
worker as here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from anyaccel.kit import FaultError, c_integer
from anyaccel.plugin import Device, EnvContext, EnvEdits

from anyaccel_intel import selector

MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
PCI_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
NOTHING = "9999"
"""A number beyond any machine: this mask hides every device. An empty mask would hide none."""
MAX_PARTS = 3
ULONG_MAX = 2**64 - 1

Slot = tuple[int, int]
"""A tile: number of the card, and number on the card."""


class Root(NamedTuple):
    """A card as the runtime counts it."""

    number: int  # where cards are counted
    first: int  # number of its first tile where tiles are counted
    tiles: int
    units: Mapping[int | None, Device]  # devices by tile, in the runtime's order; None is the whole card

    def slots(self, tile: int | None) -> frozenset[Slot]:
        """Return the tiles of a device."""
        return frozenset((self.number, each) for each in (range(self.tiles) if tile is None else (tile,)))


def pci_ordered(environ: Mapping[str, str]) -> bool:
    """Return True if an environment asks for the order by PCI address alone.

    The driver reads a number, as C's ``atoi``.
    """
    # "0", "00" and words are all off.
    text = environ.get(PCI_ORDER, "").strip()
    return text.isascii() and text.isdigit() and text.strip("0") != ""


def composite(environ: Mapping[str, str], divided: Iterable[str]) -> bool:
    """Return True if cards are counted rather than tiles. By default, only Max cards are counted by tile.

    ``divided`` are the models of cards with several tiles.
    """
    chosen = environ.get(HIERARCHY, "")
    # Other words, and lower case, are ignored by the driver.
    if chosen in ("COMPOSITE", "COMBINED", "FLAT"):
        return chosen == "COMPOSITE"
    return not any(map(is_max, divided))


def is_max(model: str) -> bool:
    """Return True for a model of the Data Center GPU Max series."""
    return "Data Center GPU Max" in model


def masked(environ: Mapping[str, str]) -> bool:
    """Return True if an environment has a mask in effect."""
    return environ.get(MASK) not in (None, "", "default")


def edits(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Make a worker see exactly these devices, in the runtime's order: masks cannot change the order."""
    everything = ctx.devices or tuple(devices)
    ordered = [device.id for root in _roots(everything, pci_order=False) for device in root.units.values()]
    # The worker must count as detection did; a launcher may have changed the order since.
    pci_order = ordered != [device.id for device in sorted(everything, key=lambda device: device.index)]
    variables = mask(devices, everything, pci_order=pci_order, combined=ctx.environ.get(HIERARCHY) == "COMBINED")
    _, shown = _find_visible(variables, everything)
    rival = selector.replacement(ctx.environ, [len(slots) for slots in shown])
    return EnvEdits(set=variables | ({selector.SELECTOR: rival} if rival else {}))


def mask(
    devices: Sequence[Device], everything: Sequence[Device], *, pci_order: bool = False, combined: bool = False
) -> dict[str, str]:
    """Return the mask for devices among the driver's devices, with variables that fix its numbers.

    Args:
        devices: The devices.
        everything: Every device of the driver.
        pci_order: Whether cards are ordered by PCI address alone.
        combined: Whether tiles stay reachable from their cards.
    """
    ids = {device.id for device in devices}
    roots = _roots(everything, pci_order=pci_order)
    whole = any(None in root.units and root.tiles > 1 for root in roots)
    entries: list[str] = []
    for root in roots:
        for tile in (tile for tile, device in root.units.items() if device.id in ids):
            part = "" if tile is None else f".{tile}"
            # With whole cards in the inventory the mask counts cards, else tiles.
            entries.append(f"{root.number}{part}" if whole else str(root.first + (tile or 0)))
    variables = {MASK: ",".join(entries) or NOTHING, PCI_ORDER: str(int(pci_order))}
    if any(root.tiles > 1 for root in roots):
        variables[HIERARCHY] = "COMPOSITE" if whole else "COMBINED" if combined else "FLAT"
    return variables


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Return the devices with every tile visible in an environment.

    Raises:
        FaultError: The driver or the SYCL runtime would refuse a value.
    """
    if not masked(environ) and selector.SELECTOR not in environ:
        return None
    roots, shown = _find_visible(environ, devices)
    if selector.SELECTOR in environ and shown:
        chosen = selector.admitted(environ[selector.SELECTOR], [len(slots) for slots in shown], environ=environ)
        shown = [shown[position] if part is None else [shown[position][part]] for position, part in chosen]
    slots = {slot for each in shown for slot in each}
    return [device.id for root in roots for tile, device in root.units.items() if root.slots(tile) <= slots]


def parse(value: str) -> list[tuple[int, ...]]:
    """Parse a mask into numbers of devices and sub-devices.

    Raises:
        FaultError: The driver would end the process on this value.
    """
    entries = []
    for text in value.removesuffix(",").split(","):
        numbers = text.removesuffix(".").split(".")
        # The third level is a compute slice; the driver refuses a fourth.
        if len(numbers) > MAX_PARTS:
            raise _refusal("not name more than D.S.C in each entry", text, value)
        entries.append(tuple(_number(number, value) for number in numbers))
    return entries


def _number(text: str, value: str) -> int:
    match = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", text)
    if not match:
        raise _refusal("be a comma list of device numbers D or D.S", text, value)
    number = c_integer(match[2])
    if number > ULONG_MAX:
        raise _refusal("name numbers of 64 bits at most", text, value)
    return (-number if match[1] == "-" else number) % 2**32  # the driver keeps the low 32 bits


def _refusal(rule: str, text: str, value: str) -> FaultError:
    return FaultError(f"{MASK} must {rule} (got {text!r} in {value!r})", f"unset {MASK}, or name devices such as 0,1")


def _find_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[list[Root], list[list[Slot]]]:
    """Return the cards in the driver's order, and the visible devices, each as its remaining tiles."""
    roots = _roots(devices, pci_order=pci_ordered(environ))
    by_card = composite(environ, (device.model for device in devices if _tiles(device) > 1))
    numbered: dict[int, list[Slot]] = {}
    for root in roots:
        slots = sorted(root.slots(None))
        numbered.update({root.number: slots} if by_card else {root.first + slot[1]: [slot] for slot in slots})
    if not masked(environ):
        return roots, list(numbered.values())
    wanted: set[Slot] = set()
    for device, *parts in parse(environ[MASK]):
        slots = numbered.get(device, [])
        if not parts:
            wanted.update(slots)
        elif by_card and len(parts) == 1:  # a third number names a part of a tile, which we do not hand out
            wanted.update(slots[parts[0] : parts[0] + 1])
    left = ([slot for slot in slots if slot in wanted] for slots in numbered.values())
    return roots, [slots for slots in left if slots]


def _roots(devices: Sequence[Device], *, pci_order: bool) -> list[Root]:
    """Group devices by card, in the order of the runtime."""
    groups: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: device.index):
        groups.setdefault(_card_of(device, groups), []).append(device)
    by_address = all(device.pci_bus_id for device in devices)

    def rank(group: list[Device]) -> tuple[bool, bool, str, int]:
        head = group[0]
        unseen = head.attributes.get("level_zero") is False
        integrated = head.attributes.get("integrated") is True and not pci_order
        return unseen, integrated, (head.pci_bus_id or "") if by_address else "", head.index

    ordered = sorted(groups.values(), key=rank)
    # By PCI address alone, integrated GPUs take the first numbers, listed or not.
    ahead = max((int(group[0].attributes.get("unlisted_ahead", 0)) for group in ordered), default=0) * pci_order
    found: list[Root] = []
    first = ahead
    for number, group in enumerate(ordered, ahead):
        tiles = _tiles(group[0])
        found.append(Root(number, first, tiles, _units(group)))
        first += tiles
    return found


def _tiles(device: Device) -> int:
    return int(device.attributes.get("tiles", 1))


def _card_of(device: Device, groups: dict[str, list[Device]]) -> str:
    if device.attributes.get("unit") != "tile":
        return device.id
    if device.parent:
        return device.parent
    # Simulated tiles do not know their card: neighbors make one.
    # A group is full once it has all tiles of its model.
    last = next(reversed(groups), "")
    return last if last.startswith("tiles of ") and len(groups[last]) < _tiles(device) else f"tiles of {device.id}"


def _units(group: Sequence[Device]) -> dict[int | None, Device]:
    if group[0].attributes.get("unit") != "tile":
        return {None: group[0]}
    return {int(device.attributes.get("tile", position)): device for position, device in enumerate(group)}
