"""What a vendor says about itself and about the devices that it found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from anyaccel.model._value import Value, field, replace

UNITS_PER_DEVICE = 10_000
"""Quantities are exact integers of 1/10000 of a device, so that shares never drift."""

MOST_SLOTS = 32
"""Most slots of one device: more would not fit into the name of a lease."""

Attribute = str | int | float | bool


class Health(Enum):
    """Whether a device can be used: unknown and healthy devices are given out, unhealthy ones are not."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class Fractional(Enum):
    """Whether several holders may share one device, and who keeps them apart.

    Falsy when the device is given out whole only.
    """

    NO = "no"
    """Whole only: the hardware or its runtime admits one holder."""
    SHARED = "shared"
    """Several holders by agreement: nothing but their own restraint limits them."""
    PARTITIONED = "partitioned"
    """Several holders, kept apart by the hardware."""

    def __bool__(self) -> bool:
        return self is not Fractional.NO


class Device(Value):
    """One thing that can be given to a worker: a card, a chip, a core or a partition.

    A plug-in's ``anyaccel_detect`` fills the first group of fields. The core fills the second group from the
    plug-in's other hooks; what a plug-in puts there is overwritten.

    Attributes:
        id: Stable identity, unique on the machine, the same after a reboot where the hardware allows it: a UUID or a
            PCI address, never the index. Printable ASCII without space, comma or quote, at most 128 characters.
        index: Position in the order in which the vendor's runtime numbers the devices, unique within the vendor.
        model: The vendor's raw product name.
        memory_bytes: Memory of the device, or None when unknown.
        pci_bus_id: PCI address ``dddd:bb:dd.f`` in lower case, or None.
        numa_node: NUMA node of the host that is nearest, or None when unknown.
        parent: Id of the physical device that this one is a part of, or None. The parent need not be listed. It and its
            parts are never both given out.
        slots: Number of equal parts that shares of it consist of, where the hardware can say which parts a holder gets:
            a share is a set of these slots, numbered from 0. Only for a device that is ``PARTITIONED``; a divisor of
            10000 up to 32, so that each slot is a whole number of 1/10000. 1 where shares have no position.
        links: Strength of the connection to other devices by id. Only the order of the numbers counts: higher is
            better, absent is 0 (only through the host).
        nodes: Paths of the device nodes that a holder opens.
        occupies: The physical parts that it consists of, each by its directory below ``/sys``, as the host names it.
            Empty where the same hardware is always divided into the same devices. Where a setting of each user's
            decides that, ids differ between users and parts do not: leases count and lock the parts. No two devices of
            one detection have a part in common.
        health: Whether the device can be used.
        health_reason: Why it is unhealthy, in a clause about the device.
        health_remedy: What to do about it, as a command or a clause; empty when it is usable, or nobody knows.
        attributes: Further facts of the vendor's choice, by lower-case name.

        vendor: Key of the vendor whose plug-in reported it, or ``declared``.
        resource: Resource under which it is counted.
        kind: Kind of accelerator.
        tags: Accelerator-type tags, most canonical first.
        fractional: Whether shares of it can be held.
        visible: Whether the environment we started in leaves it to us.
        order: Position in the order in which devices of the vendor are handed out.
        declared: True when somebody declared it and no plug-in found it.
        labels: What the administrator or a program calls it, for requests to choose by: values by key, an empty one for
            a label without a value. See :func:`anyaccel.label`.
        units: How much of it is ours to hand out, in 1/10000: all of it, or less inside a worker that holds a share.
        own_slots: Which of its slots are ours to hand out, where these are not all; else empty.
    """

    id: str
    index: int
    model: str
    memory_bytes: int | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    parent: str | None = None
    slots: int = 1
    links: Mapping[str, int] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    occupies: tuple[str, ...] = ()
    health: Health = Health.UNKNOWN
    health_reason: str = ""
    health_remedy: str = ""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    vendor: str = ""
    resource: str = ""
    kind: str = ""
    tags: tuple[str, ...] = ()
    fractional: Fractional = Fractional.NO
    visible: bool = True
    order: int = 0
    declared: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    units: int = UNITS_PER_DEVICE
    own_slots: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What people call it on its machine, and can ask for: ``acme/3``."""
        return f"{self.vendor}/{self.index}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it goes by, with others: its resource, its vendor, and its accelerator-type tags."""
        return tuple(filter(None, (self.resource, self.vendor, *self.tags)))

    @property
    def type(self) -> str:
        """The canonical accelerator type: the first tag, or the model where there is none."""
        return self.tags[0] if self.tags else self.model

    @property
    def raw_id(self) -> str:
        """The id as its vendor knows it: :attr:`id` begins with ``vendor/`` where two vendors use the same one."""
        return self.id.removeprefix(f"{self.vendor}/")

    @property
    def usable(self) -> bool:
        """Whether the device may be given out: visible to us and not known to be broken."""
        return self.visible and self.health is not Health.UNHEALTHY

    def rounded(self, units: int) -> int:
        """Units of the smallest share that has at least so many: whole slots, where the device has slots."""
        slot = UNITS_PER_DEVICE // self.slots if self.slots > 1 else 1
        return -(-units // slot) * slot

    def narrowed(self, slots: Iterable[int]) -> Device:
        """The same device of which some slots at most are ours."""
        mine = tuple(sorted(set(slots).intersection(self.own_slots or range(self.slots))))
        if len(mine) == self.slots:
            return self
        units = min(self.units, len(mine) * (UNITS_PER_DEVICE // self.slots))
        return replace(self, own_slots=mine, units=units, visible=self.visible and bool(mine))


class VisiblePart(Value):
    """Some slots of a device, which an environment leaves visible while it hides the others.

    Attributes:
        id: Id of the device.
        slots: The slots, at least one.
    """

    id: str
    slots: tuple[int, ...]


def slots_by_id(visible: Sequence[str | VisiblePart] | None) -> dict[str, tuple[int, ...]] | None:
    """Return the visible slots of each device that ``anyaccel_visible`` names, in its order.

    Args:
        visible: The answer of the hook.

    Returns:
        Slots by device id, none for a device that is visible as a whole; None where nothing is hidden.
    """
    if visible is None:
        return None
    parts = (item if isinstance(item, VisiblePart) else VisiblePart(id=item, slots=()) for item in visible)
    return {part.id: part.slots for part in parts}


class Detected(Value):
    """What ``anyaccel_detect`` found.

    Attributes:
        devices: The devices, in any order. Empty means: the driver is here, no device is.
        driver_version: Version of the kernel driver, or an empty string when unknown.
        partial: True when some devices could not be read and the rest is usable.
        notes: Sentences that people should see, such as a warning about the driver.
    """

    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    partial: bool = False
    notes: tuple[str, ...] = ()


class Product(Value):
    """A product that a vendor's plug-in knows without having the hardware.

    Products feed simulation, name completion and the documentation.

    Attributes:
        name: The accelerator-type tag by which people ask for it, equal to the first tag of its devices.
        model: Raw name that detection would report.
        memory_bytes: Memory of one device, or None.
        counts: Numbers of devices that one machine of this product has, smallest first.
        aliases: Other names by which it is known.
        id_template: Form of a device's id. ``{uuid}``, ``{index}`` and ``{pci}`` are replaced by the simulation; the
            result must be unique on the machine, also beside other vendors' devices.
        node_templates: Forms of the device nodes, with ``{index}``.
        link: Strength of the connection between any two devices of one machine.
        attributes: Attributes that detection would report. The plug-in's pure hooks must need no others.
        slots: Number of slots of a device; see :attr:`Device.slots`.
        parts: Products that a device can be divided into, by name, with how many of each it makes.
        constants: Names under which :mod:`anyaccel.accelerators` offers its tags: ``ACME_ONE`` for ``Acme-One``.
        instance_types: Cloud instance types that carry it, with the number of devices of each.
    """

    name: str
    model: str
    memory_bytes: int | None = None
    counts: tuple[int, ...] = (1,)
    aliases: tuple[str, ...] = ()
    id_template: str = "{uuid}"
    node_templates: tuple[str, ...] = ()
    link: int = 0
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    slots: int = 1
    parts: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    instance_types: Mapping[str, int] = field(default_factory=dict)
