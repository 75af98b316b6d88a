"""Allocations: the devices of a request, and the edits to a worker's environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anyaccel.model._value import Value, field, replace
from anyaccel.model.device import UNITS_PER_DEVICE, Device
from anyaccel.model.request import Request, Term
from anyaccel.text import html_table, memory

TYPE_CHECKING = False  # that of typing, which takes longer to import than the model
if TYPE_CHECKING:
    from typing import Literal

AGREEMENT = "by agreement"
"""Stands for a mechanism where none enforces a share: the holders keep to their parts by agreement."""


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


class EnvContext(Value):
    """Facts for ``anyaccel_env`` beside the given devices.

    Attributes:
        devices: All devices of the vendor on the machine, hidden and used devices included.
        shares: Share of each allocated device, by device id.
        environ: The environment to be edited.
        mask: Whether a mask names devices by stable id or by index, where the runtime accepts both.
    """

    devices: tuple[Device, ...]
    shares: Mapping[str, Share] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    mask: Literal["id", "index"] = "id"


class EnvEdits(Value):
    """A plug-in's edits to a worker's environment, which the launcher applies.

    Attributes:
        set: Variables to set.
        unset: Variables to remove.
        memory_by: Name of the mechanism that the edits switch on, and that enforces the share of the memory even if the
            worker does not cooperate; empty for none.
        compute_by: The same for the share of the compute units.
        limited_by: Frameworks whose own memory limit the edits set.
        memory_regions: Name of each device's memory in the cgroup controller ``dmem``, such as
            ``drm/0000:03:00.0/vram``, by device id. The launcher limits shares there if the kernel allows.
    """

    set: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    memory_by: str = ""
    compute_by: str = ""
    limited_by: tuple[str, ...] = ()
    memory_regions: Mapping[str, str] = field(default_factory=dict)
