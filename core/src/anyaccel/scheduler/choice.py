"""Choice of devices for one request, for callers that keep the books elsewhere, such as in the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from anyaccel.model import (
    AGREEMENT,
    ANY_SLOTS,
    UNITS_PER_DEVICE,
    Device,
    Extent,
    Grant,
    Inventory,
    Request,
    Share,
    slot_mask,
    slot_numbers,
)
from anyaccel.model.extent import bits, union
from anyaccel.policy import Need
from anyaccel.scheduler.placement import Layout, Occupancy, Spot, Validate, Wanted, needs, place, want


class Choice:
    """Chooses devices for one request, repeatedly as leases come and go.

    Args:
        inventory: The machine.
        request: The request.
        validate: The vendors' rules.
        known: Further known names, of no device on this machine.

    Raises:
        UnknownNameError: When no device has one of the names.
    """

    def __init__(
        self, inventory: Inventory, request: Request, validate: Validate | None = None, known: Iterable[str] = ()
    ) -> None:
        self.request = request
        self._layout = Layout(inventory, known)
        self._validate = validate
        self._wanted = [want(self._layout, term) for term in request.terms]

    @cached_property
    def ever_fits(self) -> bool:
        """Whether the machine serves the request if nothing is held."""
        return self.choose({}) is not None

    @cached_property
    def candidates(self) -> tuple[Device, ...]:
        """The devices that could serve a term of the request."""
        mask = union(each.mask for each in self._wanted)
        return tuple(self._layout.devices[position] for position in bits(mask))

    @cached_property
    def needs(self) -> tuple[Need, ...]:
        """The needs of each term, with devices by id."""
        return needs(self._wanted, lambda position: self._layout.devices[position].id)

    def choose(self, taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
        """Choose free devices; nothing is taken.

        Args:
            taken: Taken extents by device id. Unknown devices are ignored.

        Returns:
            One grant per term; None if the free devices do not suffice.
        """
        free = Occupancy(self._layout)  # from scratch: leases come and go between two calls
        for device_id, extent in taken.items():
            position = self._layout.positions.get(device_id)
            if position is not None:
                free.take((free.spot_within(position, extent),))
        placed = place(self._layout, free, self._wanted, self._validate)
        return None if placed is None else grants(self._layout, self._wanted, placed)


def grants(layout: Layout, wanted: Sequence[Wanted], placed: Sequence[Sequence[Spot]]) -> tuple[Grant, ...]:
    """Return the grants for placed terms of a request."""
    return tuple(
        Grant(
            term=each.term,
            shares=tuple(share(layout.devices[spot.position], spot.units, slot_numbers(spot.slots)) for spot in spots),
        )
        for each, spots in zip(wanted, placed, strict=True)
    )


def extent_of(given: Share) -> Extent:
    """Return the extent of a share."""
    return Extent(given.units, slot_mask(given.slots) if given.slots else ANY_SLOTS)


def extent_within(given: Share, device: Device) -> Extent:
    """Return the extent of a share on its present device, whose slots may have changed.

    The present slots that overlap with the share's former slots count, also where they overlap in part.
    """
    was, now = given.device.slots, device.slots
    if now == 1 or not given.slots:  # without slots, the share may be anywhere on the device
        return Extent(given.units, ANY_SLOTS)
    overlapping = (each for slot in given.slots for each in range(slot * now // was, -(-(slot + 1) * now // was)))
    return Extent(given.units, slot_mask(overlapping))


def share(device: Device, units: int, slots: tuple[int, ...] = ()) -> Share:
    """Return a share of a device, with its part of the memory, rounded down; a whole device has no ``slots``."""
    if units == UNITS_PER_DEVICE:
        return Share(device=device, units=units, memory_bytes=device.memory_bytes)
    memory = None if device.memory_bytes is None else device.memory_bytes * units // UNITS_PER_DEVICE
    return Share(
        device=device, units=units, slots=slots, memory_bytes=memory, memory_by=AGREEMENT, compute_by=AGREEMENT
    )
