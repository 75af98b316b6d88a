"""Tenstorrent accelerators for anyaccel: from tt-kmd's files, numbered and masked as in tt-umd."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import PCI_DEVICES, Card, Catalog, Mask, Measures, Numbers, Vendor, in_container, number, text, warn
from anyaccel.plugin import Detected, Device, DeviceProcess, EnvContext, EnvEdits, Finding, Mount, ProbeContext, Term

VARIABLE = "TT_VISIBLE_DEVICES"
OLDER = ("TT_METAL_VISIBLE_DEVICE", "TT_METAL_VISIBLE_DEVICES")
HUGE_PAGES = "/dev/hugepages-1G"


class Places:
    """PCI addresses or parts of addresses, and positions in the order of addresses (tt-umd, ``pci_device.cpp``)."""

    def name(self, device: Device) -> str:
        """Return the whole address, which means the same device in any release of tt-umd."""
        return str(device.pci_bus_id)

    def fits(self, entry: str) -> bool:
        """Return True if an entry is a number, or hexadecimal digits with a colon or a dot."""
        return re.fullmatch(r"\d{1,9}|[0-9a-fA-F]*[.:][0-9a-fA-F.:]*", entry, re.ASCII) is not None

    def find(self, entry: str, devices: Sequence[Device]) -> Sequence[Device]:
        """Return every device with the text in its address, in lower case as in sysfs; or the device at a position."""
        if entry.isdecimal():
            return [device for device in devices if device.index == int(entry)]
        return [device for device in devices if entry in self.name(device)]


ADDRESSES = Mask(
    VARIABLE,
    Places(),
    blank="skip",
    unknown="error",
    ordered=False,
    entries="PCI addresses, parts of them, or positions of devices that are here",
)
POSITIONS = Mask(VARIABLE, Numbers(), ordered=False)
"""Written for a request with ``mask="index"``: before tt-umd 0.9.3 indexes were numbers of nodes."""


class Tenstorrent(Vendor):
    """Grayskull, Wormhole and Blackhole.

    A device is a chip on PCI: the second chip of an n300 is reached through the first and comes with it. Its index is
    its position among the chips with a node here, by PCI address, as tt-umd numbers them. The number of the node
    changes when chips are reset. No node is opened, since opening raises the power state.
    """

    key, resource, kind, brand, driver = "tenstorrent", "TTNPU", "npu", "Tenstorrent", "tenstorrent"
    url = "https://docs.tenstorrent.com"
    pci_vendors, pci_known, catalog, mask = (0x1E52,), True, Catalog(__file__), ADDRESSES
    ray_switch = "RAY_EXPERIMENTAL_NOSET_TENSTORRENT_VISIBLE_DEVICES"
    exclusive = "the runtime locks a chip for one process, and a second one waits without limit"
    number_name, number_remedy = "position among the chips that may be opened here", "look for tenstorrent in 'dmesg'"
    unreadable = "the processor that manages the chip does not answer: reset it with 'tt-smi -r' and its PCI address"

    def read_card(self, card: Card) -> None:
        """Find the node, and the firmware's facts about the card."""
        for path in card.glob("tenstorrent/tenstorrent!*"):
            if (node := path.rpartition("!")[2]).isdecimal():
                card.nodes, card.folders = (f"/dev/tenstorrent/{node}",), [path]
                # Firmware may report "unknown", which is no name.
                card.model = (card.read("tt_card_type") or "").replace("unknown", "")
                card.attributes |= {"board": card.read("tt_serial"), "asic_id": card.read("tt_asic_id")}
                card.attributes["firmware"] = card.read("tt_fw_bundle_ver")
                card.attributes["huge_pages"] = HUGE_PAGES if card.ctx.is_dir(HUGE_PAGES) else None

    def arrange(self, cards: list[Card]) -> None:
        """Number the chips whose node may be opened here, in the order of PCI addresses."""
        # tt-umd 0.9.14 counts the nodes that it can open, not the functions in sysfs.
        nodes = {card.address: card.ctx.node(card.nodes[0]) for card in cards if card.nodes}
        here = [card for card in cards if (node := nodes.get(card.address)) and node.readable and node.writable]
        for place, card in enumerate(here):
            card.number = place
        super().arrange(cards)

    def connect(self, ctx: ProbeContext, cards: Sequence[Card]) -> None:
        """Link the chips of a board, and name the board as their parent."""
        super().connect(ctx, cards)
        for card in cards:
            board = self.board(card)
            if card.links or (board and card.entry and "chips" in card.entry.facts):
                card.parent = f"{self.key}-board-{board}"

    def board(self, card: Card) -> object:
        """Return the serial number, shared by a board, or a tray of a Galaxy."""
        return card.attributes.get("board")

    def tags(self, device: Device) -> Sequence[str]:
        """Leave out the card type that is also a GPU of another vendor."""
        return tuple(name for name in super().tags(device) if name != "p100")

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Require both chips of a p300: tt-umd opens such a board as a whole, or refuses half of it."""
        for device in devices:
            entry = self.entry(device)
            chips = entry.facts.get("chips", 1) if entry else 1
            # Only boards with "chips" in the catalog are opened as a whole.
            if device.parent and sum(other.parent == device.parent for other in devices) < chips:
                return f"{device.id} is one of {chips} chips of a board, which is opened whole; ask for {chips}"
        return super().validate(request, devices)

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Write PCI addresses; positions only for ``mask="index"``."""
        mask = POSITIONS if ctx.mask == "index" else ADDRESSES
        return EnvEdits(set={VARIABLE: self.write_mask(devices, mask)})

    def mounts(self, devices: Sequence[Device]) -> Iterable[Mount]:
        """Return huge pages, if the machine has them: without an IOMMU the driver transfers data through them."""
        paths = {str(path) for device in devices if (path := device.attributes.get("huge_pages"))}
        return [Mount(source=path, target=path, read_only=False) for path in sorted(paths)]

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures]:
        """Read the sensors of hwmon. Load and memory in use are unknown without opening the chip."""
        return {device.id: _sensors(ctx, f"{PCI_DEVICES}/{device.pci_bus_id}/hwmon/hwmon*") for device in devices}

    def processes(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, tuple[DeviceProcess, ...] | None]:
        """Use the driver's own list if the scan is not complete; not in a container, which has other process ids."""
        found = dict(super().processes(ctx, devices))
        for device in devices:
            if found.get(device.id) is None and device.nodes and not in_container(ctx):
                path = f"/proc/driver/tenstorrent/{device.nodes[0].rpartition('/')[2]}/pids"
                told = text(ctx, path).split()
                # The file may be readable and empty: an idle chip, or no permission.
                if told and all(map(str.isdecimal, told)):
                    found[device.id] = tuple(DeviceProcess(pid=pid) for pid in sorted({*map(int, told)}))
        return found

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on chips that were too hot, and misleading variables."""
        for device in detected.devices:
            for path in ctx.glob(f"{PCI_DEVICES}/{device.pci_bus_id}/tenstorrent/*/tt_therm_trip_count"):
                if trips := number(ctx, path):
                    yield warn(f"{device.id} has shut down {trips} times because of heat", "look at fans and airflow")
        # A number alone; digits within an address are no position.
        if re.search(r"(^|,)\s*\d+\s*(,|$)", ctx.environ.get(VARIABLE, "")):
            reason = f"numbers in {VARIABLE} are positions by PCI address, and before tt-umd 0.9.3 those of nodes"
            yield warn(reason, "write PCI addresses")
        for name in OLDER:
            if name in ctx.environ:
                yield warn(f"{name} is read by older releases of tt-metal, and not written", f"use {VARIABLE}")


def _sensors(ctx: ProbeContext, folder: str) -> Measures:
    """Read temperature and power, in thousandths of a degree and millionths of a watt (hwmon of the kernel)."""
    told = {name: [number(ctx, path) for path in ctx.glob(f"{folder}/{name}1_input")] for name in ("temp", "power")}
    millidegrees, microwatts = (next(iter(values), None) for values in told.values())
    return {
        "temperature_celsius": None if millidegrees is None else millidegrees / 1000,
        "power_watts": None if microwatts is None else microwatts / 1_000_000,
    }


plugin = Tenstorrent()
