"""FuriosaAI NPUs for anyaccel: found on PCI and in the driver's classes, given out whole or by processing elements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyaccel.kit import Card, Catalog, FaultError, Measures, Row, Tool, Vendor, text
from anyaccel.plugin import Device, EnvContext, EnvEdits, Fractional, ProbeContext, Term, VisiblePart

from anyaccel_furiosa.cores import FUSED, MASK

CLASSES = (
    ("/sys/class/rngd_mgmt", r"rngd!npu(\d+)mgmt", "/dev/rngd/npu"),
    ("/sys/class/npu_mgmt", r"npu(\d+)_mgmt", "/dev/npu"),
)
"""The driver's classes, the names below them with the number of a device, and the beginning of its nodes."""
TOOL = Tool("furiosa-smi", package="the package furiosa-smi", hung="look in 'dmesg'")


class Furiosa(Vendor):
    """Warboy and RNGD.

    A device's index is the number of ``npuN``, which masks, nodes and tools use, and which may be another one after a
    restart. So its identity is the serial number, else the UUID, else the PCI address.
    """

    key, resource, kind, brand = "furiosa", "FURIOSA", "npu", "FuriosaAI"
    url = "https://developer.furiosa.ai"
    pci_vendors, catalog, mask = (0x1ED2,), Catalog(__file__), MASK
    number_name, number_remedy = "device number", "look in 'dmesg' for why the driver shows no npuN for it"
    tool = TOOL

    def fractional(self, device: Device) -> Fractional:
        """Cores are apart from each other; whether their memory is, is not published."""
        return Fractional.PARTITIONED if device.slots > 1 else Fractional.NO

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Refuse shares that are no partition, since programs are made for one core, or for 2 or 4 that are fused."""
        for device in devices if term.fraction else ():
            cores = device.rounded(term.units) * device.slots // 10_000
            if cores not in (*FUSED, device.slots):
                sizes = " or ".join(f"{size / device.slots:g}" for size in FUSED if size < device.slots)
                return (
                    f"{cores} of {device.slots} cores of {device.id} are no partition (1, 2 or 4 are); ask for {sizes}"
                )
        return super().validate(term, devices)

    def present(self, ctx: ProbeContext) -> bool:
        """The driver's classes tell, since the names of its modules are not published."""
        return any(ctx.exists(folder) for folder, _, _ in CLASSES)

    def driver_version(self, ctx: ProbeContext) -> str:
        """The version that the first device's directory shows."""
        return next(filter(None, (text(ctx, f"{path}/version") for path, _, _ in _managed(ctx))), "")

    def read_card(self, card: Card) -> None:
        """Find the directory of the class by the PCI address in it, and with it the number and the nodes."""
        for path, number, node in _managed(card.ctx):
            if text(card.ctx, f"{path}/busname").lower() == card.address:
                card.number, card.folders = number, [path]
                card.slots = card.entry.facts.get("slots", 1) if card.entry else 1
                cores = tuple(f"{node}{number}pe{core}" for core in range(card.slots))
                card.nodes = (*cores, *(each for each in card.ctx.glob(f"{node}{number}[!0-9]*") if each not in cores))
                for each in cores:  # a container may have been given some cores of a card
                    card.check_node(each)
                card.attributes["uuid"] = card.read("device_uuid")
                told = str(card.read("device_sn") or card.attributes["uuid"] or "")
                if re.fullmatch(r"[A-Za-z0-9-]{4,64}", told):
                    card.id = f"{self.key}-{told}"

    def check_state(self, card: Card) -> None:
        """Read the state: ``device_state`` of RNGD, ``alive`` of Warboy; 1 where it lives."""
        state = (card.read("device_state") or card.read("alive")) if card.nodes else None
        if state not in ("1", None):
            card.blame(f"the driver reports the state {state!r}, and 1 is alive", f"{self.log_hint}, then restart it")
        card.sound = state == "1"

    def held_nodes(self, device: Device) -> Sequence[str]:
        """Holders open the nodes of cores, monitors the one that ends in mgmt."""
        return [node for node in device.nodes if re.search(r"\dpe\d", node)]

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Name cards, and the cores of shares. No software for RNGD reads the variable by itself: see the README."""
        self.write_mask(devices)
        return EnvEdits(set={MASK.variable: MASK.write_shares(devices, ctx.shares)})

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str | VisiblePart] | None:
        """Read cards and cores."""
        return MASK.read_shares(environ, [device for device in devices if self.maskable(device)])

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask furiosa-smi, whose option for JSON is a new one since RNGD."""
        option = "--output" if any(device.model == "Warboy" for device in devices) else "--format"
        info = TOOL.json(ctx, "info", option, "json")
        status = TOOL.json(ctx, "status", option, "json")
        if info is None or status is None:
            return None
        names = {f"npu{device.index}": device.id for device in devices}
        try:
            loads = {one["device"]: one for one in status}
            pairs = ((one, loads.get(one["dev_name"])) for one in info if one["dev_name"] in names)
            return {names[one["dev_name"]]: _measures(one, load) for one, load in pairs if load}
        except (AttributeError, KeyError, TypeError) as error:
            raise FaultError(f"furiosa-smi must answer a list of devices ({error!r})", "run it by hand") from error


def _managed(ctx: ProbeContext) -> Iterator[tuple[str, int, str]]:
    """Directories of the driver's classes, each with the number of its device and the beginning of its nodes."""
    for folder, form, node in CLASSES:
        for path in ctx.glob(f"{folder}/*"):
            if match := re.fullmatch(f"{folder}/{form}", path, re.ASCII):
                yield path, int(match[1]), node


def _measures(info: Mapping[str, Any], status: Mapping[str, Any]) -> Measures:
    """Make the measures of a device of the two answers about it; Warboy's says nothing of memory."""
    busy = [one.get("pe_utilization", one.get("utilization")) for one in status["pe_utilizations"]]
    told = {name: str(info[name]).replace("°", "") for name in ("temperature", "power") if name in info}
    measures = Row("furiosa-smi", info["dev_name"], told).measures(celsius="temperature", watts="power")
    memory = status.get("memory", {}).get("DRAM", {}).get("used_size")
    return {**measures, "memory_used_bytes": memory, "utilization": sum(busy) / 100 / len(busy) if busy else None}


plugin = Furiosa()
