"""Moore Threads GPUs for anyaccel: from PCI and sysfs, masked for MUSA."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from anyaccel.kit import Card, Catalog, Mask, Measures, Tool, Vendor, text, warn
from anyaccel.plugin import Detected, Device, Finding, Fractional, ProbeContext

CUDA = "CUDA_VISIBLE_DEVICES"
"""Copied to MUSA's variable and back by some frameworks; not read by the runtime."""
CONTAINER_DEVICES = "MTHREADS_VISIBLE_DEVICES"
"""Indexes, read by the container runtime alone."""
MEMORY = "/proc/driver/musa/gpu*"
# 'mthreads-gmi -q --json' exists, and the vendor does not document its keys. Programs that read it disagree: "GPU" with
# "PCI" and "Bus ID", or "Attached GPUs" by address. This table is that of captured output.
# 0    MTT S5000            |00000000:2a:00.0    |0%    66641MiB(81920MiB)
#      Physical      P0     |16x(16x)            |52C   YES
TABLE = (
    r"^\s*(?P<index>\d+)\s+(?P<name>MTT\s\S.*?)\s*\|\s*(?:[0-9a-f]{4})?(?P<key>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
    r"\s*\|\s*(?P<busy>\d+|N/A)%?\s+(?P<memory>\d+)MiB\((?P<total>\d+)MiB\)[^\n]*"
    r"(?:\n[^|\n]*\|[^|\n]*\|\s*(?P<celsius>\d+)C)?"
)
# The runtime is closed. Its reading of anything but ascending numbers is unconfirmed and refused.
MUSA = Mask("MUSA_VISIBLE_DEVICES", strict=True, entries="numbers of GPUs of this machine, each once, such as '0,1'")


class MooreThreads(Vendor):
    """GPUs of the MUSA stack.

    A GPU's index is mthreads-gmi's number. Without the tool, as in many containers, it is the position of the nodes, if
    their numbers and the PCI addresses ascend together; otherwise no GPU is given out.
    """

    key, resource, kind, brand = "moorethreads", "GPU", "gpu", "Moore Threads"
    modules = ("mtgpu",)  # on the bus, the driver's name has changed
    url = "https://docs.mthreads.com"
    pci_vendors, pci_classes = (0x1ED5,), (0x0300, 0x0302, 0x0380, 0x1200)  # sound has a class of its own
    catalog = Catalog(__file__)
    mask = MUSA
    variables = cleared = (CUDA,)
    sharing = Fractional.SHARED
    number_name = "number"
    number_remedy = "make 'mthreads-gmi' work: it tells how the runtime numbers the GPUs"
    held = "none"  # which node a process keeps open is not known
    tool = Tool("mthreads-gmi", package="the MUSA driver package", hung="look for mtgpu in 'dmesg'")

    def read_card(self, card: Card) -> None:
        """Find the nodes, numbered in the directory of the PCI function, and the size of the memory."""
        found = [path.rpartition("/")[2] for path in card.glob("misc/mtgpu*")]
        names = [name for name in found if re.fullmatch(r"mtgpu\.?\d+", name)]
        card.nodes = (*(f"/dev/{name}" for name in names[:1]), *card.drm_nodes())
        if names:
            card.attributes["node"] = int(re.sub(r"\D", "", names[0]))
            card.memory_bytes = _memory(card.ctx, names[0])[0]

    def check_nodes(self, card: Card) -> None:
        """Blame a card without a node of its own: DRM nodes alone compute nothing."""
        if "node" not in card.attributes:
            card.nodes = ()
        super().check_nodes(card)

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterator[str]:
        """Ask mthreads-gmi for the order of several GPUs, and for a product unknown by PCI id."""
        if self.is_complete(cards):
            return
        rows = self.tool.scan(ctx, TABLE)
        if rows is None:
            nodes = [card.attributes.get("node", -1) for card in cards]
            if nodes == sorted(nodes, key=lambda node: int(node or 0)):
                for number, card in enumerate(cards):
                    card.number = number
            yield "mthreads-gmi is not here to tell the order or the product of the GPUs"
            return
        for card, row in self.match_rows(cards, rows):
            card.number, card.model = row.count("index"), row.text("name") or ""
            card.memory_bytes = card.memory_bytes or (row.count("total") or 0) << 20 or None

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return numbers for the container runtime, and a mask from 0 for the program inside."""
        if not devices:
            return {}
        inside = ",".join(str(number) for number in range(len(devices)))
        return {CONTAINER_DEVICES: self.write_mask(devices), MUSA.variable: inside}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask mthreads-gmi; without it the driver, which reports memory in use alone."""
        rows = self.tool.scan(ctx, TABLE)
        if rows is not None:
            return self.measures_by_device(rows, devices, "memory", "busy", "celsius")
        nodes = {device.id: device.nodes[0].rpartition("/")[2] for device in devices if device.nodes}
        return {id_: {"memory_used_bytes": _memory(ctx, node)[1]} for id_, node in nodes.items()} or None

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on cards that MUSA's frameworks do not support."""
        for device in detected.devices:
            if device.model == "MTT S30":
                yield warn(
                    f"{device.id} is an MTT S30, on which torch_musa crashes (torch_musa#134)", "use another GPU"
                )


def _memory(ctx: ProbeContext, node: str) -> tuple[int | None, int | None]:
    """Return size and use of a GPU's memory in bytes, from the driver's files of a node; None if unknown."""
    for folder in ctx.glob(MEMORY):
        if text(ctx, f"{folder}/devname") == node:
            size = re.search(
                r"^MemTotal\S*\s+\S+\s+(?:0x)?([0-9a-fA-F]+)", text(ctx, f"{folder}/vram_info"), re.MULTILINE
            )
            used = re.search(r"^\s*MemoryUsageAllocGPUMemLMA\s+(\d+)", text(ctx, f"{folder}/memory"), re.MULTILINE)
            return size and int(size[1], 16), used and int(used[1])
    return None, None


plugin = MooreThreads()
