"""Tenstorrent accelerators for anyaccel: what tt-kmd shows of them, and how tt-umd numbers and masks them."""

import re
from collections.abc import Sequence

from anyaccel.kit import Card, Catalog, Mask, Vendor
from anyaccel.plugin import Device


class Places:
    """How TT_VISIBLE_DEVICES names devices: PCI addresses or parts of them, and indexes of those that have a node."""

    def name(self, device: Device) -> str:
        return str(device.pci_bus_id)

    def fits(self, entry: str) -> bool:
        return re.fullmatch(r"[0-9a-f.]*:[0-9a-f:.]*|\d+", entry) is not None

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        if ":" in entry:
            return [device for device in devices if entry in self.name(device)]
        return [device for device in devices if device.nodes][int(entry) : int(entry) + 1]


class Tenstorrent(Vendor):
    """Grayskull, Wormhole and Blackhole cards."""

    key, resource, kind = "tenstorrent", "TTNPU", "npu"
    brand, driver = "Tenstorrent", "tenstorrent"
    pci_vendors, pci_known = (0x1E52,), True
    catalog = Catalog(__file__)
    exclusive = "the runtime gives a chip to one process"
    unreadable = "reset it with 'tt-smi -r'"  # the processor that manages the chip does not answer
    mask = Mask(
        "TT_VISIBLE_DEVICES",
        Places(),
        unknown="error",
        ordered=False,
        entries="PCI addresses or indexes of devices",
    )

    def look(self, card: Card) -> None:
        for path in card.glob("tenstorrent/tenstorrent!*"):
            node = f"/dev/tenstorrent/{path.rpartition('!')[2]}"
            if card.ctx.node(node):
                card.nodes = (node,)
            else:
                card.blame("its node below /dev/tenstorrent is missing", "pass it to the container with --device")
            card.folders = [path]
            kind = card.read("tt_card_type") or ""
            card.model = f"{self.unknown_model(card)} {kind}".removesuffix("unknown").strip()

    def tags(self, device: Device) -> Sequence[str]:
        card, *others = device.model.split()[::-1]  # such as p150a, Blackhole, Tenstorrent
        return list(dict.fromkeys((card, card.rstrip("abc"), *others)))


plugin = Tenstorrent()
