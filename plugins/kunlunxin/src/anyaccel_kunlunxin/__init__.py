"""Kunlunxin accelerators (XPUs) for anyaccel: from PCI, masked by xpu-smi's index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.kit import Card, Catalog, FaultError, Mask, Measures, Row, Tool, Vendor, numbered, text
from anyaccel.plugin import Device, ProbeContext

ADDRESS = r"[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
STATES = ("/proc/kunlun/dev{}/state", "/proc/xpu/dev{}/state")
"""State files of different driver versions: ``RUNNING``, ``NORMAL`` or ``ERROR``."""


def _mask(variable: str) -> Mask:
    """Build a strict mask: the runtime's reading of an order, a repetition or an unknown device is not public."""
    return Mask(variable, strict=True, blanks=False, entries="indexes of xpu-smi such as '0,1', each once")


XPU = _mask("XPU_VISIBLE_DEVICES")
CUDA = _mask("CUDA_VISIBLE_DEVICES")
"""Read by software for P800; the vendor's samples set both variables, always alike."""


class Kunlunxin(Vendor):
    """P800, R300, R200. A device's index is xpu-smi's; the number of its node is another."""

    key, resource, kind, brand = "kunlunxin", "XPU", "xpu", "Kunlunxin"
    url = "https://github.com/baidu/vLLM-Kunlun"
    modules = ("kunlun", "xpu_driver")
    pci_vendors, pci_known, virtual_functions = (0x1D22, 0x2057), True, False
    control_nodes = ("/dev/xpuctrl",)
    catalog = Catalog(__file__)
    mask, alike, borrowed = XPU, (CUDA.variable,), (CUDA.variable,)
    exclusive = "no public text says that several processes may use a Kunlunxin device, or divides one"
    number_name = "xpu-smi index"
    number_remedy = "make 'xpu-smi -m' and 'xpu-smi -q' work"
    registered = False  # only the tool maps nodes to devices
    # Another vendor's tool has the same name, so the full path comes first; it runs only if a device is on PCI.
    tool = Tool("/usr/local/xpu/bin/xpu-smi", "xpu-smi", "xpu_smi", package="the XRE, Kunlunxin's driver package")

    def bound(self, card: Card) -> bool:
        """Blame also a card with two devices, whatever driver is bound."""
        bound = super().bound(card)
        if bound and card.entry and card.entry.facts.get("double"):
            card.blame("it holds two devices, which are not told apart here", "use it without anyaccel")
        return bound

    def rows(self, ctx: ProbeContext) -> dict[str, Row] | None:
        """Return the sections of ``xpu-smi -q`` by PCI address; None if xpu-smi is not installed."""
        # Addresses have a domain of eight digits; the last four are PCI's.
        told = self.tool.sections(ctx, rf"(?i)XPU ({ADDRESS})\s*$", "-q")
        if told is not None and not told:
            raise FaultError("xpu-smi must answer a section 'XPU' for each device", "run 'xpu-smi -q' by hand")
        return None if told is None else {address.lower()[4:]: row for address, row in told.items()}

    def indexes(self, ctx: ProbeContext) -> dict[str, int]:
        """Return indexes by PCI address: the second of many unnamed columns of ``xpu-smi -m``."""
        found = {}
        for line in filter(None, (self.tool.ask(ctx, "-m") or "").splitlines()):
            match = re.match(rf"(?i)({ADDRESS})\s+(\d+)\s", line)
            if match is None:
                reason = f"xpu-smi must answer lines that begin with a PCI address and an index (got {line[:80]!r})"
                raise FaultError(reason, "run 'xpu-smi -m' by hand")
            found[match[1].lower()[4:]] = int(match[2])
        return found

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Ask xpu-smi for indexes, nodes and memory, which no file contains. A single device has the index 0."""
        # The tool lists bound devices only.
        bound = [card for card in cards if card.fault is None]
        nodes = numbered(ctx, "/dev/xpu")
        # With a single device and a single node, both belong together without the tool.
        if len(cards) == len(bound) == len(nodes) == 1:
            self.place(bound[0], 0, next(iter(nodes)))
        rows = self.rows(ctx) if bound else {}
        if rows is None:
            yield "xpu-smi is not on the PATH, so indexes, nodes and memory of the devices are unknown"
            return
        indexes = self.indexes(ctx) if bound else {}
        for card, row in self.match_rows(bound, rows):
            self.place(card, indexes.get(card.address or ""), row.count("Minor Number"))
            card.sound = card.fault is None
            card.model, card.memory_bytes = row.text("Product Name") or "", (row.count("Total") or 0) << 20 or None
            card.attributes |= {"serial": row.text("Serial Number"), "uuid": row.text("XPU UUID")}

    def place(self, card: Card, index: int | None, minor: int | None) -> None:
        """Set the numbers of a device, and check its node and state."""
        card.number, card.attributes["minor"] = index, minor
        if minor is not None:
            card.nodes = (f"/dev/xpu{minor}",)
            card.check_node(card.nodes[0])
        # Both paths are read: an upgraded machine may have either.
        if "ERROR" in (text(card.ctx, path.format(minor)) for path in STATES):
            card.blame("the driver reports its state as ERROR", f"{self.log_hint}, then reset it with xpu-smi")

    def connect(self, ctx: ProbeContext, cards: Sequence[Card]) -> None:
        """Link each half of a board of eight P800: 0 to 3 and 4 to 7 (topology in PaddlePaddle/FastDeploy#2794)."""
        # Only a complete board of eight is known to be wired so.
        if [card.number for card in cards if card.model == "P800 OAM"] == [*range(8)]:
            super().connect(ctx, cards)

    def board(self, card: Card) -> object:
        """Return the half of a board of eight."""
        return card.index // 4

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read both variables, which must agree; a variable that hides everything wins."""
        seen: list[str] | None = None
        for mask in (XPU, CUDA):
            # After an empty first variable the second cannot show anything.
            ids = self.read_mask(environ, devices, mask) if seen != [] else None
            if seen and ids and seen != ids:
                own, other = environ[XPU.variable], environ[CUDA.variable]
                reason = f"{XPU.variable} and {CUDA.variable} must say the same (got {own!r} and {other!r})"
                raise FaultError(reason, "unset one of them")
            seen = seen if ids is None else ids
        return seen

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return indexes for Kunlunxin's container runtime, where ``none`` means no device."""
        return {"CXPU_VISIBLE_DEVICES": XPU.write(devices) or "none"}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask xpu-smi."""
        return self.measures_by_device(self.rows(ctx), devices, "Used", "Xpu", "XPU Current Temp", "Power Draw")


plugin = Kunlunxin()
