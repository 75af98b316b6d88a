"""Kunlunxin accelerators (XPUs) for anyaccel: found on PCI, named by the index that xpu-smi tells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from anyaccel.kit import Card, Catalog, FaultError, Mask, Measures, Row, Tool, Vendor, numbered, text
from anyaccel.plugin import Device, ProbeContext

ADDRESS = r"[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
STATES = ("/proc/kunlun/dev{}/state", "/proc/xpu/dev{}/state")
"""Files in which drivers of different ages tell ``RUNNING``, ``NORMAL`` or ``ERROR``."""


def _mask(variable: str) -> Mask:
    """How the runtime takes an order, a repetition or an unknown device is not public: such a list is refused."""
    return Mask(variable, strict=True, blanks=False, entries="indexes of xpu-smi such as '0,1', each once")


XPU = _mask("XPU_VISIBLE_DEVICES")
CUDA = _mask("CUDA_VISIBLE_DEVICES")
"""What software for P800 looks at; the vendor's samples set both variables, always alike."""


class Kunlunxin(Vendor):
    """P800, R300, R200. The index of a device is that of xpu-smi; the number of its node is another one."""

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
    registered = False  # the tool alone tells which node is whose
    # Another vendor's tool has the same name, so the place comes first; it is asked only where a device is on PCI.
    tool = Tool("/usr/local/xpu/bin/xpu-smi", "xpu-smi", "xpu_smi", package="the XRE, Kunlunxin's driver package")

    def bound(self, card: Card) -> bool:
        """Blame also a card that cannot be given out whatever has it."""
        bound = super().bound(card)
        if bound and card.entry and card.entry.facts.get("double"):
            card.blame("it holds two devices, which are not told apart here", "use it without anyaccel")
        return bound

    def rows(self, ctx: ProbeContext) -> dict[str, Row] | None:
        """What ``xpu-smi -q`` says, by PCI address; None where it is not installed."""
        told = self.tool.sections(ctx, rf"(?i)XPU ({ADDRESS})\s*$", "-q")
        if told is not None and not told:
            raise FaultError("xpu-smi must answer a section 'XPU' for each device", "run 'xpu-smi -q' by hand")
        return None if told is None else {address.lower()[4:]: row for address, row in told.items()}

    def indexes(self, ctx: ProbeContext) -> dict[str, int]:
        """Indexes by PCI address: the second of the many columns of ``xpu-smi -m``, which have no names."""
        found = {}
        for line in filter(None, (self.tool.ask(ctx, "-m") or "").splitlines()):
            match = re.match(rf"(?i)({ADDRESS})\s+(\d+)\s", line)
            if match is None:
                reason = f"xpu-smi must answer lines that begin with a PCI address and an index (got {line[:80]!r})"
                raise FaultError(reason, "run 'xpu-smi -m' by hand")
            found[match[1].lower()[4:]] = int(match[2])
        return found

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Ask xpu-smi for indexes, nodes and memory, which no file tells. A device that is alone has the index 0."""
        bound = [card for card in cards if card.fault is None]
        nodes = numbered(ctx, "/dev/xpu")
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
        """Take over the numbers of a device, and look at its node and its state."""
        card.number, card.attributes["minor"] = index, minor
        if minor is not None:
            card.nodes = (f"/dev/xpu{minor}",)
            card.check_node(card.nodes[0])
        if "ERROR" in (text(card.ctx, path.format(minor)) for path in STATES):
            card.blame("the driver reports its state as ERROR", f"{self.log_hint}, then reset it with xpu-smi")

    def connect(self, ctx: ProbeContext, cards: Sequence[Card]) -> None:
        """Link each half of a board of eight P800: 0 to 3 and 4 to 7 (topology in PaddlePaddle/FastDeploy#2794)."""
        if [card.number for card in cards if card.model == "P800 OAM"] == [*range(8)]:
            super().connect(ctx, cards)

    def board(self, card: Card) -> object:
        """Which half of such a board."""
        return card.index // 4

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Both variables must say the same; one that hides everything does, whatever the other says."""
        seen: list[str] | None = None
        for mask in (XPU, CUDA):
            ids = self.read_mask(environ, devices, mask) if seen != [] else None
            if seen and ids and seen != ids:
                own, other = environ[XPU.variable], environ[CUDA.variable]
                reason = f"{XPU.variable} and {CUDA.variable} must say the same (got {own!r} and {other!r})"
                raise FaultError(reason, "unset one of them")
            seen = seen if ids is None else ids
        return seen

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Indexes for Kunlunxin's container runtime, to which ``none`` means no device."""
        return {"CXPU_VISIBLE_DEVICES": XPU.write(devices) or "none"}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask xpu-smi."""
        return self.measures_by_device(self.rows(ctx), devices, "Used", "Xpu", "XPU Current Temp", "Power Draw")


plugin = Kunlunxin()
