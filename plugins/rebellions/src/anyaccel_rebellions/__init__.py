"""Rebellions NPUs for anyaccel: the chips of ATOM and REBEL cards, from PCI and /dev, masked by position."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from anyaccel.kit import PCI_DEVICES, Card, Catalog, FaultError, Mask, Measures, Numbers, Row, Tool, Vendor, warn
from anyaccel.plugin import Detected, Device, Finding, PciFunction, ProbeContext, replace

CLASS = "/sys/class/rebellions/rbln"
DUMMY = "RBLN_DUMMY_DEVICE"
"""``1`` gives a program a dummy device in the host's memory, which computes nothing (torch-rbln)."""
TOOL = Tool("rbln-smi", "rbln-stat", package="the Rebellions driver package", hung="look in 'dmesg'")


def _mask(variable: str) -> Mask:
    """Build a mask of chip numbers; an empty value hides nothing.

    An id beyond the machine hides every chip (torch-rbln, conformance tests). The runtime's reading of the order, of
    blanks, of a repetition, and of an unknown number beside known ones is not published: such values are refused.
    """
    return Mask(
        variable,
        Numbers(),
        nothing="99999",
        empty="everything",
        strict=True,
        blanks=False,
        entries="numbers of chips that are here, each once, without blanks, such as '0,1'",
    )


DEVICES, VISIBLE = _mask("RBLN_DEVICES"), _mask("RBLN_VISIBLE_DEVICES")
"""The first wins in the runtime; vllm-rbln 0.12 reads only the second, and Ray sets only the first."""


class Rebellions(Vendor):
    """ATOM and REBEL.

    A device is a chip: the unit of the mask, of opening, and of Ray's count. A card has 1 chip, or 4 with the same
    ``parent``. Chips are not divided.

    A device's index is its position among the chips with a node here, in the order of their numbers: the runtime's
    meaning of an entry in the mask (vllm-rbln, ``get_rbln_owned_card_indices``). In a container with rbln4 and rbln5
    these are 0 and 1. The number of the node is the attribute ``rbln``.
    """

    key, resource, kind, brand = "rebellions", "RBLN", "npu", "Rebellions"
    url = "https://docs.rbln.ai"
    pci_vendors = (0x1EFF,)
    catalog = Catalog(__file__)
    mask, alike = DEVICES, (VISIBLE.variable,)  # a stale one would win
    ray_switch = "RAY_EXPERIMENTAL_NOSET_RBLN_RT_VISIBLE_DEVICES"
    exclusive = "a chip that a process has opened is busy for others, and no way to divide it is published"
    number_name = "position among the chips that may be opened here"
    number_remedy = "make 'rbln-smi -g -j' work, which tells which /dev/rbln it is"
    state_file = "status"
    registered = False  # the tool names the node if sysfs does not
    tool = TOOL

    def functions(self, ctx: ProbeContext) -> list[PciFunction]:
        """Leave out a card whose virtual functions are given out instead (rbln-npu-feature-discovery)."""
        return [each for each in super().functions(ctx) if not ctx.exists(f"{PCI_DEVICES}/{each.address}/virtfn0")]

    def present(self, ctx: ProbeContext) -> bool:
        """Return True if the driver's class exists; the name of its module is not published."""
        return ctx.exists("/sys/class/rebellions")

    def detect(self, ctx: ProbeContext) -> Detected | None:
        """Find the chips; take the version of the driver from the tool's answer."""
        detected = super().detect(ctx)
        known = [device.attributes for device in detected.devices] if detected else []
        version = next((str(told["kmd_version"]) for told in known if "kmd_version" in told), "")
        return detected and replace(detected, driver_version=version)

    def read_card(self, card: Card) -> None:
        """Find the chip's directory in the driver's class, which shows every chip of the host even in a container."""
        for path in card.ctx.glob(f"{CLASS}*"):
            # Kernels differ in which of the two links contains the address.
            links = f"{card.ctx.readlink(path)}/{card.ctx.readlink(f'{path}/device')}"
            if card.address in links.split("/"):
                self._number(card, path.removeprefix(CLASS))

    def _number(self, card: Card, number: str) -> None:
        if re.fullmatch(r"\d{1,4}", number, re.ASCII):
            card.attributes["rbln"], card.nodes, card.folders = int(number), (f"/dev/rbln{number}",), [CLASS + number]

    def complete(self, ctx: ProbeContext, cards: Sequence[Card]) -> Iterable[str]:
        """Ask the tool for card and group of a chip, and for a node missing in sysfs."""
        told = _ask(ctx)
        if told is None:
            unclear = [card for card in cards if not card.nodes or (card.entry and "chips" in card.entry.facts)]
            note = "rbln-smi is not on the PATH, so which chips share a card, and some nodes, are unknown"
            return [note] if any(not card.fault for card in unclear) else ()
        for card in cards:
            one = told.get(card.address or "", {})
            # sysfs of some drivers has no link from the chip to its node.
            if one and not card.nodes and not card.fault:
                self._number(card, str(one.get("device", "")).removeprefix("rbln"))
                self.check_state(card)
                self.check_nodes(card)
            card.model = str(one.get("name") or "")
            card.parent = f"{self.key}-card-{one['sid']}" if re.fullmatch(r"\w{4,64}", str(one.get("sid"))) else None
            memory = one.get("memory", {}).get("total", "")
            card.memory_bytes = int(memory) if str(memory).isdecimal() else None
            uuid = one.get("uuid") if str(one.get("uuid", "")).strip("0-") else None  # some cards report zeros
            card.attributes |= {"uuid": uuid, "rsd_group": one.get("group_id"), "kmd_version": one.get("KMD_version")}
            if str(one.get("status", "")).upper() == "FAULT":
                card.blame("rbln-smi reports FAULT", "look in 'dmesg', then reset the card")
        return ()

    def arrange(self, cards: list[Card]) -> None:
        """Number the chips with a node here, in the order of their numbers."""
        # A container shows chips in sysfs without their nodes; the runtime does not count them.
        here = [card for card in cards if card.nodes and card.ctx.node(card.nodes[0])]
        for place, card in enumerate(sorted(here, key=lambda card: int(card.attributes["rbln"] or 0))):
            card.number = place
        super().arrange(cards)

    def board(self, card: Card) -> object:
        """Return the card of a chip; between cards only the distance over PCI is known."""
        return card.parent

    def visible(self, environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
        """Read the first non-empty variable."""
        return self.read_mask(environ, devices, DEVICES if environ.get(DEVICES.variable) else VISIBLE)

    def shared_nodes(self, devices: Sequence[Device]) -> Iterable[str]:
        """Return the node of the group. It must be called rsd0 inside, so only group 0 can be passed as it is."""
        groups = {str(device.attributes.get("rsd_group")) for device in devices}
        return ["/dev/rsd0"] if groups == {"0"} else []

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask the tool. Power is the card's, reported with its first chip only."""
        told = _ask(ctx)
        if told is None:
            return None
        rows = {device.id: told.get(str(device.pci_bus_id)) for device in devices}
        return {name: _measures(one) for name, one in rows.items() if one}

    def findings(self, ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
        """Yield findings on two variables that differ, and on the dummy device."""
        # An unset variable does not contradict the other.
        values = [ctx.environ[mask.variable] for mask in (DEVICES, VISIBLE) if mask.variable in ctx.environ]
        if len({*values}) > 1:
            reason = f"{DEVICES.variable} and {VISIBLE.variable} differ, and programs read one or the other"
            yield warn(reason, f"set both alike, or unset {VISIBLE.variable}")
        if ctx.environ.get(DUMMY) == "1":
            yield warn(f"{DUMMY}=1 makes torch-rbln use a device that computes nothing", f"unset {DUMMY}")


def _ask(ctx: ProbeContext) -> dict[str, Mapping[str, Any]] | None:
    """Return the tool's answer by PCI address; None if the tool is not installed."""
    answer = TOOL.json(ctx, "-g", "-j")
    if answer is None:
        return None
    try:
        version = {"KMD_version": answer.get("KMD_version")}
        found = [{**one, **version, "memory": {**one.get("memory", {})}} for one in answer["devices"]]
        return {one["pci"]["bus_id"].lower(): one for one in found}
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"rbln-smi must answer devices with their PCI addresses ({error!r})"
        raise FaultError(reason, "run 'rbln-smi -g -j' by hand") from error


def _measures(one: Mapping[str, Any]) -> Measures:
    texts = {name: str(one[name]) for name in ("util", "temperature", "card_power") if one.get(name) not in (None, "")}
    used = one["memory"].get("used")
    row = Row("rbln-smi", str(one.get("device")), {**texts, "used": None if used is None else str(used)})
    return {**row.measures("", "util", "temperature", "card_power"), "memory_used_bytes": row.count("used")}


plugin = Rebellions()
