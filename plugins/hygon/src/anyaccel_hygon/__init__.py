"""Hygon DCUs for anyaccel: from PCI and the KFD topology, masked for HIP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anyaccel.kit import PCI_DEVICES, Card, Catalog, FaultError, Mask, Measures, Row, Tool, Vendor, number, text
from anyaccel.plugin import Device, EnvContext, EnvEdits, Fractional, ProbeContext, replace

NODES = "/sys/class/kfd/kfd/topology/nodes"
KFD, MKFD = "/dev/kfd", "/dev/mkfd"
HYHAL = "/opt/hyhal"
ROCR = "ROCR_VISIBLE_DEVICES"
PRODUCT = ("--showproductname", "--showserial", "--showbus", "--json")
JUNCTION, WATTS = "Temperature (Sensor junction) (C)", "Average Graphics Package Power (W)"
STATE = ("--showuse", "--showmemuse", "--showpower", "--showtemp", "--showserial", "--showbus", "--json")


def _mask(variable: str) -> Mask:
    """Build HIP's mask. Numbers and their renumbering from 0 were seen on a DCU; any other form is unconfirmed."""
    return Mask(
        variable,
        nothing="-1",
        empty="error",
        strict=True,
        entries="numbers of DCUs of this machine, each once, such as '0,1', or -1",
        blanks=False,
    )


HIP, CUDA = _mask("HIP_VISIBLE_DEVICES"), _mask("CUDA_VISIBLE_DEVICES")


class Hygon(Vendor):
    """DCUs, called HCUs by newer tools, numbered by position among the readable KFD nodes."""

    key, resource, kind, brand, driver = "hygon", "GPU", "gpu", "Hygon", "hycu"
    modules = ("hycu", "hydcu")
    url = "https://github.com/HYGON-AI"
    pci_vendors, pci_classes = (0x1D94,), (0x0380, 0x0300, 0x0302, 0x1200)
    catalog = Catalog(__file__)
    mask, variables, borrowed = HIP, (CUDA.variable, ROCR), (HIP.variable, CUDA.variable)
    sharing = Fractional.SHARED
    number_name = "position in KFD"
    number_remedy = "look for kfd and hycu in 'dmesg': the runtime numbers only DCUs that KFD lists"
    control_nodes = (KFD, MKFD)
    held = "none"  # the runtime opens the nodes of DCUs that it does not use, too
    host_paths = (("hyhal", HYHAL),)  # the driver's libraries and tools
    tool = Tool(f"{HYHAL}/bin/hy-smi", "hy-smi", package="the DCU driver package")

    def read_card(self, card: Card) -> None:
        """Find nodes and memory. A card that hangs or fell off the bus fails to report memory in use."""
        own = card.drm_nodes()
        card.nodes = (*own, KFD, MKFD) if own else ()
        card.memory_bytes = number(card.ctx, f"{card.folders[0]}/mem_info_vram_total")
        # Read for its failure: this file asks the hardware.
        card.read("mem_info_vram_used")
        card.check_node(KFD, missing="load the driver again")

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Read the cards of PCI, and their KFD nodes."""
        cards = super().survey(ctx)
        places = {card.address: card for card in cards}
        for place, (address, unique) in enumerate(_gpus(ctx)):
            if (card := places.get(address)) is not None:
                card.number, card.sound, card.attributes["unique_id"] = place, True, unique
        if len(cards) > 1 and not any(card.function and card.function.numa_node for card in cards):
            for card in cards:  # sysfs was seen to report node 0 for cards of any node
                card.function = card.function and replace(card.function, numa_node=None)
        return cards

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterator[str]:
        """Ask hy-smi for products: several have the same PCI device id."""
        if all(card.fault or card.entry for card in cards):
            return
        rows = self._rows(ctx, PRODUCT)
        if rows is None:
            yield "several products have this PCI device id, and hy-smi is not here to tell which one it is"
        for card in cards:
            if rows and (row := rows.get(card.address or "")):
                card.model, card.attributes["serial"] = row.text("Card Series") or "", row.text("Serial Number")

    def _rows(self, ctx: ProbeContext, arguments: Sequence[str]) -> dict[str, Row] | None:
        """Ask hy-smi, whose answer is keyed by its own numbers, for rows by PCI address."""
        told: Any = self.tool.json(ctx, *arguments)
        if told is None:
            return None
        if not isinstance(told, dict) or not all(isinstance(facts, dict) for facts in told.values()):
            raise FaultError("hy-smi must answer an object for each card", "run it by hand")
        rows = ({name: str(fact) for name, fact in facts.items()} for facts in told.values())
        return {facts.get("PCI Bus", "").lower(): Row("hy-smi", facts.get("PCI Bus", ""), facts) for facts in rows}

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Set HIP's variable, and CUDA's to the same value for vLLM; unset ROCR, which would count twice."""
        listed = self.write_mask(devices)
        if not devices:
            return EnvEdits(set={HIP.variable: listed, ROCR: ""})
        return EnvEdits(set={HIP.variable: listed, CUDA.variable: listed}, unset=frozenset({ROCR}))

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Return the devices visible to HIP, by its own variable or else by CUDA's."""
        rocr = environ.get(ROCR)
        # Its effect on DCUs is not confirmed.
        if rocr:
            raise FaultError(f"what {ROCR}={rocr!r} leaves is unconfirmed", f"unset it and set {HIP.variable}")
        return [] if rocr == "" else self.read_mask(environ, devices, HIP if HIP.variable in environ else CUDA)

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return none: a device with a known node lists the control nodes itself."""
        return ()

    def container_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Prevent the container runtime, whose order is not HIP's, from adding devices: unset may mean all."""
        return {"HCU_VISIBLE_DEVICES": "void"}

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Read memory in use from sysfs, and ask hy-smi for the rest."""
        rows = self._rows(ctx, STATE) or {}
        found: dict[str, Measures] = {}
        for device in devices:
            row = rows.get(device.pci_bus_id or "") or Row("hy-smi", device.id, {})
            load = "HCU use (%)" if row.text("HCU use (%)") else "DCU use (%)"
            used = number(ctx, f"{PCI_DEVICES}/{device.pci_bus_id}/mem_info_vram_used")
            found[device.id] = {**row.measures("", load, JUNCTION, WATTS), "memory_used_bytes": used}
        return found


def _gpus(ctx: ProbeContext) -> Iterator[tuple[str, str | None]]:
    """Yield PCI address and unique id of each readable KFD node of a GPU, in the order of their numbers."""
    for path in ctx.glob(f"{NODES}/[0-9]*"):
        words = (line.split() for line in text(ctx, f"{path}/properties").splitlines())
        facts = {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}  # noqa: PLR2004
        place, unique = facts.get("location_id", 0), facts.get("unique_id")
        # A node without SIMDs is a CPU.
        if facts.get("simd_count"):
            address = f"{facts.get('domain', 0):04x}:{place >> 8 & 255:02x}:{place >> 3 & 31:02x}.{place & 7}"
            yield address, f"{unique:016x}" if unique else None


plugin = Hygon()
