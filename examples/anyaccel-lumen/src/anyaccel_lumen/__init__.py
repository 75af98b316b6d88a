"""Lumen, an invented vendor, for anyaccel: what its driver shows, and how its runtime numbers and masks devices."""

import re
from collections.abc import Sequence

from anyaccel.kit import Card, Catalog, Mask, Vendor
from anyaccel.plugin import Device


class Places:
    """How LUMEN_VISIBLE_DEVICES names devices: PCI addresses or parts of them, and indexes of those with a node."""

    def name(self, device: Device) -> str:
        return str(device.pci_bus_id)

    def fits(self, entry: str) -> bool:
        return re.fullmatch(r"[0-9a-f.]*:[0-9a-f:.]*|\d+", entry) is not None

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        if ":" in entry:
            return [device for device in devices if entry in self.name(device)]
        return [device for device in devices if device.nodes][int(entry) : int(entry) + 1]


class Lumen(Vendor):
    """Candle, Lantern and Beacon cards."""

    key, resource, kind = "lumen", "LUX", "npu"
    brand, driver = "Lumen", "lumen"
    pci_vendors, pci_known = (0xFADE,), True
    catalog = Catalog(__file__)
    exclusive = "the runtime gives a chip to one process"
    unreadable = "reset it with 'lumen-tool -r'"  # the processor that manages the chip does not answer
    mask = Mask(
        "LUMEN_VISIBLE_DEVICES",
        Places(),
        unknown="error",
        ordered=False,
        entries="PCI addresses or indexes of devices",
    )

    def read_card(self, card: Card) -> None:
        for path in card.glob("lumen/lumen!*"):
            node = f"/dev/lumen/{path.rpartition('!')[2]}"
            if card.ctx.node(node):
                card.nodes = (node,)
            else:
                card.blame("its node below /dev/lumen is missing", "pass it to the container with --device")
            card.folders = [path]
            kind = card.read("lumen_card_type") or ""
            card.model = f"{self.unknown_model(card)} {kind}".removesuffix("unknown").strip()

    def tags(self, device: Device) -> Sequence[str]:
        card, *others = device.model.split()[::-1]  # such as bc150a, Beacon, Lumen
        return list(dict.fromkeys((card, card.rstrip("abc"), *others)))


plugin = Lumen()
