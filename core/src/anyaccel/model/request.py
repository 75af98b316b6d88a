"""Requests: terms that are served together or not at all; and allocations: the devices of a request."""

from __future__ import annotations

from anyaccel.model._value import Value, replace
from anyaccel.model.device import UNITS_PER_DEVICE, Device, join_names
from anyaccel.text import html_table, memory, size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

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
