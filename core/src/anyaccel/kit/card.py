"""A device during detection: an unreadable fact becomes a fault of this device alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from anyaccel.kit.catalog import Entry
from anyaccel.kit.fault import Fault, condition
from anyaccel.kit.files import PCI_DEVICES, host_memory, number
from anyaccel.plugin import Device, Health, PciFunction, ProbeContext

UNIFIED = "unified_memory"
"""Attribute of a device without memory of its own; see :meth:`Card.use_host_memory`."""
Attribute = str | int | float | bool


class Card:
    """A device during detection: a PCI function, or anything else in the driver's lists.

    Everything but ``id`` may be filled in step by step. :meth:`device` builds the device of the inventory.

    Attributes:
        ctx: The machine.
        id: Stable identity of the device.
        function: The PCI function; None for a device that is not on PCI, or whose address is unknown.
        entry: The product in the catalog, or None.
        folders: Directories in which :meth:`read` looks for a file, in this order.
        number: Number that the vendor's runtime gives the device; None while unknown.
        index: Position among the vendor's devices; set by :meth:`anyaccel.kit.Vendor.arrange`.
        model: Product name; the catalog's when empty.
        memory_bytes: Memory, or None.
        nodes: Paths of the device nodes. The node that a holder opens comes first.
        parent: Id of the device of which this device is a part, or None.
        slots: Number of equal parts from which shares are built; see :class:`~anyaccel.plugin.Device`.
        links: Strength of the connections to other devices, by id of the other device.
        occupies: Directories in sysfs of the physical parts of the device.
        attributes: Further facts. Facts that are None are left out of the inventory.
        fault: Why the device cannot be used: the first fault that was found.
        doubt: Why it is unknown whether the device can be used, such as a contradiction between driver and tool; or
            None.
        sound: Whether driver or tool confirmed that the device works. With neither confirmation nor fault, the health
            is unknown.
        partial: Whether facts of the device are missing because a file could not be read.
    """

    def __init__(
        self,
        ctx: ProbeContext,
        id: str,  # noqa: A002 - the name of the field that it fills
        function: PciFunction | None = None,
        *,
        entry: Entry | None = None,
        unreadable: str = "",
    ) -> None:
        """Start with a device of which only the id, and perhaps the PCI function, is known.

        Args:
            ctx: The machine.
            id: Stable identity of the device.
            function: The PCI function.
            entry: The product in the catalog.
            unreadable: Remedy for a file of the device that exists and cannot be read.
        """
        self.ctx = ctx
        self.id = id
        self.function = function
        self.entry = entry
        self.folders = [f"{PCI_DEVICES}/{function.address}"] if function else []
        self.number: int | None = None
        self.index = 0
        self.model = ""
        self.memory_bytes: int | None = None
        self.nodes: tuple[str, ...] = ()
        self.parent: str | None = None
        self.slots = 1
        self.links: Mapping[str, int] = {}
        self.occupies: tuple[str, ...] = ()
        self.attributes: dict[str, Attribute | None] = {}
        self.fault: Fault | None = None
        self.doubt: Fault | None = None
        self.sound = False
        self.partial = False
        self._unreadable = unreadable

    @property
    def address(self) -> str | None:
        """PCI address of the device, or None."""
        return self.function.address if self.function else None

    @property
    def revision(self) -> int | None:
        """PCI revision of the device, or None."""
        return number(self.ctx, f"{PCI_DEVICES}/{self.function.address}/revision") if self.function else None

    def read(self, name: str) -> str | None:
        """Read a file of the device, stripped, from the first folder that has the file.

        Returns:
            The text. None if the file is missing, empty or unreadable; an unreadable file is a fault of the device.
        """
        try:
            for folder in self.folders:
                found = (self.ctx.read(f"{folder}/{name}") or "").strip()
                if found:
                    return found
        except OSError as error:
            self.blame(f"its sysfs files cannot be read ({error.strerror or error})", self._unreadable, partial=True)
        return None

    def glob(self, pattern: str) -> list[str]:
        """List the paths that match a shell pattern below the first folder."""
        return self.ctx.glob(f"{self.folders[0]}/{pattern}") if self.folders else []

    def drm_nodes(self) -> tuple[str, ...]:
        """List the device's nodes in ``/dev/dri``, the render node first."""
        names = (path.rpartition("/")[2] for path in self.glob("drm/*"))
        own = [name for name in names if re.fullmatch(r"(renderD|card)\d+", name)]
        # Reverse order puts "renderD128" before "card0".
        return tuple(f"/dev/dri/{name}" for name in sorted(own, reverse=True))

    def use_host_memory(self) -> None:
        """Record that the device has no memory of its own: its memory, and the use of it, are the host's."""
        self.memory_bytes, self.attributes[UNIFIED] = host_memory(self.ctx), True

    def blame(self, reason: str, remedy: str = "", *, partial: bool = False) -> None:
        """Record why the device cannot be used. Only the first reason is kept.

        Args:
            reason: What is wrong, in a clause about the device.
            remedy: What to do about it.
            partial: Whether facts of the device are missing because of it.
        """
        # The first fault is the cause in most cases; faults found later follow from it.
        self.partial |= partial
        if self.fault is None:
            self.fault = Fault(reason, remedy)

    def check_node(self, path: str, *, missing: str = "", closed: str = "", partial: bool = False) -> None:
        """Blame the device if this user cannot open a device node. The node itself is not opened.

        Opening a node would take a device that has one holder only.

        Args:
            path: Where the node should be.
            missing: Remedy for a missing node, beside passing the node to a container.
            closed: Remedy for missing permission, if the vendor has a group or rule for it.
            partial: Whether facts of the device are missing because of the fault.
        """
        node = self.ctx.node(path)
        if node is None:
            remedy = f"pass it to this container{', or ' if missing else ''}{missing}"
            self.blame(f"its device node {path} is missing", remedy, partial=partial)
        # Runtimes open nodes for reading and writing; one of the two is as good as none.
        elif not (node.readable and node.writable):
            remedy = closed or "ask the administrator for read and write permission on it"
            self.blame(f"you may not open {path}", remedy, partial=partial)

    @property
    def health(self) -> Health:
        """Health of the device as far as detection saw."""
        return condition(self.fault, sound=self.sound, doubt=self.doubt)["health"]

    def device(self) -> Device:
        """Build the device of the inventory."""
        return Device(
            id=self.id,
            index=self.index,
            model=self.model,
            memory_bytes=self.memory_bytes,
            pci_bus_id=self.address,
            numa_node=self.function.numa_node if self.function else None,
            parent=self.parent,
            slots=self.slots,
            links=self.links,
            nodes=self.nodes,
            occupies=self.occupies,
            **condition(self.fault, sound=self.sound, doubt=self.doubt),
            attributes={name: fact for name, fact in self.attributes.items() if fact is not None},
        )


def board_links(cards: Mapping[int, Card]) -> None:
    """Link the cards of a board that connects each card with each other, by positions on the board."""
    for one, card in cards.items():
        card.links = {
            other.id: 3 if one // 2 == place // 2 else 2 if one // 4 == place // 4 else 1
            for place, other in sorted(cards.items())
            if place != one
        }
