"""Devices and products, as a vendor describes them; and how much of devices is asked for, given and held.

A request has terms, which are served together or not at all; an allocation has the devices of a request; an extent is
the held part of one device, with its slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import reduce
from operator import or_

from anyaccel._typing import NamedTuple
from anyaccel.model.value import Value, field, replace
from anyaccel.text import html_table, memory, size

UNITS_PER_DEVICE = 10_000
"""Quantities are exact integers of 1/10000 of a device, so that shares never drift."""

MOST_SLOTS = 32
"""Most slots of one device: more would not fit into the name of a lease."""

PCI_DEVICES = "/sys/bus/pci/devices"
"""Directory in which the kernel lists PCI functions by address."""
PCI_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
"""Address of a PCI function. Linux writes a domain with 4 digits or more: domains of VMD controllers begin at 10000."""

Attribute = str | int | float | bool


class Health(Enum):
    """Whether a device can be used. An unhealthy device is not given out; a device of unknown health is."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class Fractional(Enum):
    """Whether several holders may share a device, and how they are separated.

    False when a device has one holder only.
    """

    NO = "no"
    """One holder only, by the hardware or its runtime."""
    SHARED = "shared"
    """Several holders by agreement, without enforcement."""
    PARTITIONED = "partitioned"
    """Several holders, separated by the hardware."""

    def __bool__(self) -> bool:
        return self is not Fractional.NO


class Device(Value):
    """A device for workers: a card, a chip, a core or a partition.

    A plug-in's ``anyaccel_detect`` fills the first group of fields. The core fills the second group from the
    plug-in's other hooks; what a plug-in puts there is overwritten.

    Attributes:
        id: Stable identity, unique on the machine, and constant over reboots where the hardware allows: a UUID or a PCI
            address, never the index. Printable ASCII without space, comma or quote, at most 128 characters.
        index: Position in the order in which the vendor's runtime numbers the devices, unique within the vendor.
        model: The vendor's raw product name.
        memory_bytes: Memory of the device, or None when unknown.
        pci_bus_id: PCI address ``dddd:bb:dd.f`` in lower case, or None.
        numa_node: Nearest NUMA node of the host, or None when unknown.
        parent: Id of the physical device of which this device is a part, or None. The parent need not be listed. A
            parent and its parts are never given out together.
        slots: Number of equal parts of a ``PARTITIONED`` device whose hardware can assign given parts: a share is a set
            of slots, numbered from 0. A divisor of 10000 up to 32, so that each slot is a whole number of 1/10000. 1
            where shares have no position.
        links: Strength of the connection to other devices, by id. Only the order of the numbers counts: higher is
            better, absent is 0 (only through the host).
        nodes: Paths of the device nodes that a holder opens.
        occupies: The physical parts of the device, each by its directory below ``/sys``. Empty where the hardware is
            always divided into the same devices. Where a user's setting decides the division, device ids differ between
            users and parts do not, so leases count and lock the parts. Devices of one detection have no part in common.
        health: Whether the device can be used.
        health_reason: Reason why the device is unhealthy, in a clause.
        health_remedy: The way out, as a command or a clause; empty for a usable device, and when unknown.
        attributes: Further facts of the vendor's choice, by lower-case name.

        vendor: Key of the vendor, or ``declared``.
        resource: Name under which schedulers count the device.
        kind: Kind of accelerator.
        tags: Accelerator-type tags, most canonical first.
        fractional: Whether several holders may share the device.
        visible: Whether the environment of this process leaves the device visible.
        order: Position in the order in which devices of the vendor are handed out.
        declared: True for a device that was declared and not found.
        labels: Labels of the administrator or a program, for requests to choose by: values by key, an empty value for a
            label without a value. See :func:`anyaccel.label`.
        units: Part of the device that this process may hand out, in 1/10000: less than all inside a worker with a
            share.
        own_slots: Slots that this process may hand out; empty for all slots.
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
        """Name of the device on its machine, which requests accept: ``acme/3``."""
        return f"{self.vendor}/{self.index}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names that the device has in common with others: resource, vendor, and accelerator-type tags."""
        return tuple(filter(None, (self.resource, self.vendor, *self.tags)))

    @property
    def type(self) -> str:
        """The canonical accelerator type: the first tag, or the model without tags."""
        return self.tags[0] if self.tags else self.model

    @property
    def raw_id(self) -> str:
        """The id of the vendor: :attr:`id` begins with ``vendor/`` where two vendors use the same id."""
        return self.id.removeprefix(f"{self.vendor}/")  # no vendor may use such an id itself: the contract refuses it

    @property
    def usable(self) -> bool:
        """Whether the device may be given out: visible and not unhealthy."""
        return self.visible and self.health is not Health.UNHEALTHY

    def rounded(self, units: int) -> int:
        """Round units up to the next share that the device can have: to whole slots, where it has slots."""
        slot = UNITS_PER_DEVICE // self.slots if self.slots > 1 else 1  # exact: slots divide 10000
        return -(-units // slot) * slot  # rounded up, in integers

    def narrowed(self, slots: Iterable[int]) -> Device:
        """Return the device with at most the given slots to hand out."""
        mine = tuple(sorted(set(slots).intersection(self.own_slots or range(self.slots))))
        if len(mine) == self.slots:
            return self
        # Never more than before: an outer worker may hold less than these slots.
        units = min(self.units, len(mine) * (UNITS_PER_DEVICE // self.slots))
        return replace(self, own_slots=mine, units=units, visible=self.visible and bool(mine))


class VisiblePart(Value):
    """The slots of a device that an environment leaves visible while others are hidden.

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
    """The result of ``anyaccel_detect``.

    Attributes:
        devices: The devices, in any order; empty when the driver is present without a device.
        driver_version: Version of the kernel driver; empty when unknown.
        partial: True when some devices could not be read and the rest is usable.
        notes: Sentences for people, such as a warning about the driver.
    """

    devices: tuple[Device, ...] = ()
    driver_version: str = ""
    partial: bool = False
    notes: tuple[str, ...] = ()


class Product(Value):
    """A product that a plug-in knows without the hardware.

    Products feed simulation, name completion and the documentation.

    Attributes:
        name: The accelerator-type tag of requests, equal to the first tag of its devices.
        model: Raw name that detection reports.
        memory_bytes: Memory of one device, or None.
        counts: Numbers of devices in machines of this product, smallest first.
        aliases: Other names of the product.
        id_template: Form of a device's id. The simulation replaces ``{uuid}``, ``{index}`` and ``{pci}``; the result
            must be unique on the machine, among all vendors.
        node_templates: Forms of the device nodes, with ``{index}``.
        link: Strength of the connection between any two devices of one machine.
        attributes: Attributes that detection reports. The plug-in's pure hooks must need no others.
        slots: Number of slots of a device; see :attr:`Device.slots`.
        parts: Number of parts that a device can be divided into, by the name of their product.
        constants: Tags by constant of :mod:`anyaccel.accelerators`: ``ACME_ONE`` for ``Acme-One``.
        instance_types: Number of devices by cloud instance type.
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


ANY_SLOTS = -1
"""Stands for any slots: of a whole device, and of a share without a position."""
_MOST_DIGITS = 6


class Extent(NamedTuple):
    """A held part of a device, with its slots.

    Attributes:
        units: Part of the device, in 1/10000.
        slots: The slots as a bit mask; :data:`ANY_SLOTS` for an unknown position.
        divided: Whether a part of the device is held that is a device by itself: then no share of the device is free.
    """

    units: int = UNITS_PER_DEVICE
    slots: int = ANY_SLOTS
    divided: bool = False

    def joined(self, other: Extent) -> Extent:
        """Return the sum of two extents, at most the whole device."""
        units = min(UNITS_PER_DEVICE, self.units + other.units)
        return Extent(units, self.slots | other.slots, self.divided or other.divided)

    def leaves(self, wanted: Extent) -> bool:
        """Return whether another extent is free beside this extent. Shares with and without a position do not mix."""
        if wanted.divided:
            return not self.units
        overlap = self.slots & wanted.slots
        # ANY_SLOTS is -1, which overlaps every mask: a share with a position never joins shares without.
        apart = not overlap or self.slots == wanted.slots == ANY_SLOTS
        return not self.divided and apart and self.units + wanted.units <= UNITS_PER_DEVICE


NOTHING = Extent(0, 0)
"""The extent of a free device."""

DIVIDED = Extent(0, 0, divided=True)
"""The extent by which the lease of a part blocks the whole device."""


def slot_mask(slots: Iterable[int]) -> int:
    """Return slots as a bit mask."""
    return sum(1 << slot for slot in set(slots))


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the bits in a mask, lowest first; none for :data:`ANY_SLOTS`."""
    while mask > 0:  # ANY_SLOTS is negative
        low = mask & -mask  # the lowest bit
        yield low.bit_length() - 1
        mask ^= low


def union(masks: Iterable[int]) -> int:
    """Return the union of bit masks."""
    return reduce(or_, masks, 0)


def slot_numbers(mask: int) -> tuple[int, ...]:
    """Return the slots of a bit mask in ascending order; none for :data:`ANY_SLOTS`."""
    return tuple(bits(mask))


def format_slots(slots: Iterable[int]) -> str:
    """Write numbers as ranges: ``0-3``, ``0-1,6``; empty for none."""
    return ",".join(map(format_row, rows_of(slots)))


def join_names(names: Iterable[str]) -> str:
    """Write names of devices in ranges, as a request has them: ``acme/0-3,6``; unchanged if one has another form."""
    listed = list(names)
    by_vendor: dict[str, list[int]] = {}
    for name in listed:
        vendor, _, index = name.rpartition("/")
        if not vendor or not index.isdecimal():
            return ", ".join(listed)
        by_vendor.setdefault(vendor, []).append(int(index))
    return " ".join(f"{vendor}/{format_slots(numbers)}" for vendor, numbers in by_vendor.items())


def read_row(text: str) -> tuple[int, int] | None:
    """Parse ``0-3`` or ``6``; return the first and the last number, or None."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not all(each.isascii() and each.isdecimal() and len(each) <= _MOST_DIGITS for each in (first, last)):
        return None
    return int(first), int(last)


def format_row(row: tuple[int, int]) -> str:
    """Write a first and a last number: ``0-3``, ``6``."""
    first, last = row
    return str(first) if first == last else f"{first}-{last}"


def rows_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the ranges of consecutive numbers, each as its first and its last number, in order."""
    rows: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if rows and rows[-1][1] == number - 1:
            rows[-1] = rows[-1][0], number
        else:
            rows.append((number, number))
    return rows


AGREEMENT = "by agreement"
"""Stands for a mechanism where none enforces a share: the holders keep to their parts by agreement."""


def format_units(units: int) -> str:
    """Write 1/10000 devices as an exact decimal: 5000 as ``0.5``, 20000 as ``2``."""
    whole, rest = divmod(units, UNITS_PER_DEVICE)
    return f"{whole}.{rest:04d}".rstrip("0") if rest else str(whole)


_UNITS = (
    *((f"{unit}iB", 1024**power) for power, unit in enumerate("KMGT", 1)),
    ("B", 1),
    *((f"{unit}B", 1000**power) for power, unit in enumerate("KMGT", 1)),
)


def format_memory(memory_bytes: int) -> str:
    """Format an amount of memory exactly, in the unit with the shortest text: ``40GiB``, ``1.5TB``, ``1023B``."""
    # In tenths of a unit, which size() reads back without loss.
    exact = [(memory_bytes * 10 // unit, name) for name, unit in _UNITS if memory_bytes * 10 % unit == 0]
    texts = [f"{tenths // 10}{f'.{tenths % 10}' * bool(tenths % 10)}{name}" for tenths, name in exact]
    return min(texts, key=lambda text: (len(text), "." in text))


def format_memory_beside(memory_bytes: int, other: int) -> str:
    """Format an amount of memory for a comparison: in the unit of a larger amount, rounded down to tenths.

    An amount below one tenth of that unit is written exactly, see :func:`format_memory`.
    """
    name = format_memory(other).lstrip("0123456789.")
    tenths = memory_bytes * 10 // next(unit for each, unit in _UNITS if each == name)
    return f"{tenths / 10:g}{name}" if tenths else format_memory(memory_bytes)


def find_memory(units: int, request: str, memory_bytes: int | None = None) -> int:
    """Return the memory that was asked for with a part of a device, in bytes; 0 for a whole device or a fraction.

    Args:
        units: The part, in 1/10000 of the device.
        request: Text of the request, which may be any text; one with several shares of different quantities counts as
            a fraction.
        memory_bytes: Memory of the device, which the part must be of; None if unknown: then the text is believed.
    """
    quantities = {term.partition(",")[0].rpartition(":")[2] for term in request.split()}
    shares = [each for each in quantities if not each.isdecimal()]
    if 0 < units < UNITS_PER_DEVICE and len(shares) == 1:
        try:
            found = size(shares[0])
        except ValueError:  # a fraction, or no request at all
            return 0
        return found if not memory_bytes or -(-found * UNITS_PER_DEVICE // memory_bytes) == units else 0
    return 0


def format_share(units: int, request: str, memory_bytes: int | None = None) -> str:
    """Write a part of a device as it was asked for: ``20GiB`` for a share by memory, else ``0.5`` or ``1``.

    The arguments are those of :func:`find_memory`.
    """
    asked = find_memory(units, request, memory_bytes)
    return format_memory(asked) if asked else format_units(units)


def describe_parts(parts: Iterable[tuple[Device, int]], request: str) -> str:
    """Write held devices and parts of devices: ``acme/0-1``, ``20GiB of acme/2``, or both with a comma.

    Args:
        parts: The devices, each with the held part in 1/10000.
        request: Text of the request; see :func:`find_memory`.
    """
    found = list(parts)
    whole = [device.name for device, units in found if units == UNITS_PER_DEVICE]
    shares = [
        f"{format_share(units, request, device.memory_bytes)} of {device.name}"
        for device, units in found
        if units != UNITS_PER_DEVICE
    ]
    return ", ".join([*([join_names(sorted(whole))] if whole else []), *shares])


class Term(Value):
    """A term of a request: a quantity of devices with one of several names.

    Attributes:
        names: Alternatives, in order of preference: resources, vendors or accelerator-type tags.
        units: Quantity in 1/10000 of a device: whole devices (a multiple of 10000) or a share of one (less).
        filters: Filters of devices, by name and value: ``(("mem", "40GiB"),)``. A filter whose name is a sign stands
            right behind the names of the term.
        linked: Whether the devices must be connected directly.
        mixed: Whether the devices may be of several vendors and types.
        memory_bytes: Share by memory, in bytes, of any one device that has so much; then ``units`` is 0. 0 for a
            quantity in ``units``.
    """

    names: tuple[str, ...]
    units: int = UNITS_PER_DEVICE
    filters: tuple[tuple[str, str], ...] = ()
    linked: bool = False
    mixed: bool = False
    memory_bytes: int = 0

    @property
    def count(self) -> int:
        """Number of devices: the whole devices, or one shared device."""
        return max(1, self.units // UNITS_PER_DEVICE)

    @property
    def fraction(self) -> bool:
        """Whether the term asks for a share of one device."""
        return self.units < UNITS_PER_DEVICE

    @property
    def quantity(self) -> str:
        """The quantity as it is written: ``2``, ``0.5`` or ``20GiB``."""
        return format_memory(self.memory_bytes) if self.memory_bytes else format_units(self.units)

    def units_on(self, device: Device) -> int:
        """Return the needed units of a device, in 1/10000; more than a device has if the device can never serve.

        A share by memory is rounded up to the next 1/10000 of the device.
        """
        if not self.memory_bytes:
            return min(self.units, UNITS_PER_DEVICE)
        if not device.memory_bytes:
            return UNITS_PER_DEVICE + 1
        return -(-self.memory_bytes * UNITS_PER_DEVICE // device.memory_bytes)

    def __str__(self) -> str:
        signs = options = ""
        for name, value in self.filters:
            if name.isalpha():  # a sign, such as the "+" of "H100+", stands at the names
                options += f",{name}={value}"
            else:
                signs += name + value
        options += ",linked" * self.linked + ",mixed" * self.mixed
        return f"{'|'.join(self.names)}{signs}:{self.quantity}{options}"


class Request(Value):
    """Several terms, which are served together or not at all.

    Attributes:
        terms: The terms, at least one.
        else_cpu: Whether the request accepts the CPU if the terms can never be served.
    """

    terms: tuple[Term, ...]
    else_cpu: bool = False

    def __str__(self) -> str:
        text = " ".join(map(str, self.terms))
        return f"{text},else=cpu" if self.else_cpu else text


class Share(Value):
    """A held part of a device.

    Attributes:
        device: The device.
        units: Part in 1/10000; 10000 is the whole device.
        slots: Slots of the share, in ascending order; empty for a whole device, and where shares have no position.
        memory_bytes: Memory of the share, or None when the device's memory is unknown.
        memory_by: Name of the mechanism that enforces the share of the memory, or :data:`AGREEMENT`. Empty for a whole
            device.
        compute_by: The same for the share of the compute units.
        limited_by: Frameworks whose own memory limit is set to the share. Other code of the holder ignores such a
            limit, so it enforces nothing.
    """

    device: Device
    units: int = UNITS_PER_DEVICE
    slots: tuple[int, ...] = ()
    memory_bytes: int | None = None
    memory_by: str = ""
    compute_by: str = ""
    limited_by: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether the share is the whole device."""
        return self.units == UNITS_PER_DEVICE

    @property
    def enforced_by(self) -> str:
        """The mechanisms that enforce the share, in a phrase for people; empty for a whole device."""
        if self.memory_by == self.compute_by:
            return self.memory_by
        return f"memory: {self.memory_by or AGREEMENT}, compute: {self.compute_by or AGREEMENT}"

    def with_other(self, other: Share) -> Share:
        """Return the union of two shares of a device."""
        units = self.units + other.units
        part = units < UNITS_PER_DEVICE  # parts that add up to the whole device need no enforcement
        # One unknown part makes the sum unknown: a smaller number would be taken for a limit.
        known = self.memory_bytes is not None and other.memory_bytes is not None
        return replace(
            self,
            units=units,
            slots=tuple(sorted({*self.slots, *other.slots})) if part else (),
            memory_bytes=(self.memory_bytes or 0) + (other.memory_bytes or 0) if known else None,
            memory_by=self.memory_by if part else "",
            compute_by=self.compute_by if part else "",
            limited_by=self.limited_by if part else (),
        )


def share_table(caption: str, shares: Iterable[Share]) -> str:
    """Return an HTML table of shares."""
    rows = [
        (
            share.device.name,
            share.device.type,
            f"{share.units / UNITS_PER_DEVICE:g}",
            memory(share.device.memory_bytes if share.whole else share.memory_bytes),
            share.enforced_by,
            share.device.id,
        )
        for share in shares
    ]
    return html_table(caption, ("device", "type", "share", "memory", "enforced", "id"), rows)


class Grant(Value):
    """The devices of one term of a request.

    Attributes:
        term: The term.
        shares: The devices, in the order in which the worker numbers them.
    """

    term: Term
    shares: tuple[Share, ...]


class Allocation(Value):
    """The devices of a request: a grant for each term, or none where the request runs on the CPU.

    Attributes:
        id: Identity of the allocation, unique within its scheduler.
        request: The request.
        grants: A grant for each term, in the request's order; empty on the CPU.
        confined: Whether the kernel refuses the holder the device nodes of all other devices.
        gaps: A sentence for each access that should be refused and is not.
        machine: Name of the machine, where a scheduler has several; else empty.
        processors: The processors nearest to the devices, to which the holder is bound; empty for no binding.
        host_memory_bytes: Limit of the holder's host memory in bytes; None for no limit.
    """

    id: str
    request: Request
    grants: tuple[Grant, ...]
    confined: bool = False
    gaps: tuple[str, ...] = ()
    machine: str = ""
    processors: tuple[int, ...] = ()
    host_memory_bytes: int | None = None

    def __repr__(self) -> str:
        parts = [
            share.device.id + ("" if share.whole else f":{share.units / UNITS_PER_DEVICE:g}") for share in self.shares
        ]
        return f"<{type(self).__name__} {self.id or 'of nothing'}: {', '.join(parts) or 'CPU'}>"

    def _repr_html_(self) -> str:
        """Return a table of the shares, for notebooks."""
        return share_table(f"{self.request} as {self.id or 'nothing'}", self.shares)

    @property
    def members(self) -> tuple[Allocation, ...]:
        """The allocations on each machine: this allocation alone, unless it is a :class:`Gang`."""
        return (self,)

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of the request, in the order of the terms."""
        found: list[Share] = []
        for grant in self.grants:
            found += grant.shares
        return tuple(found)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of the request, in the order of the terms."""
        return tuple([share.device for share in self.shares])  # a list is faster here than a generator

    @property
    def by_device(self) -> dict[str, Share]:
        """The share of each device by id, in the order of the request."""
        held: dict[str, Share] = {}
        for grant in self.grants:
            for share in grant.shares:
                known = held.get(share.device.id)
                # Two terms may share a device: "GPU:0.25 GPU:0.25" may get both parts of one.
                held[share.device.id] = share if known is None else known.with_other(share)
        return held

    @property
    def cpu(self) -> bool:
        """Whether the request runs on the CPU."""
        return not self.grants


class Gang(Allocation):
    """The devices of a request on several machines.

    Attributes:
        gang: The allocation on each machine, in rank order, with the name of the machine. ``grants`` is empty.
    """

    gang: tuple[Allocation, ...] = ()

    @property
    def members(self) -> tuple[Allocation, ...]:
        """The allocation on each machine, by rank."""
        return self.gang

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of the gang, in the order of the members."""
        return tuple([share for member in self.gang for share in member.shares])

    @property
    def by_device(self) -> dict[str, Share]:
        """Not defined, since device ids are unique on one machine only.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"allocation {self.id} ({self.request}) is a gang on {len(self.gang)} machines; ask each of its members"
        )

    @property
    def cpu(self) -> bool:
        """Always False: a request that falls back to the CPU gets a plain allocation."""
        return False
