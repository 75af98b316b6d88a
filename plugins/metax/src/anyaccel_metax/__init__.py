"""MetaX GPUs for anyaccel: from PCI, numbered by mx-smi, masked for MACA."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.kit import Card, Catalog, Mask, Measures, Tool, Vendor
from anyaccel.plugin import Device, EnvContext, EnvEdits, Fractional, PciFunction, ProbeContext

COMPUTE = "/dev/mxcd"
"""The node opened by every compute process, whatever its GPU."""
DRIVER = "/opt/mxdriver"
SHARED = "MACA_MPS_MODE"
"""Set for shares: without it, a second process on a GPU fails."""


def _mask(variable: str) -> Mask:
    """Build a strict mask. The runtime is closed; its reading of anything but ascending numbers is unconfirmed."""
    return Mask(variable, strict=True, entries="numbers of GPUs of this machine, each once, such as '0,1'")


CUDA, MACA = _mask("CUDA_VISIBLE_DEVICES"), _mask("MACA_VISIBLE_DEVICES")
ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
# GPU#0    MXC500      0000:08:00.0   Available (UUID: GPU-e702...)
# GPU#1 MXC550 bus Not Available(MetaX Sysfs File Unaccessible)
LISTED = (
    rf"^GPU#(?P<key>\d+)\s+(?P<name>\S.*?)\s+(?P<address>{ADDRESS}|bus)\s+(?P<state>(?:Not )?Available)\s*"
    r"\((?:UUID: (?P<uuid>[^)]*)|(?P<why>[^)]*))\)"
)
# Two lines per GPU, in layouts that differ by words behind the name and the power.
TABLE = (
    rf"^\|\s*\d+\s+\S[^|]*\|\s*(?P<key>{ADDRESS})\s*\|\s*(?P<busy>\d+|N/A)\s*%?[^|]*\|\s*\n"
    r"\|\s*(?P<celsius>[\d.]+|N/A)C?\s+(?P<watts>[\d.]+|N/A)W?\s*/[^|]*\|\s*(?P<memory>\d+)\s*/\s*\d+ MiB"
)


class MetaX(Vendor):
    """GPUs of the MACA stack.

    A GPU's index is mx-smi's number; the number of its DRM node is another. If mx-smi reports a GPU as not available,
    it is unknown whether the runtime counts this GPU: later GPUs are not given out.
    """

    key, resource, kind, brand, driver = "metax", "GPU", "gpu", "MetaX", "metax"
    url = "https://github.com/MetaX-MACA"
    pci_vendors = (0x9999,)
    catalog = Catalog(__file__)
    mask, borrowed = CUDA, (CUDA.variable,)
    alike, variables = (MACA.variable,), (SHARED,)  # which of the two masks wins is unconfirmed
    sharing = Fractional.SHARED
    number_name = "number"
    number_remedy = "make 'mx-smi -L' work: it tells how the runtime numbers the GPUs"
    control_nodes = (COMPUTE,)
    held = "none"  # which node a process keeps open is not known
    host_paths = (("driver_root", DRIVER),)  # the driver's libraries and tools
    tool = Tool(f"{DRIVER}/bin/mx-smi", "mx-smi", package="the MetaX driver package", hung="look at 'dmesg'")

    def functions(self, ctx: ProbeContext) -> list[PciFunction]:
        """Return functions with the driver or a known device id: other companies use the vendor id, too."""
        found = super().functions(ctx)
        return [each for each in found if each.driver == self.driver or self.catalog.knows(each.device)]

    def read_card(self, card: Card) -> None:
        """Find the nodes; the DRM nodes are the GPU's own."""
        own = card.drm_nodes()
        card.nodes = (*own, COMPUTE) if own else ()
        card.check_node(COMPUTE, missing="load the metax driver again")

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return none: a device with a known node lists the control nodes itself."""
        return ()

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterator[str]:
        """Ask mx-smi, which takes seconds, for the order of several GPUs, and for a product unknown by PCI id."""
        if self.is_complete(cards):
            return
        rows = self.tool.scan(ctx, LISTED, "-L")
        if rows is None:
            yield "the order or the product of the GPUs is open, and mx-smi is not here to tell"
            return
        numbers = {row.text("address") or "": int(number) for number, row in rows.items()}
        first_lost = min((int(number) for number, row in rows.items() if row.text("state") != "Available"), default=999)
        for card, row in self.match_rows(cards, {row.text("address") or "": row for row in rows.values()}):
            number = card.number = numbers[card.address or ""]
            card.sound, card.model = row.text("state") == "Available", row.text("name") or ""
            card.attributes["uuid"] = row.text("uuid")
            if not card.sound:
                card.blame(f"mx-smi reports it not available ({row.text('why')})", f"{self.log_hint}, then reset it")
            elif number > first_lost:
                reason = f"GPU#{first_lost} before it is not available, and whether the runtime counts that is unknown"
                card.blame(reason, f"repair GPU#{first_lost}, or take it off the bus")
                card.number = None
        yield from self._links(ctx, {card.number: card for card in cards if card.number is not None})

    def _links(self, ctx: ProbeContext, cards: Mapping[int, Card]) -> Iterable[str]:
        """Link the GPUs joined by MetaXLink, MX in the table."""
        lines = re.findall(r"^GPU(\d+)\s+(.*)$", self.tool.ask(ctx, "topo", "-n") or "", re.MULTILINE)
        for number, cells in lines:
            joined = [int(other) for (other, _), cell in zip(lines, cells.split(), strict=False) if cell == "MX"]
            if int(number) in cards:
                cards[int(number)].links = {cards[other].id: 1 for other in joined if other in cards}
        return () if lines else ("mx-smi does not tell which GPUs are linked",)

    def identify(self, card: Card) -> None:
        """Unify the names of a product: ``MXC500`` and ``MetaX C500`` are the same card."""
        super().identify(card)
        card.model = card.entry.model if card.entry else card.model

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set the mask; for shares, allow several processes on a GPU."""
        values = super().env(devices, ctx).set
        parts = any(not share.whole for share in ctx.shares.values())
        return EnvEdits(set={**values, SHARED: "1"} if parts else values)

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Return the devices visible through both variables; a variable that hides everything needs no other."""
        own = self.read_mask(environ, devices, MACA)
        other = None if own == [] else self.read_mask(environ, devices, CUDA)
        return own if other is None else other if own is None else [each for each in own if each in other]

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask mx-smi. An idle GPU has 666 to 858 MiB in use."""
        return self.measures_by_device(self.tool.scan(ctx, TABLE), devices, "memory", "busy", "celsius", "watts")


plugin = MetaX()
