"""A device while it is looked at: what cannot be read becomes its own fault and costs no other device."""

from __future__ import annotations

import re
from collections.abc import Mapping

from anyaccel.kit.catalog import Entry
from anyaccel.kit.fault import Fault, condition
from anyaccel.kit.files import PCI_DEVICES
from anyaccel.plugin import Device, Health, PciFunction, ProbeContext

Attribute = str | int | float | bool


class Card:
    """One device of a vendor on its way into the inventory: a PCI function, or whatever a vendor's driver lists.

    Everything but ``id`` may be filled in step by step; :meth:`device` makes the value for the inventory.

    Attributes:
        ctx: The machine.
        id: Stable identity of the device.
        function: Its PCI function; None where it is not on PCI, or nothing tells.
        entry: What the catalog says about it, or None.
        folders: Directories in which :meth:`read` looks for a file, in this order.
        number: Number that the vendor's runtime gives it; None while it is unknown.
        index: Position among the vendor's devices; set by :meth:`anyaccel.kit.Vendor.arrange`.
        model: Product name; the catalog's when empty.
        memory_bytes: Memory, or None.
        nodes: Paths of its device nodes, the one that a holder opens first.
        parent: Id of the device that it is a part of, or None.
        slots: Number of equal parts that shares of it consist of; see :class:`~anyaccel.plugin.Device`.
        links: Strength of the connections to other devices by id.
        occupies: Directories of the physical parts that it consists of.
        attributes: Further facts; those that are None are left out of the inventory.
        fault: Why it cannot be used: the first fault that was met.
        sound: Whether something said that it works. Without that, and without a fault, its health is unknown.
        partial: Whether some of its facts could not be read.
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
        """Begin to look at a device.

        Args:
            ctx: The machine.
            id: Stable identity of the device.
            function: Its PCI function.
            entry: What the catalog says about it.
            unreadable: What to do when one of its files is there and cannot be read.
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
        self.sound = False
        self.partial = False
        self._unreadable = unreadable

    @property
    def address(self) -> str | None:
        """Its PCI address, or None."""
        return self.function.address if self.function else None

    def read(self, name: str) -> str | None:
        """Read a file of the device from the first of its folders that has it, stripped.

        Returns:
            The text; None when there is no such file, it is empty, or it cannot be read, which is a fault.
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
        """List the paths that match a shell pattern below the first of its folders."""
        return self.ctx.glob(f"{self.folders[0]}/{pattern}") if self.folders else []

    def drm_nodes(self) -> tuple[str, ...]:
        """The nodes that the kernel's graphics subsystem made for it, in ``/dev/dri``: the render node first."""
        names = (path.rpartition("/")[2] for path in self.glob("drm/*"))
        own = [name for name in names if re.fullmatch(r"(renderD|card)\d+", name)]
        return tuple(f"/dev/dri/{name}" for name in sorted(own, reverse=True))

    def blame(self, reason: str, remedy: str = "", *, partial: bool = False) -> None:
        """Say why the device cannot be used. The first reason stays.

        Args:
            reason: What is wrong, in a clause about the device.
            remedy: What to do about it.
            partial: Whether facts of the device are missing because of it.
        """
        self.partial |= partial
        if self.fault is None:
            self.fault = Fault(reason, remedy)

    def check_node(self, path: str, *, missing: str = "", closed: str = "", partial: bool = False) -> None:
        """Blame the device when this user cannot open one of its nodes, as far as that shows without opening it.

        Args:
            path: Where the node should be.
            missing: What to do beside passing it to a container, when it is not there.
            closed: What to do when it may not be opened, where the vendor has a group or a rule for it.
            partial: Whether facts of the device are missing because of it.
        """
        node = self.ctx.node(path)
        if node is None:
            remedy = f"pass it to this container{', or ' if missing else ''}{missing}"
            self.blame(f"its device node {path} is missing", remedy, partial=partial)
        elif not (node.readable and node.writable):
            remedy = closed or "ask the administrator for read and write permission on it"
            self.blame(f"you may not open {path}", remedy, partial=partial)

    @property
    def health(self) -> Health:
        """Whether the device can be used, as far as was seen."""
        return condition(self.fault, sound=self.sound)["health"]

    def device(self) -> Device:
        """Make the value for the inventory."""
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
            **condition(self.fault, sound=self.sound),
            attributes={name: fact for name, fact in self.attributes.items() if fact is not None},
        )


def board_links(cards: Mapping[int, Card]) -> None:
    """Link the cards of a board that joins all of them to each other, by their positions on it.

    The strengths make placement prefer pairs (0,1 / 2,3 ...) and groups of four (0-3 / 4-7 ...), which vendors
    recommend for jobs that share a board: 3 within a pair, 2 within a group of four, else 1.
    """
    for one, card in cards.items():
        card.links = {
            other.id: 3 if one // 2 == place // 2 else 2 if one // 4 == place // 4 else 1
            for place, other in sorted(cards.items())
            if place != one
        }
