"""Mobilint NPUs for anyaccel: from device nodes and PCI, masked by the number of the node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.kit import Card, Catalog, Mask, Measures, Numbers, Row, Tool, Vendor, numbered, pairs
from anyaccel.plugin import Device, PciFunction, ProbeContext

CLASS = "/sys/class/aries/aries"
NODES = {"aries": "/dev/aries", "regulus": "/dev/regulus-npu"}
"""Beginnings of device nodes; /dev/regulus and /dev/regulus-usb0 are not devices (Ray, ``mblt.py``)."""
LOG = "look for aries in 'dmesg'"
TOOL = Tool("mobilint-cli", package="the package mobilint-cli", hung=LOG)


class Mobilint(Vendor):
    """ARIES (MLA100, MLA400) and REGULUS.

    A device is a chip: an MLA400 has four. Its index is the number of its node, which runtime, tool and mask share, and
    which a mask does not change. Its identity is the PCI address if sysfs shows it, else the name of the node: a serial
    number or UUID is not published.
    """

    key, resource, kind, brand = "mobilint", "MBLT", "npu", "Mobilint"
    modules = ("aries",)  # lsmod; the name of the PCI driver is not published
    url = "https://pypi.org/project/mobilint-qb-runtime/"
    pci_vendors = (0x209F,)
    catalog = Catalog(__file__)
    mask = Mask(
        "QBRUNTIME_VISIBLE_DEVICES",
        Numbers(),
        nothing="999",  # no value for "none" is published; the list is a filter, and no device has this number
        empty="nothing",  # what it does is not published; only narrowing is safe
        strict=True,  # libqbruntime 1.5 logs a repetition as an error
        blanks=False,
        entries="numbers of devices that are here, each once, without blanks, such as '0,1'",
    )
    ray_switch = "RAY_EXPERIMENTAL_NOSET_MBLT_RT_VISIBLE_DEVICES"
    exclusive = "no way to divide a device is published, and which cores a program claims is a property of its model"
    number_name = "device number"
    number_remedy = LOG
    tool = TOOL

    def present(self, ctx: ProbeContext) -> bool:
        """Return True if the module or its class exists."""
        return super().present(ctx) or ctx.exists("/sys/class/aries")

    def survey(self, ctx: ProbeContext) -> list[Card]:
        """Read the device nodes, then PCI functions without a node."""
        left = {function.address: function for function in self.functions(ctx)}
        cards: list[Card] = []
        for family, start in NODES.items():
            shown = numbered(ctx, CLASS) if family == "aries" else {}
            numbers = sorted({*shown, *numbered(ctx, start)})
            cards += [self._read_numbered(ctx, family, number, left) for number in numbers]
        if any(card.function is None and card.attributes["family"] == "aries" for card in cards):
            # Without a link from node to function, bound functions are assumed to be the nodes already listed.
            left = {address: each for address, each in left.items() if not self.bound(Card(ctx, address, each))}
        return cards + [self.card(ctx, each) for each in left.values()]

    def _read_numbered(self, ctx: ProbeContext, family: str, number: int, left: dict[str, PciFunction]) -> Card:
        """Read a device with a number; a link of its node contains the address of its PCI function."""
        path = f"{NODES[family]}{number}"
        node = ctx.node(path)
        links = [ctx.readlink(f"{CLASS}{number}")] if family == "aries" else []
        links += [ctx.readlink(f"/sys/dev/char/{node.major}:{node.minor}")] if node else []
        parts = (part for link in links if link for part in reversed(link.split("/")))
        function = next((left.pop(part) for part in parts if part in left), None)
        entry = self.catalog.get(family.upper())
        if function:
            entry = self.catalog.by_pci(function.device, subsystem=function.subsystem_device) or entry
        card = Card(
            ctx, f"{self.key}-{function.address if function else path.removeprefix('/dev/')}", function, entry=entry
        )
        card.number, card.nodes, card.attributes["family"] = number, (path,), family
        self.check_nodes(card)
        return card

    def arrange(self, cards: list[Card]) -> None:
        """Number the devices by their nodes. With both families, no mask is supported (libqbruntime)."""
        if len({card.attributes.get("family") for card in cards if card.number is not None}) > 1:
            for card in cards:
                reason = "ARIES and REGULUS are both here, and then the runtime supports no mask"
                card.blame(reason, "pass the devices of one kind alone to a container")
                card.number = None
        super().arrange(cards)

    def measure(self, ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, Measures] | None:
        """Ask mobilint-cli. The first chip of an MLA400 reports the power of the board, later chips 0."""
        text = TOOL.ask(ctx, "status", "-q")
        if text is None:
            return None
        told = _sections(text)
        found: dict[str, Measures] = {}
        for device in devices:
            if row := told.get("".join(device.nodes[:1])):
                measured = row.measures("Memory Usage", "Utilization Total", "Temperature", "Power Total")
                # 0 W means "measured by the first chip", not "no power".
                measured["power_watts"] = measured.get("power_watts") or None
                found[device.id] = measured
        return found


def _sections(text: str) -> dict[str, Row]:
    """Parse ``name : value`` below each node; deeper names get their heading: ``Power Total``."""
    lines: dict[str, list[str]] = {}
    node, heading, top = "", "", 0
    for line in filter(str.strip, text.splitlines()):
        depth, words = len(line) - len(line.lstrip()), line.strip()
        if not depth:
            node, top = words, 0
        elif ":" not in line:
            heading = words
        else:
            top = top or depth
            lines.setdefault(node, []).append(words if depth == top else f"{heading} {words}")
    return {node: Row(TOOL.name, node, pairs(found)) for node, found in lines.items()}


plugin = Mobilint()
