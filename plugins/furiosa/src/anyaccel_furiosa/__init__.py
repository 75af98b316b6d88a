"""FuriosaAI NPUs for anyaccel: from PCI and the driver's classes, given out whole or by processing elements."""

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
"""The driver's classes, names below with the number of a device, and the beginning of its nodes."""
TOOL = Tool("furiosa-smi", package="the package furiosa-smi", hung="look in 'dmesg'")


class Furiosa(Vendor):
    """Warboy and RNGD.

    A device's index is the number of ``npuN``, used by masks, nodes and tools, and unstable over restarts. So its
    identity is the serial number, else the UUID, else the PCI address.
    """

    key, resource, kind, brand = "furiosa", "FURIOSA", "npu", "FuriosaAI"
    url = "https://developer.furiosa.ai"
    pci_vendors, catalog, mask = (0x1ED2,), Catalog(__file__), MASK
    number_name, number_remedy = "device number", "look in 'dmesg' for why the driver shows no npuN for it"
    tool = TOOL

    def fractional(self, device: Device) -> Fractional:
        """Return PARTITIONED: cores are isolated. Isolation of their memory is not published."""
        return Fractional.PARTITIONED if device.slots > 1 else Fractional.NO

    def validate(self, term: Term, devices: Sequence[Device]) -> str | None:
        """Refuse shares other than partitions: programs are compiled for 1, 2 or 4 fused cores."""
        for device in devices if term.fraction else ():
            cores = device.rounded(term.units) * device.slots // 10_000
            if cores not in (*FUSED, device.slots):
                sizes = " or ".join(f"{size / device.slots:g}" for size in FUSED if size < device.slots)
                return (
                    f"{cores} of {device.slots} cores of {device.id} are no partition (1, 2 or 4 are); ask for {sizes}"
                )
        return super().validate(term, devices)

    def present(self, ctx: ProbeContext) -> bool:
        """Return True if a class of the driver exists; the names of its modules are not published."""
        return any(ctx.exists(folder) for folder, _, _ in CLASSES)

    def driver_version(self, ctx: ProbeContext) -> str:
        """Return the version in the first device's directory."""
        return next(filter(None, (text(ctx, f"{path}/version") for path, _, _ in _managed(ctx))), "")

    def read_card(self, card: Card) -> None:
        """Find the directory of the class with the card's PCI address, and from it number and nodes."""
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
        """Return the nodes of cores. Monitors open the node that ends in mgmt."""
        return [node for node in device.nodes if re.search(r"\dpe\d", node)]

    def env(self, devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
        """Name cards, and the cores of shares. Software for RNGD does not read the variable itself: see the README."""
        self.write_mask(devices)
        return EnvEdits(set={MASK.variable: MASK.write_shares(devices, ctx.shares)})

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str | VisiblePart] | None:
        """Read cards and cores."""
        return MASK.read_shares(environ, [device for device in devices if self.maskable(device)])

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask furiosa-smi; its option for JSON changed with RNGD."""
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
    """Yield directories of the driver's classes, each with the number of its device and the beginning of its nodes."""
    for folder, form, node in CLASSES:
        for path in ctx.glob(f"{folder}/*"):
            if match := re.fullmatch(f"{folder}/{form}", path, re.ASCII):
                yield path, int(match[1]), node


def _measures(info: Mapping[str, Any], status: Mapping[str, Any]) -> Measures:
    """Combine two answers about a device into measurements; Warboy's have no memory."""
    busy = [one.get("pe_utilization", one.get("utilization")) for one in status["pe_utilizations"]]
    told = {name: str(info[name]).replace("°", "") for name in ("temperature", "power") if name in info}
    measures = Row("furiosa-smi", info["dev_name"], told).measures(celsius="temperature", watts="power")
    memory = status.get("memory", {}).get("DRAM", {}).get("used_size")
    return {**measures, "memory_used_bytes": memory, "utilization": sum(busy) / 100 / len(busy) if busy else None}


plugin = Furiosa()
