"""Iluvatar CoreX GPUs for anyaccel: from PCI, numbered by ixsmi, masked by index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import Card, Catalog, FaultError, Mask, Measures, Row, Tool, Vendor, numbered
from anyaccel.plugin import Device, Fractional, ProbeContext

COREX = "/usr/local/corex"
CONTROL = "/dev/itrctl"
"""The node shared by every GPU."""
CONTAINER_DEVICES = "IX_VISIBLE_DEVICES"
"""Indexes, read by the container runtime alone; unset means all."""
IDENTITY = ("pci.bus_id", "index", "name", "uuid", "memory.total")
LOAD = ("pci.bus_id", "memory.used", "utilization.gpu", "temperature.gpu")
POWER = ("power.draw", "gpu.power.draw", "")
"""Names of the power, by release; power is unknown if both are refused."""
QUERY = ("--query-gpu={fields}", "--format=csv,noheader,nounits")
ADDRESS = r"([0-9a-f]{4})?[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"


class Iluvatar(Vendor):
    """Chips; a board may have two, and each is a GPU.

    A GPU's index is ixsmi's number. The number of its node is another, shown in the directory of the PCI function, or
    certain with a single GPU and a single node.
    """

    key, resource, kind, brand, driver = "iluvatar", "GPU", "gpu", "Iluvatar", "iluvatar"
    url = "https://github.com/Deep-Spark"
    runtimes = ("libcuda.so",)
    pci_vendors, pci_classes = (0x1E3E,), (0x1200, 0x0300, 0x0302)
    catalog = Catalog(__file__)
    # The runtime is closed. Its reading of anything but ascending numbers is unconfirmed and refused.
    mask = Mask(
        "CUDA_VISIBLE_DEVICES", strict=True, entries="numbers of GPUs of this machine, each once, such as '0,1'"
    )
    borrowed = (mask.variable,)
    sharing = Fractional.SHARED
    number_name = "number"
    number_remedy = "make 'ixsmi' work: it tells how the runtime numbers the GPUs"
    control_nodes = (CONTROL,)
    held = "none"  # which nodes a process keeps open is not known
    host_paths = (("corex", COREX),)  # the toolkit: libraries and tools
    # ixsmi is in no PATH, and does not find its own library.
    tool = Tool(f"{COREX}/bin/ixsmi", "ixsmi", package="the CoreX toolkit", libraries=f"{COREX}/lib64")

    def read_card(self, card: Card) -> None:
        """Find the node, if the driver shows its name."""
        found = card.glob("iluvatar*/iluvatar[0-9]*")
        nodes = [f"/dev/{found[0].rpartition('/')[2]}"] if found else self._only(card.ctx)
        card.nodes = (*nodes, CONTROL) if nodes else ()
        card.check_node(CONTROL, missing="load the iluvatar driver again")

    def _only(self, ctx: ProbeContext) -> list[str]:
        """Return the node of a single GPU; nodes of several GPUs cannot be told apart."""
        nodes = list(numbered(ctx, "/dev/iluvatar").values())
        return nodes if len(nodes) == 1 == len(self.functions(ctx)) else []

    def check_nodes(self, card: Card) -> None:
        """Blame a card with a missing or closed node; with indistinguishable nodes, only if there is none."""
        if card.nodes:
            super().check_nodes(card)
        elif not numbered(card.ctx, "/dev/iluvatar"):
            card.check_node("/dev/iluvatar0", missing=f"{self.log_hint}, then reload the driver")

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterator[str]:
        """Ask ixsmi for the order of several GPUs, and for a product unknown by PCI id."""
        if self.is_complete(cards):
            return
        rows = self._rows(ctx, IDENTITY)
        if rows is None:
            yield "the order or the product of the GPUs is open, and ixsmi is not here to tell"
            return
        for card, row in self.match_rows(cards, rows):
            card.number, card.model = row.count("index"), row.text("name") or ""
            card.memory_bytes = (row.count("memory.total") or 0) << 20 or None
            card.attributes["uuid"] = row.text("uuid")
        # Without a node, neither a container nor the sandbox can open the right GPU.
        if any(not card.nodes for card in cards if card.number is not None):
            yield "which node in /dev is whose is not told, so that containers get none and --enforce opens none"

    def _rows(self, ctx: ProbeContext, fields: Sequence[str]) -> dict[str, Row] | None:
        """Ask ixsmi, whose PCI addresses have a domain of eight digits."""
        rows = self.tool.rows(ctx, [field for field in fields if field], *QUERY, key=ADDRESS)
        return None if rows is None else {address[-12:]: row for address, row in rows.items()}

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return none: a device with a known node lists the control nodes itself."""
        return ()

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return indexes for the container runtime, where unset means all; inside, nodes are numbered from 0."""
        return {CONTAINER_DEVICES: ",".join(str(device.index) for device in devices) or "void"}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask ixsmi. The name of the power depends on the release, and an unknown name fails the whole query."""
        for power in POWER:
            try:
                return self.measures_by_device(self._rows(ctx, (*LOAD, power)), devices, *LOAD[1:], power)
            except FaultError:
                if not power:
                    raise
        return None


plugin = Iluvatar()
