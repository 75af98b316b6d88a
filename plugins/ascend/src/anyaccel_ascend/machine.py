"""Detection: the kernel's files first, then npu-smi, which alone knows how the runtime numbers the NPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy

from anyaccel.kit import (
    PCI_DEVICES,
    Card,
    Fault,
    FaultError,
    in_container,
    inventory,
    number,
    numbered,
    physical_function,
    text,
)
from anyaccel.plugin import Detected, PciFunction, ProbeContext

from anyaccel_ascend import npu_smi
from anyaccel_ascend.chips import CATALOG, identify, template_memory
from anyaccel_ascend.npu_smi import Mapped, Shown, Table

PCI_CLASS = 0x1200  # processing accelerator
VENDORS = (0x19E5, 0x20C6, 0x203F, 0x20E9)
"""Huawei, and the partners that sell the same chips under their own vendor id.

It says nothing alone: it is also on every network card, management console and root port of Huawei.
"""
VIRTUAL_FUNCTION = 0xD805
PASSED_ON = "vfio-pci"
MANAGER = "/dev/davinci_manager"
CONTROL_NODES = (MANAGER, "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist")
"""Nodes that every user of an NPU opens; which of them exist depends on the generation: the 950 lacks the last."""
DRIVER = "/usr/local/Ascend/driver"
PACKAGE = f"{DRIVER}/version.info"
HOST_PATHS = (DRIVER, "/usr/local/dcmi", npu_smi.PATH, "/etc/ascend_install.info", "/etc/hccl_rootinfo.json")
"""What Ascend's container instructions mount beside the nodes."""
FIRST_VNPU, VNPUS_PER_DEVICE = 100, 16
"""A vNPU's number is 100 + 16 times the physical number + 0 to 15."""
GROUP = "add the user to the group HwHiAiUser and log in again"
NO_NODES = (
    "The {} NPUs of this host are not mounted into this container. Start it with --runtime=ascend and"
    " -e ASCEND_VISIBLE_DEVICES=0, or with --device /dev/davinci0 and the control nodes."
)
NO_TOOL = (
    "npu-smi is not here: memory, health and exact models are unknown."
    " Add its directory to PATH, or mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container."
)


class Machine:
    """A machine as its files show it, from which the inventory is made."""

    def __init__(self, ctx: ProbeContext, found: Sequence[PciFunction]) -> None:
        """Read the files.

        Of the PCI functions, those that are set aside for virtual machines are not ours, and other virtual ones count
        only where there are no cards, as inside such a machine.
        """
        self.ctx = ctx
        virtual = [each for each in found if each.device == VIRTUAL_FUNCTION or physical_function(ctx, each.address)]
        passed = [function for function in virtual if function.driver == PASSED_ON]
        cards = [function for function in found if function not in virtual]
        cards = cards or [function for function in virtual if function not in passed]
        self.functions: Mapping[str, PciFunction] = {function.address: function for function in cards}
        addresses = ", ".join(function.address for function in passed)
        note = f"Virtual functions that are handed to virtual machines ({PASSED_ON}), not to us: {addresses}."
        self.notes = [note] if passed else []
        self.numbers = [*numbered(ctx, "/dev/davinci")]
        self.container = in_container(ctx)
        versions = re.findall(r"^(package_version|Version)=(\S+)", text(ctx, PACKAGE), re.MULTILINE)
        self.version = max(versions)[1] if versions else ""  # "package_version" comes after "Version"
        paths = {"control_nodes": CONTROL_NODES, "host_paths": HOST_PATHS}
        self.common = {name: ",".join(filter(ctx.exists, which)) for name, which in paths.items()}
        self.partial = False

    def inventory(self) -> Detected | None:
        """Find the NPUs; None when neither hardware nor driver is here.

        Raises:
            ValueError: When npu-smi prints what cannot be understood: no inventory is better than a wrong one.
        """
        cards = self._cards() if self.functions or self.numbers else []
        if not (cards or self.notes or any(map(self.ctx.exists, (MANAGER, PACKAGE)))):
            return None
        return inventory(cards, self.version, self.notes, partial=self.partial)

    def _cards(self) -> list[Card]:
        outside = [] if self.container else list(self.functions.values())  # inside, PCI shows the whole host
        if not self.numbers:
            if self.container:
                self.notes.append(NO_NODES.format(len(self.functions)))
            return self._idle(outside, Fault("the Ascend driver is not loaded", "install it, or see dmesg"))
        try:
            mapping = npu_smi.ask(self.ctx, "NPU ID", "info", "-m")
            shown = npu_smi.ask(self.ctx, "Bus-Id", "info") if mapping else None
        except FaultError as error:
            self.partial = True
            return self._idle(outside, error.fault) if outside else self._by_nodes(error.fault)
        if mapping is None or shown is None:
            self.partial = True
            self.notes.append(NO_TOOL)
            return self._by_nodes()
        table = npu_smi.parse_table(shown.stdout)
        chips, unavailable = npu_smi.parse_mapping(mapping.stdout)
        cards = self._by_tool(chips, table)
        if unavailable:
            self.notes.append(f"Cards that npu-smi calls unavailable: {unavailable}. See dmesg, and reset them.")
        if table.incomplete:
            self.notes.append(f"npu-smi warns: {npu_smi.INCOMPLETE}. Reinstall the Ascend driver.")
        self.version = self.version or table.version
        self.partial |= table.partial or bool(unavailable or mapping.returncode or shown.returncode)
        return cards

    def _card(
        self, index: int, address: str | None, node: int | None, chip: Mapped | None = None, name: str = ""
    ) -> Card:
        """Begin a card, with its number in ``/dev/davinci<N>``, and what npu-smi says of the chip and calls it.

        Its identity is its PCI address, with the chip on it where a function can carry two. Without PCI, as on pods
        with a unified bus, the number of its node takes its place: unlike the runtime's number it stays when another
        card is lost, and is the same inside a container.
        """
        function = self.functions.get(address or "")
        # Only A3 prints physical ids under the name of a chip of 2019.
        told = CATALOG.get("a3") if chip and chip.phy_id is not None and chip.name == "Ascend910" else None
        behind = [CATALOG.by_pci(each.device) for each in ([function] if function else self.functions.values())]
        known = identify(name, behind[0] if behind and behind.count(behind[0]) == len(behind) else told)
        partition = node is not None and node >= FIRST_VNPU
        place = index if node is None else (node - FIRST_VNPU) // VNPUS_PER_DEVICE if partition else node
        whole = f"ascend-davinci{place}"
        if address is not None:
            whole = f"ascend-{address}-{chip.chip if chip else 0}" if known.family == "310p" else f"ascend-{address}"
        parent = whole if known.template or partition else None
        if address is not None and function is None:  # npu-smi shows it, and sysfs does not
            function = PciFunction(address=address, vendor=VENDORS[0], device=0, class_code=PCI_CLASS)
        card = Card(self.ctx, f"{whole}-vnpu{node if partition else ''}" if parent else whole, function)
        card.index, card.model, card.parent = index, name or known.tag, parent
        card.attributes = {
            **self.common,
            "soc": known.soc,
            "family": known.family,
            "family_tag": known.tag,
            "phy_id": node,
            "template": known.template or None,
        }
        if node is not None:
            path = f"/dev/davinci{node}"
            card.nodes = (path,) if node in self.numbers else ()
            card.check_node(path, missing="restart the driver", closed=GROUP)
        return card

    def _idle(self, functions: Iterable[PciFunction], fault: Fault, first: int = 0) -> list[Card]:
        """Cards to which the runtime gives no number; ``first`` is a label that no other device has."""
        cards = []
        for index, function in enumerate(functions, first):
            card = self._card(index, function.address, None)
            card.attributes["addressable"] = False
            if function.driver == PASSED_ON:
                card.blame(f"it is bound to {PASSED_ON}, for a virtual machine", "unbind it there to use it here")
            card.blame(*fault)
            cards.append(card)
        return cards

    def _by_nodes(self, fault: Fault | None = None) -> list[Card]:
        """As many NPUs as there are nodes, numbered in the order of the nodes, where npu-smi tells nothing.

        Which node belongs to which PCI function is known to root alone, or where there is one function; elsewhere the
        node has to serve as identity, as it has where there is a fault.
        """
        addresses = {} if fault else {self._kernel_number(address): address for address in self.functions}
        if not fault and len(self.functions) == len(self.numbers) == 1:
            addresses = {self.numbers[0]: next(iter(self.functions))}
        cards = [self._card(index, addresses.get(node), node) for index, node in enumerate(self.numbers)]
        for card in cards:
            card.fault = fault or card.fault
        return cards

    def _kernel_number(self, address: str) -> int | None:
        """The number in ``/dev/davinci<N>`` of a PCI function that has a single chip; only root may read it."""
        if number(self.ctx, f"{PCI_DEVICES}/{address}/davinci_dev_num") != 1:
            return None
        return number(self.ctx, f"{PCI_DEVICES}/{address}/dev_id")

    def _by_tool(self, chips: Sequence[Mapped], table: Table) -> list[Card]:
        rows = [table.chips.get((chip.card, chip.chip)) for chip in chips]
        unread = rows.count(None)
        claimed = {row.bus_id for row in rows if row is not None}
        unclaimed = [function for address, function in self.functions.items() if address not in claimed]
        missing = [function for function in unclaimed if function.driver != PASSED_ON]
        alone = missing[0].address if len(missing) == unread == 1 and not self.container else None
        self.partial |= unread > 0
        cards = []
        for place, (chip, row) in enumerate(zip(chips, rows, strict=True)):
            node = self._physical(place, chip, row, len(chips))
            cards.append(self._chip(chip, row, node, row.bus_id if row else alone))
        for identity, count in Counter(card.id for card in cards).items():
            if count > 1:
                raise ValueError(
                    f"'npu-smi info' must show each chip at an address of its own (got {identity!r} {count} times);"
                    " restart the driver"
                )
        self._connect(cards)
        if not self.container:
            lost = [function for function in unclaimed if function.driver == PASSED_ON or len(missing) > unread]
            fault = Fault("it is on the PCI bus and the driver has lost it", "see dmesg, and power-cycle the machine")
            cards += self._idle(lost, fault, len(cards))
        return cards + self._partitions(cards)

    def _physical(self, place: int, chip: Mapped, row: Shown | None, count: int) -> int | None:
        """Physical number of a chip: printed, else from the nodes that are here, else from sysfs.

        The driver numbers what a container may use by ascending physical number (uda_init_ns_node_dev in its source),
        so as many nodes as chips are in the same order. Otherwise the physical number stays unknown: a guess would
        open somebody else's node.
        """
        if chip.phy_id is not None:
            return chip.phy_id
        if len(self.numbers) == count:
            return self.numbers[place]
        return self._kernel_number(row.bus_id) if row and row.bus_id else None

    def _chip(self, chip: Mapped, row: Shown | None, node: int | None, address: str | None) -> Card:
        card = self._card(chip.logic_id, address, node, chip, row.name if row else chip.name)
        card.attributes |= {"card": chip.card, "chip": chip.chip}
        card.sound = True
        if row is None:
            card.blame("npu-smi lists it and cannot read it", "see dmesg, and reset it with 'npu-smi set -t reset'")
            return card
        card.memory_bytes = row.memory_bytes
        if row.fault:
            card.blame(*row.fault)
        if row.health == "Warning":
            card.attributes["warning"] = "npu-smi reports a minor fault (Warning); it can still be used"
            self.notes.append(f"{card.id}: {card.attributes['warning']}.")
        return card

    def _connect(self, cards: Sequence[Card]) -> None:
        """Add the connections, where npu-smi tells them; without them the NPUs work all the same."""
        matrix = npu_smi.parse_topology(self._told(cards[1:], "Legend", "topo"))
        ids = {f"NPU{card.index}": card.id for card in cards}
        ids |= {f"Phy-ID{card.attributes['phy_id']}": card.id for card in cards}
        for row, strengths in matrix.items():
            for card in cards:
                if card.id == ids.get(row):
                    card.links = {ids[other]: strength for other, strength in strengths.items() if other in ids}

    def _told(self, wanted: object, marker: str, topic: str, *where: str) -> str:
        """What npu-smi tells of a topic that inventories can do without; empty when it tells nothing."""
        try:
            answer = npu_smi.ask(self.ctx, marker, "info", "-t", topic, *where) if wanted else None
        except ValueError:
            return ""
        return answer.stdout if answer else ""

    def _partitions(self, cards: Sequence[Card]) -> list[Card]:
        """The vNPUs that this host offers to its containers; the chips that they are on go out of use.

        A vNPU is ``/dev/vdavinci<N>`` here and ``/dev/davinci<N>`` in the container that it is given to, where the
        runtime numbers it like a whole NPU.
        """
        numbers = [node for node in numbered(self.ctx, "/dev/vdavinci") if node >= FIRST_VNPU]
        found: list[Card] = []
        for card in cards:
            physical = card.attributes.get("phy_id")
            mine = [node for node in numbers if (node - FIRST_VNPU) // VNPUS_PER_DEVICE == physical]
            if not mine:
                continue
            number, chip = str(card.attributes["card"]), str(card.attributes["chip"])
            templates = npu_smi.parse_vnpus(self._told(mine, "Vnpu ID", "info-vnpu", "-i", number, "-c", chip))
            found += [
                self._vnpu(card, node, len(cards) + len(found) + place, templates.get(node, ""))
                for place, node in enumerate(mine)
            ]
            undo = f"npu-smi set -t destroy-vnpu -i {number} -c {chip} -v {mine[0]}"
            card.blame(
                f"it is split into the vNPUs {', '.join(map(str, mine))}",
                f"ask for those, or remove them with '{undo}'",
            )
            card.attributes["split"] = True
        return found

    def _vnpu(self, parent: Card, node: int, index: int, template: str) -> Card:
        """A vNPU; npu-smi tells its template to root alone."""
        card = copy(parent)
        card.id, card.index, card.parent = f"{parent.id}-vnpu{node}", index, parent.id
        card.model, card.links, card.nodes = f"{parent.model} {template or 'vNPU'}", {}, (f"/dev/vdavinci{node}",)
        card.memory_bytes = template_memory(template, str(parent.attributes["family"]), parent.memory_bytes)
        card.attributes = parent.attributes | {"phy_id": None, "warning": None, "addressable": False}
        card.attributes |= {"template": template or "vnpu", "vnpu_id": node}
        return card
