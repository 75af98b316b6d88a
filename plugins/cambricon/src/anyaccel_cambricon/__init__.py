"""Cambricon accelerators (MLUs) for anyaccel: from the driver's files, masked by card number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.kit import Card, Catalog, Mask, Measures, Tool, Vendor, pairs, text
from anyaccel.plugin import Device, EnvContext, EnvEdits, Fractional, ProbeContext

PROC = "/proc/driver/cambricon/mlus"
NODE = "/dev/cambricon_dev"
UUIDS = 36
"""A value of this length or more with a hyphen is a list of UUIDs."""


def _mask(variable: str) -> Mask:
    """Build a mask by the rules of ``_parse_visible_devices`` (Cambricon/torch_mlu), which follows the runtime."""
    return Mask(
        variable, malformed="stop", unknown="stop", repeated="void", entries="card numbers such as '0,1', not UUIDs"
    )


OWN = _mask("MLU_VISIBLE_DEVICES")
FIRST = _mask("CN_VISIBLE_DEVICES")
"""The variable that wins if set."""

CARD = (
    r"^\|\s*\d+\s+\S+\s+(?P<name>\S+)\s+\S+\s*\|\s*(?P<key>[0-9A-F:]+\.[0-7])\s*\|\s*(?P<busy>\d+%|N/A)\s.*\n"
    r"\|\s*\S+\s+(?P<celsius>\d+C|N/A)\s+(?P<watts>\d+ ?W|N/A)/[^|]*"
    r"\|\s*(?P<used>\d+) MiB/\s*(?P<total>\d+) MiB\s*\|\s*\S+\s+(?P<mode>\S+)\s*\|"
)
"""The two lines of a card in cnmon 5. Its JSON goes into a file of the current directory."""


class Cambricon(Vendor):
    """MLU370 to MLU590. A device's index is the number of its node, as in masks and the vendor's tools."""

    key, resource, kind, brand = "cambricon", "MLU", "mlu", "Cambricon"
    url = "https://github.com/Cambricon/torch_mlu"
    driver, modules = "cambricon-pci-drv", ("cambricon_drv",)
    pci_vendors, virtual_functions = (0xCABC,), False
    control_nodes = ("/dev/cambricon_ctl",)
    catalog = Catalog(__file__)
    mask, variables = OWN, (FIRST.variable,)
    sharing = Fractional.SHARED
    number_name = "card number"
    number_remedy = f"look whether {PROC}/*/information names a device node"
    node_missing = "load the cambricon_drv module again"
    tool = Tool("cnmon", "/usr/bin/cnmon", package="cnmon, which comes with the driver")

    def bound(self, card: Card) -> bool:
        """Return True for a card with a file of the driver; the driver's name on the bus varies."""
        return card.ctx.exists(f"{PROC}/{card.address}/information") or super().bound(card)

    def read_card(self, card: Card) -> None:
        """Read the driver's file: name, node, and serial number, which the dies of a board share."""
        card.folders.append(f"{PROC}/{card.address}")
        told = pairs(card.read("information") or "")
        name = told.get("Device name") or ""
        card.model = "" if name == "mlu-cambricon" else name  # the driver's name of an unknown board
        # The name is exact, where several products share the PCI id.
        card.entry = self.catalog.by_name(card.model) or card.entry
        card.attributes["board_serial"] = told.get("Board Serial Number")
        # The number of the node is the card number of masks and tools.
        match = re.fullmatch(rf"{NODE}(\d+)", told.get("Device inode path") or "")
        if match is None:
            return
        card.number = int(match[1])
        card.nodes = (match[0], f"/dev/cambricon_ipcm{card.number}")
        # A card with MIM instances cannot be opened as a whole.
        if card.ctx.glob(f"/dev/cambricon-caps/cap_dev{card.number}_mi*"):
            card.blame("it is divided into MIM instances, which are not given out", "destroy them to use it whole")

    def driver_version(self, ctx: ProbeContext) -> str:
        """Return the version in the driver's file of any card."""
        # The driver writes its version into each card's file.
        told = (pairs(text(ctx, path)).get("Driver Version") for path in ctx.glob(f"{PROC}/*/information"))
        return next(filter(None, told), None) or super().driver_version(ctx)

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Add memory and compute mode from cnmon, which no file contains."""
        # A card without a number cannot be given out, so cnmon has nothing to add.
        whole = [card for card in cards if card.number is not None]
        rows = self.tool.scan(ctx, CARD) if whole else {}
        if rows is None:
            yield "cnmon is not on the PATH, so memory and compute mode are unknown where the product does not tell"
            return
        for card, row in self.match_rows(whole, rows):
            card.sound = True
            card.model = card.model or row.text("name") or ""
            # 0 means unknown.
            card.memory_bytes = (row.count("total") or 0) << 20 or None
            card.attributes["compute_mode"] = row.text("mode")

    def fractional(self, device: Device) -> Fractional:
        """Return SHARED, or NO for a card in an exclusive compute mode."""
        return Fractional.SHARED if device.attributes.get("compute_mode", "Default") == "Default" else Fractional.NO

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set the mask, and unset the variable that wins over it."""
        return EnvEdits(set={OWN.variable: self.write_mask(devices)}, unset=frozenset({FIRST.variable}))

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read the winning variable. UUIDs are refused: no file maps UUIDs to cards."""
        mask = FIRST if FIRST.variable in environ else OWN
        value = environ.get(mask.variable, "")
        # torch_mlu tells UUIDs from numbers by the length, so a long list with a hyphen is never numbers.
        if "-" in value and len(value) >= UUIDS:
            raise mask.refusal(value)
        return self.read_mask(environ, devices, mask)

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return card numbers for Cambricon's container runtime. A value for none is not known, so none is written."""
        return {"CAMBRICON_VISIBLE_DEVICES": OWN.write(devices)} if devices else {}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask cnmon."""
        return self.measures_by_device(self.tool.scan(ctx, CARD), devices, "used", "busy", "celsius", "watts")


plugin = Cambricon()
