"""Detection: the kernel's files first, then npu-smi, the only source of the runtime's numbers."""

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
"""Nodes for every user of an NPU. The 950 lacks the last."""
DRIVER = "/usr/local/Ascend/driver"
PACKAGE = f"{DRIVER}/version.info"
HOST_PATHS = (DRIVER, "/usr/local/dcmi", npu_smi.PATH, "/etc/ascend_install.info", "/etc/hccl_rootinfo.json")
"""Paths in Ascend's container instructions, beside the nodes."""
FIRST_VNPU, VNPUS_PER_DEVICE = 100, 16
"""The number of a vNPU is 100 + 16 times the physical number + 0 to 15."""
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
    """The files of a machine, from which the inventory is built."""

    def __init__(self, ctx: ProbeContext, found: Sequence[PciFunction]) -> None:
        """Read the files.

        Functions that are reserved for virtual machines are left out. Other virtual functions count only without cards,
        as inside a virtual machine.
        """
        self.ctx = ctx
        virtual = [each for each in found if each.device == VIRTUAL_FUNCTION or physical_function(ctx, each.address)]
        passed = [function for function in virtual if function.driver == PASSED_ON]
        cards = [function for function in found if function not in virtual]
        # Inside a virtual machine the only function is a virtual one.
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
        """Find the NPUs; None without hardware and driver.

        Raises:
            ValueError: The output of npu-smi is malformed: no inventory is better than a wrong one.
        """
        cards = self._cards() if self.functions or self.numbers else []
        if not (cards or self.notes or any(map(self.ctx.exists, (MANAGER, PACKAGE)))):
            return None
        return inventory(cards, self.version, self.notes, partial=self.partial)

    def _cards(self) -> list[Card]:
        # In a container, PCI shows the whole host.
        outside = [] if self.container else list(self.functions.values())
        if not self.numbers:
            if self.container:
                self.notes.append(NO_NODES.format(len(self.functions)))
            return self._idle(outside, Fault("the Ascend driver is not loaded", "install it, or see dmesg"))
        try:
            # The mapping first: without the runtime's numbers the table is useless.
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
        """Start a card, with its number in ``/dev/davinci<N>``, and npu-smi's facts and name of the chip.

        The identity is the PCI address, with the chip if a function can carry two. Without PCI, as on pods with a
        unified bus, the number of the node takes its place: unlike the runtime's number it stays if another card is
        lost, and is the same inside a container.
        """
        function = self.functions.get(address or "")
        # A chip of 2019 has the same name, but only A3 prints physical ids.
        told = CATALOG.get("a3") if chip and chip.phy_id is not None and chip.name == "Ascend910" else None
        # Without an address of its own, the family of the machine's functions counts if there is only one.
        behind = [CATALOG.by_pci(each.device) for each in ([function] if function else self.functions.values())]
        known = identify(name, behind[0] if behind and behind.count(behind[0]) == len(behind) else told)
        partition = node is not None and node >= FIRST_VNPU
        place = index if node is None else (node - FIRST_VNPU) // VNPUS_PER_DEVICE if partition else node
        whole = f"ascend-davinci{place}"
        if address is not None:
            whole = f"ascend-{address}-{chip.chip if chip else 0}" if known.family == "310p" else f"ascend-{address}"
        parent = whole if known.template or partition else None
        if address is not None and function is None:  # known to npu-smi, hidden in sysfs
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
        """Build cards without a number in the runtime; ``first`` is a free label."""
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
        """Build a card per node, numbered in the order of the nodes, without npu-smi.

        Only root can read which node belongs to which PCI function, unless there is a single function. Otherwise, and
        after a fault, the node serves as identity.
        """
        addresses = {} if fault else {self._kernel_number(address): address for address in self.functions}
        if not fault and len(self.functions) == len(self.numbers) == 1:
            addresses = {self.numbers[0]: next(iter(self.functions))}
        cards = [self._card(index, addresses.get(node), node) for index, node in enumerate(self.numbers)]
        for card in cards:
            card.fault = fault or card.fault
        return cards

    def _kernel_number(self, address: str) -> int | None:
        """Read the number in ``/dev/davinci<N>`` of a PCI function with a single chip; only root may."""
        # With several chips behind a function, dev_id is the number of the first one.
        if number(self.ctx, f"{PCI_DEVICES}/{address}/davinci_dev_num") != 1:
            return None
        return number(self.ctx, f"{PCI_DEVICES}/{address}/dev_id")

    def _by_tool(self, chips: Sequence[Mapped], table: Table) -> list[Card]:
        rows = [table.chips.get((chip.card, chip.chip)) for chip in chips]
        unread = rows.count(None)
        claimed = {row.bus_id for row in rows if row is not None}
        unclaimed = [function for address, function in self.functions.items() if address not in claimed]
        missing = [function for function in unclaimed if function.driver != PASSED_ON]
        # A single chip without a row, and a single function without a chip, belong together.
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
        """Return the physical number of a chip: printed, else by the order of the nodes, else from sysfs.

        The driver numbers a container's NPUs by ascending physical number (uda_init_ns_node_dev in its source), so as
        many nodes as chips are in the same order. Otherwise the number stays unknown: a guess could open another user's
        node.
        """
        if chip.phy_id is not None:
            return chip.phy_id
        # Equal counts: both lists are ascending, so positions correspond.
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
        # A minor fault; the NPU works and npu-smi keeps listing it.
        if row.health == "Warning":
            card.attributes["warning"] = "npu-smi reports a minor fault (Warning); it can still be used"
            self.notes.append(f"{card.id}: {card.attributes['warning']}.")
        return card

    def _connect(self, cards: Sequence[Card]) -> None:
        """Add the links between NPUs if npu-smi reports the topology."""
        matrix = npu_smi.parse_topology(self._ask_optional(cards[1:], "Legend", "topo"))
        ids = {f"NPU{card.index}": card.id for card in cards}
        ids |= {f"Phy-ID{card.attributes['phy_id']}": card.id for card in cards}
        for row, strengths in matrix.items():
            for card in cards:
                if card.id == ids.get(row):
                    card.links = {ids[other]: strength for other, strength in strengths.items() if other in ids}

    def _ask_optional(self, wanted: object, marker: str, topic: str, *where: str) -> str:
        """Return npu-smi's output on an optional topic; empty without an answer."""
        try:
            answer = npu_smi.ask(self.ctx, marker, "info", "-t", topic, *where) if wanted else None
        except ValueError:
            return ""
        return answer.stdout if answer else ""

    def _partitions(self, cards: Sequence[Card]) -> list[Card]:
        """Build the vNPUs that this host offers to containers, and blame the chips below.

        A vNPU is ``/dev/vdavinci<N>`` here and ``/dev/davinci<N>`` in its container, where the runtime numbers it like
        a whole NPU.
        """
        numbers = [node for node in numbered(self.ctx, "/dev/vdavinci") if node >= FIRST_VNPU]
        found: list[Card] = []
        for card in cards:
            physical = card.attributes.get("phy_id")
            # The number of a vNPU contains the physical number of its chip.
            mine = [node for node in numbers if (node - FIRST_VNPU) // VNPUS_PER_DEVICE == physical]
            if not mine:
                continue
            number, chip = str(card.attributes["card"]), str(card.attributes["chip"])
            templates = npu_smi.parse_vnpus(self._ask_optional(mine, "Vnpu ID", "info-vnpu", "-i", number, "-c", chip))
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
        """Build a vNPU; npu-smi shows its template to root alone."""
        card = copy(parent)
        card.id, card.index, card.parent = f"{parent.id}-vnpu{node}", index, parent.id
        card.model, card.links, card.nodes = f"{parent.model} {template or 'vNPU'}", {}, (f"/dev/vdavinci{node}",)
        card.memory_bytes = template_memory(template, str(parent.attributes["family"]), parent.memory_bytes)
        card.attributes = parent.attributes | {"phy_id": None, "warning": None, "addressable": False}
        card.attributes |= {"template": template or "vnpu", "vnpu_id": node}
        return card
