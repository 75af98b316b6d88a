"""The devices that one request would get, given what others hold, for somebody who keeps the books elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anyaccel.model import AGREEMENT, UNITS_PER_DEVICE, Device, Grant, Inventory, Request, Share
from anyaccel.scheduler.placement import Layout, Occupancy, Validate, Wanted, place, want


class Choice:
    """Chooses devices for one request, again and again as others come and go.

    Args:
        inventory: The machine.
        request: The request.
        validate: The vendors' rules.
        known: Names that are known though nothing on this machine goes by them.

    Raises:
        UnknownNameError: When nothing goes by one of the names.
    """

    def __init__(
        self, inventory: Inventory, request: Request, validate: Validate | None = None, known: Iterable[str] = ()
    ) -> None:
        self.request = request
        self._layout = Layout(inventory, known)
        self._validate = validate
        self._wanted = [want(self._layout, term) for term in request.terms]

    @property
    def candidates(self) -> tuple[Device, ...]:
        """Every device that could serve a term of the request."""
        mask = 0
        for wanted in self._wanted:
            mask |= wanted.mask
        return tuple(device for position, device in enumerate(self._layout.devices) if mask >> position & 1)

    def choose(self, taken: Mapping[str, int]) -> tuple[Grant, ...] | None:
        """Choose devices among what is left.

        Args:
            taken: Units that others hold, by device id, in 1/10000. Devices of other machines do not matter.

        Returns:
            One grant per term; None when what is left does not do.
        """
        free = Occupancy.empty(self._layout)
        for device_id, units in taken.items():
            position = self._layout.positions.get(device_id)
            if position is not None:
                free.take((position,), min(units, free.units[position]))
        placed = place(self._layout, free, self._wanted, self._validate)
        return None if placed is None else grants(self._layout, self._wanted, placed)


def grants(layout: Layout, wanted: Sequence[Wanted], placed: Sequence[Sequence[int]]) -> tuple[Grant, ...]:
    """Write down what the terms of a request got."""
    return tuple(
        Grant(term=each.term, shares=tuple(share(layout.devices[position], each.units) for position in positions))
        for each, positions in zip(wanted, placed, strict=True)
    )


def share(device: Device, units: int) -> Share:
    """Write down a part of a device, with the memory that belongs to it."""
    if units == UNITS_PER_DEVICE:
        return Share(device=device, units=units, memory_bytes=device.memory_bytes)
    memory = None if device.memory_bytes is None else device.memory_bytes * units // UNITS_PER_DEVICE
    return Share(device=device, units=units, memory_bytes=memory, enforced_by=AGREEMENT)
