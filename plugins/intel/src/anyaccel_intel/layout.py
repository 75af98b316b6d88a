"""How Level Zero numbers cards and tiles.

Cards: discrete ones first, then by PCI address; by PCI address alone with ``ZE_ENABLE_PCI_ID_DEVICE_ORDER=1``
(intel/compute-runtime ``shared/source/execution_environment/execution_environment.cpp``). With
``ZE_FLAT_DEVICE_HIERARCHY=FLAT`` or ``COMBINED`` the numbers count tiles, with ``COMPOSITE`` they count cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anyaccel.plugin import Device

from anyaccel_intel.products import model_of

HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
PCI_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"

Slot = tuple[int, int]
"""A tile: the number of its card, and its number on the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card as the runtime counts it.

    Attributes:
        number: Its number where cards are counted.
        first: The number of its first tile where tiles are counted.
        tiles: How many tiles it has.
        units: The devices of it that are handed out, by tile; the whole card is under None.
    """

    number: int
    first: int
    tiles: int
    units: Mapping[int | None, Device]

    def slots(self, tile: int | None) -> frozenset[Slot]:
        """The tiles that one of the units covers."""
        return frozenset((self.number, each) for each in (range(self.tiles) if tile is None else (tile,)))


def cards(devices: Sequence[Device], *, pci_order: bool) -> list[Card]:
    """Group devices by card, in the order of the runtime.

    Args:
        devices: All devices of the machine.
        pci_order: Whether cards are ordered by PCI address alone.
    """
    groups: dict[str, list[Device]] = {}
    for device in sorted(devices, key=lambda device: device.index):
        groups.setdefault(_card_key(device, groups), []).append(device)
    by_address = all(device.pci_bus_id for device in devices)

    def rank(group: list[Device]) -> tuple[bool, bool, str, int]:
        head = group[0]
        unseen = head.attributes.get("level_zero") is False
        integrated = head.attributes.get("integrated") is True and not pci_order
        return unseen, integrated, (head.pci_bus_id or "") if by_address else "", head.index

    found: list[Card] = []
    first = 0
    ordered = sorted(groups.values(), key=rank)
    # Integrated GPUs that are not listed still take the first numbers where the PCI address alone decides.
    ahead = max((int(group[0].attributes.get("unlisted_ahead", 0)) for group in ordered), default=0) * pci_order
    for number, group in enumerate(ordered, ahead):
        tiles = int(group[0].attributes.get("tiles", 1))
        units = dict(_units(group))
        found.append(Card(number=number, first=first + ahead, tiles=tiles, units=units))
        first += tiles
    return found


def units(found: Sequence[Card]) -> list[tuple[Card, int | None, Device]]:
    """The devices of some cards in the order in which the runtime numbers them."""
    return [
        (card, tile, device)
        for card in found
        for tile, device in sorted(card.units.items(), key=lambda item: -1 if item[0] is None else item[0])
    ]


def pci_ordered(environ: Mapping[str, str]) -> bool:
    """Whether an environment asks for the order by PCI address alone. The driver reads a number, as C's ``atoi``."""
    text = environ.get(PCI_ORDER, "").strip()
    return text.isascii() and text.isdigit() and text.strip("0") != ""


def composite(environ: Mapping[str, str], devices: Sequence[Device]) -> bool:
    """Whether cards are counted rather than tiles. Tiles are, by default, on the Max series alone."""
    chosen = environ.get(HIERARCHY, "")
    if chosen in ("COMPOSITE", "COMBINED", "FLAT"):
        return chosen == "COMPOSITE"
    return not any(divisible(device) and is_max(device) for device in devices)


def divisible(device: Device) -> bool:
    """Whether a device is, or is a part of, a card of several tiles."""
    return int(device.attributes.get("tiles", 1)) > 1


def is_max(device: Device) -> bool:
    """Whether a device is of the Data Center GPU Max series."""
    model = model_of(device)
    return model is not None and model.tag.startswith("Intel-GPU-Max-")


def _card_key(device: Device, groups: dict[str, list[Device]]) -> str:
    if device.attributes.get("unit") != "tile":
        return device.id
    if device.parent:
        return device.parent
    # Simulated tiles do not know their card: neighbors make one.
    last = next(reversed(groups), "")
    tiles = int(device.attributes.get("tiles", 1))
    return last if last.startswith("tiles of ") and len(groups[last]) < tiles else f"tiles of {device.id}"


def _units(group: Sequence[Device]) -> list[tuple[int | None, Device]]:
    if group[0].attributes.get("unit") != "tile":
        return [(None, group[0])]
    return [(int(device.attributes.get("tile", position)), device) for position, device in enumerate(group)]
