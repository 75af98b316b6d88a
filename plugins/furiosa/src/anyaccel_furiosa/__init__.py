"""FuriosaAI NPUs for anyaccel: from PCI and the driver's classes, given out whole or by processing elements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anyaccel.kit import Card, Catalog, Entry, Fault, FaultError, Measures, Row, Tool, Vendor, text
from anyaccel.plugin import Device, EnvContext, EnvEdits, Fractional, Health, ProbeContext, Term, VisiblePart

from anyaccel_furiosa.cores import FUSED, MASK

CLASSES = (
    ("/sys/class/rngd_mgmt", r"rngd!npu(\d+)mgmt", "/dev/rngd/npu"),
    ("/sys/class/npu_mgmt", r"npu(\d+)_mgmt", "/dev/npu"),
)
"""The driver's classes, names below with the number of a device, and the beginning of its nodes."""
STATES = (("device_state", "0"), ("alive", "1"))
"""Files with the state of a card, and the value of a live card."""
TOOL = Tool("furiosa-smi", package="the package furiosa-smi", hung="look in 'dmesg'")


class Furiosa(Vendor):
    """Warboy and RNGD.

    A device's index is the number of ``npuN``, used by masks, nodes and tools, and unstable over restarts. So its
    identity is the serial number, else the UUID, else the PCI address.
    """

    key, resource, kind, brand = "furiosa", "FURIOSA", "npu", "FuriosaAI"
    url = "https://developer.furiosa.ai"
    pci_vendors, catalog, mask = (0x1ED2,), Catalog(__file__), MASK
    masked_software = "Warboy's runtime"  # a program on RNGD takes its cores from --devices, or any that are free
    number_name, number_remedy = "device number", "look in 'dmesg' for why the driver shows no npuN for it"
    tool = TOOL

    def fractional(self, device: Device) -> Fractional:
        """Return PARTITIONED: cores are isolated. Isolation of their memory is not published."""
        return Fractional.PARTITIONED if device.slots > 1 else Fractional.NO

    def validate(self, request: Term, devices: Sequence[Device]) -> str | None:
        """Refuse shares other than partitions: programs are compiled for 1, 2 or 4 fused cores."""
        for device in devices if request.fraction else ():
            cores = device.rounded(request.units) * device.slots // 10_000
            if cores not in (*FUSED, device.slots):
                sizes = " or ".join(f"{size / device.slots:g}" for size in FUSED if size < device.slots)
                return (
                    f"{cores} of {device.slots} cores of {device.id} are no partition (1, 2 or 4 are); ask for {sizes}"
                )
        return super().validate(request, devices)

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
                # Cores first: a holder opens these, monitors the rest.
                cores = tuple(f"{node}{number}pe{core}" for core in range(card.slots))
                card.nodes = (*cores, *(each for each in card.ctx.glob(f"{node}{number}[!0-9]*") if each not in cores))
                for each in cores:  # a container may have been given some cores of a card
                    card.check_node(each)
                card.attributes["uuid"] = card.read("device_uuid")
                # device_sn may be empty; such cards have a UUID.
                told = str(card.read("device_sn") or card.attributes["uuid"] or "")
                if re.fullmatch(r"[A-Za-z0-9-]{4,64}", told):
                    card.id = f"{self.key}-{told}"

    def check_state(self, card: Card) -> None:
        """Blame a dead card, by the driver's file."""
        live, fault = _read_state(card)
        if live is False:
            card.blame(*fault)
        card.sound = live is True

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Compare the driver's state with furiosa-smi's, if installed; a contradiction makes the health unknown."""
        cards = [card for card in cards if card.nodes]
        status = self._ask(ctx, "status", [card.entry for card in cards]) if cards else None
        told = {one["device"]: one["liveness"] for one in status or () if isinstance(one, dict) and "liveness" in one}
        for card in cards:
            live, fault = _read_state(card)
            words = str(told.get(f"npu{card.number}", "")).lower()
            if live is None or not words or live is (words in ("alive", "true")):
                continue
            # Neither source is trusted alone: a published header had the meaning of device_state inverted.
            card.fault = None if card.fault == fault else card.fault
            reason = f"furiosa-smi calls it {words}, and {fault.reason if not live else 'its driver alive'}"
            card.doubt = Fault(reason, "run 'furiosa-smi status' by hand, and look in 'dmesg'")
        return ()

    def judge(self, device: Device, card: Card | None) -> tuple[Health, Fault]:
        """Return the current health; a contradiction found by detection stays until the next detection."""
        if card and device.health is Health.UNKNOWN and device.health_reason and card.fault == _read_state(card)[1]:
            card.fault = None
        return super().judge(device, card)

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
        """Ask furiosa-smi."""
        entries = [self.entry(device) for device in devices]
        info, status = self._ask(ctx, "info", entries), self._ask(ctx, "status", entries)
        if info is None or status is None:
            return None
        names = {f"npu{device.index}": device.id for device in devices}
        try:
            loads = {one["device"]: one for one in status}
            pairs = ((one, loads.get(one["dev_name"])) for one in info if one["dev_name"] in names)
            return {names[one["dev_name"]]: _measures(one, load) for one, load in pairs if load}
        except (AttributeError, KeyError, TypeError) as error:
            raise FaultError(f"furiosa-smi must answer a list of devices ({error!r})", "run it by hand") from error

    def _ask(self, ctx: ProbeContext, topic: str, entries: Sequence[Entry | None]) -> Any:
        """Ask furiosa-smi for JSON; the option changed with RNGD."""
        option = "--output" if any(entry is not None and entry.key == "WARBOY" for entry in entries) else "--format"
        return TOOL.json(ctx, topic, option, "json")


def _read_state(card: Card) -> tuple[bool | None, Fault]:
    """Return whether the driver reports a card as alive, None if unknown, and the fault of a dead card.

    ``device_state`` (RNGD) is 0 for a live card, as furiosa-smi 2026.4 reads it; ``alive`` (Warboy) is 1.
    """
    for name, alive in STATES:
        if (state := card.read(name)) is not None:
            reason = f"the driver reports {name} {state!r}, and {alive} is alive"
            return state == alive, Fault(reason, "look in 'dmesg', then restart it")
    return None, Fault("")


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
    # Bytes, where every other value is a text with a unit.
    memory = status.get("memory", {}).get("DRAM", {}).get("used_size")
    return {**measures, "memory_used_bytes": memory, "utilization": sum(busy) / 100 / len(busy) if busy else None}


plugin = Furiosa()
