"""What was given to somebody, and what the worker's environment must say about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anyaccel.model._value import Value, field, replace
from anyaccel.model.device import UNITS_PER_DEVICE, Device
from anyaccel.model.request import Request, Term
from anyaccel.text import memory

TYPE_CHECKING = False  # that of typing, which takes longer to import than the model
if TYPE_CHECKING:
    from typing import Literal

AGREEMENT = "by agreement"
"""What keeps holders of one device apart where no mechanism does: their own restraint."""


class Share(Value):
    """The part of one device that is held.

    Attributes:
        device: The device.
        units: Part in 1/10000; 10000 is the whole device.
        slots: Which of the device's slots it is, in ascending order; empty for a whole device, and where shares of the
            device have no position.
        memory_bytes: Memory that belongs to the part, or None when the device's memory is unknown.
        memory_by: Name of the mechanism that holds the holder to its part of the memory, or :data:`AGREEMENT`.
            Empty for a whole device.
        compute_by: The same for its part of the compute units.
        limited_by: Frameworks whose own caps on memory are set to the part. Other code of the holder is not bound by
            them, so they enforce nothing.
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
        """Whether the whole device is held."""
        return self.units == UNITS_PER_DEVICE

    @property
    def enforced_by(self) -> str:
        """What holds the holder to its part, in a phrase for people; empty for a whole device."""
        if self.memory_by == self.compute_by:
            return self.memory_by
        return f"memory: {self.memory_by or AGREEMENT}, compute: {self.compute_by or AGREEMENT}"

    def with_other(self, other: Share) -> Share:
        """This share and another one of the same device as one share."""
        units = self.units + other.units
        part = units < UNITS_PER_DEVICE
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
    """Write a table of what is held of devices in HTML."""
    from anyaccel.model.html import html_table

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
    """What one term of a request got.

    Attributes:
        term: The term.
        shares: The devices, in the order in which the worker numbers them.
    """

    term: Term
    shares: tuple[Share, ...]


class Allocation(Value):
    """What a request got: one grant per term, or nothing where the request accepts the CPU alone.

    Attributes:
        id: Identity of the allocation, unique within its scheduler.
        request: The request that was served.
        grants: One grant per term, in the request's order; empty on CPU fallback.
        confined: Whether the kernel refuses the holder the device nodes of all other devices.
        gaps: What the holder was to be kept from and is not, one sentence each.
        machine: Name of the machine that the devices are on, where a scheduler has several; else empty.
        processors: The processors that are nearest to the devices, on which the holder runs; empty where it was not
            bound to any.
        host_memory_bytes: Bytes of the host's memory to which the kernel holds the holder; None where no limit was
            asked for.
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
        """Show what is held in a notebook."""
        return share_table(f"{self.request} as {self.id or 'nothing'}", self.shares)

    @property
    def members(self) -> tuple[Allocation, ...]:
        """What was given on each machine: this allocation alone, unless it is a :class:`Gang`."""
        return (self,)

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares, term by term."""
        found: list[Share] = []
        for grant in self.grants:
            found += grant.shares
        return tuple(found)

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices, term by term."""
        return tuple([share.device for share in self.shares])

    @property
    def by_device(self) -> dict[str, Share]:
        """What is held of each device, by id, in the order of the request."""
        held: dict[str, Share] = {}
        for grant in self.grants:
            for share in grant.shares:
                known = held.get(share.device.id)
                held[share.device.id] = share if known is None else known.with_other(share)
        return held

    @property
    def cpu(self) -> bool:
        """Whether the request fell back to the CPU."""
        return not self.grants


class Gang(Allocation):
    """What a request got that was served on several machines at once.

    Attributes:
        gang: What it got on each, in the order of the machines; each says its machine. The gang's own grants are none.
    """

    gang: tuple[Allocation, ...] = ()

    @property
    def members(self) -> tuple[Allocation, ...]:
        """What was given on each machine, by rank."""
        return self.gang

    @property
    def shares(self) -> tuple[Share, ...]:
        """All shares, member by member."""
        return tuple([share for member in self.gang for share in member.shares])

    @property
    def by_device(self) -> dict[str, Share]:
        """Nothing that could be said: ids of devices are those of one machine.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"allocation {self.id} ({self.request}) is a gang on {len(self.gang)} machines; ask each of its members"
        )

    @property
    def cpu(self) -> bool:
        """False: a request that falls back to the CPU does so once."""
        return False


class EnvContext(Value):
    """What ``anyaccel_env`` may want to know beside the devices that it is asked for.

    Attributes:
        devices: All devices of the vendor on the machine, also those that are hidden or given to others.
        shares: Share of each allocated device, by device id.
        environ: The environment into which the edits will be merged.
        mask: Whether a mask should name devices by stable id or by index where the vendor's runtime takes both.
    """

    devices: tuple[Device, ...]
    shares: Mapping[str, Share] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    mask: Literal["id", "index"] = "id"


class EnvEdits(Value):
    """Edits to a worker's environment: returned by a plug-in, applied by the launcher.

    Attributes:
        set: Variables to set.
        unset: Variables to remove.
        memory_by: Name of the mechanism that these edits switch on and that holds a worker to its part of the memory,
            also when it does not cooperate; empty when nothing but agreement does.
        compute_by: The same for its part of the compute units.
        limited_by: Frameworks whose own caps on memory these edits set.
        memory_regions: By id of a device, whole or shared, what the kernel's cgroup controller ``dmem`` calls its
            memory, such as ``drm/0000:03:00.0/vram``. The launcher limits a share there where the kernel lets it.
    """

    set: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    memory_by: str = ""
    compute_by: str = ""
    limited_by: tuple[str, ...] = ()
    memory_regions: Mapping[str, str] = field(default_factory=dict)
