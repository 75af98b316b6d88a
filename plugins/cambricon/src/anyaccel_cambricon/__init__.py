"""Cambricon accelerators (MLUs) for anyaccel: found in the driver's files, named by card number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.kit import Card, Catalog, FaultError, Mask, Measures, Row, Tool, Vendor, pairs, text
from anyaccel.plugin import Device, EnvContext, EnvEdits, Fractional, ProbeContext

PROC = "/proc/driver/cambricon/mlus"
NODE = "/dev/cambricon_dev"
UUIDS = 36
"""From this length on, a value with a hyphen in it is a list of UUIDs."""


def _mask(variable: str) -> Mask:
    """The rules of ``_parse_visible_devices`` (Cambricon/torch_mlu), which follows the runtime by its own words."""
    return Mask(
        variable, malformed="stop", unknown="stop", repeated="void", entries="card numbers such as '0,1', not UUIDs"
    )


OWN = _mask("MLU_VISIBLE_DEVICES")
FIRST = _mask("CN_VISIBLE_DEVICES")
"""Wins where it is set."""

CARD = re.compile(
    r"^\|\s*\d+\s+\S+\s+(?P<name>\S+)\s+\S+\s*\|\s*(?P<bus>[0-9A-Fa-f:]+\.[0-7])\s*\|\s*(?P<busy>\d+%|N/A)\s.*\n"
    r"\|\s*\S+\s+(?P<celsius>\d+C|N/A)\s+(?P<watts>\d+ ?W|N/A)/[^|]*"
    r"\|\s*(?P<used>\d+) MiB/\s*(?P<total>\d+) MiB\s*\|\s*\S+\s+(?P<mode>\S+)\s*\|",
    re.MULTILINE,
)
"""The two lines that cnmon 5 prints of a card. Its JSON goes into a file of the directory that it is started in."""


class Cambricon(Vendor):
    """MLU370 to MLU590. The number of a card's node is its index, as in the masks and the vendor's tools."""

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
        """A card of which the driver shows a file is its own, whatever the driver is called on the bus."""
        return card.ctx.exists(f"{PROC}/{card.address}/information") or super().bound(card)

    def read_card(self, card: Card) -> None:
        """Read what the driver says: name, node and serial number, which the dies of a board share."""
        card.folders.append(f"{PROC}/{card.address}")
        told = pairs(card.read("information") or "")
        name = told.get("Device name") or ""
        card.model = "" if name == "mlu-cambricon" else name  # the driver's word for a board that it does not know
        card.entry = self.catalog.by_name(card.model) or card.entry
        card.attributes["board_serial"] = told.get("Board Serial Number")
        match = re.fullmatch(rf"{NODE}(\d+)", told.get("Device inode path") or "")
        if match is None:
            return
        card.number = int(match[1])
        card.nodes = (match[0], f"/dev/cambricon_ipcm{card.number}")
        if card.ctx.glob(f"/dev/cambricon-caps/cap_dev{card.number}_mi*"):
            card.blame("it is divided into MIM instances, which are not given out", "destroy them to use it whole")

    def driver_version(self, ctx: ProbeContext) -> str:
        """Version that the driver tells with each card."""
        told = (pairs(text(ctx, path)).get("Driver Version") for path in ctx.glob(f"{PROC}/*/information"))
        return next(filter(None, told), None) or super().driver_version(ctx)

    def rows(self, ctx: ProbeContext) -> dict[str, Row] | None:
        """What cnmon shows, by PCI address; None where it is not installed."""
        table = self.tool.ask(ctx)
        if table is None:
            return None
        found = {match["bus"].lower(): match.groupdict() for match in CARD.finditer(table)}
        if not found:
            raise FaultError("cnmon must print its table of cards with their PCI addresses", "run 'cnmon' by hand")
        return {
            bus: Row("cnmon", bus, {k: None if v == "N/A" else v for k, v in row.items()}) for bus, row in found.items()
        }

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Take memory and compute mode from cnmon: no file tells them."""
        whole = [card for card in cards if card.number is not None]
        rows = self.rows(ctx) if whole else {}
        if rows is None:
            yield "cnmon is not on the PATH, so memory and compute mode are unknown where the product does not tell"
            return
        for card, row in self.match_rows(whole, rows):
            card.sound = True
            card.model = card.model or row.text("name") or ""
            card.memory_bytes = (row.count("total") or 0) << 20 or None
            card.attributes["compute_mode"] = row.text("mode")

    def fractional(self, device: Device) -> Fractional:
        """Several processes may use a card, unless its compute mode is another one."""
        return Fractional.SHARED if device.attributes.get("compute_mode", "Default") == "Default" else Fractional.NO

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """The runtime looks at the mask only where the first variable is not there at all."""
        return EnvEdits(set={OWN.variable: self.write_mask(devices)}, unset=frozenset({FIRST.variable}))

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read the variable that wins. UUIDs mean cards that no file tells, so they are refused."""
        mask = FIRST if FIRST.variable in environ else OWN
        value = environ.get(mask.variable, "")
        if "-" in value and len(value) >= UUIDS:
            raise mask.refusal(value)
        return self.read_mask(environ, devices, mask)

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Card numbers for Cambricon's container runtime; no value for none is known, so none is written."""
        return {"CAMBRICON_VISIBLE_DEVICES": OWN.write(devices)} if devices else {}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask cnmon."""
        return self.measures_by_device(self.rows(ctx), devices, "used", "busy", "celsius", "watts")


plugin = Cambricon()
