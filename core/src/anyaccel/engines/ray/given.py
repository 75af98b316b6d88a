"""Leases of devices that Ray has chosen already: exactly those, and for others on the node to see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from anyaccel.engines.ray.node import Given
from anyaccel.model import Allocation, Device, Grant, Inventory, Request
from anyaccel.scheduler import Choice, Verdict
from anyaccel.workers.leases import Neighbor, OnFailed, OnHeld
from anyaccel.workers.shared_leases import SharedClaim, SharedLeases


class Fixed(Choice):
    """The one choice that there is.

    Args:
        request: The request, with its devices.
    """

    def __init__(self, request: Given) -> None:
        self.request = request
        self._grants = request.grants
        self._units = dict(request.units)

    @property
    def candidates(self) -> tuple[Device, ...]:
        """The devices."""
        return tuple(share.device for grant in self._grants for share in grant.shares)

    def choose(self, taken: Mapping[str, int]) -> tuple[Grant, ...] | None:
        """The devices, if nobody holds them."""
        free = all(taken.get(device.id, 0) + self._units[device.id] <= device.units for device in self.candidates)
        return self._grants if free else None


class GivenLeases(SharedLeases):
    """Leases in the ledger of the node.

    Ray may give a device anew while the process that had it before is on its way out, or is kept for later calls of
    another pool; it may also be held by somebody whom Ray does not know. The ledger makes the next one wait for that.

    Args:
        inventory: What is on the node.
        note: What is said of every lease.
    """

    def __init__(self, inventory: Inventory, note: str) -> None:
        super().__init__(inventory)
        self._note = note

    def choice(self, request: Request) -> Choice:
        """What Ray has chosen."""
        return Fixed(_given(request))

    def claim(self, request: Request, note: str, on_held: OnHeld, on_failed: OnFailed, **options: Any) -> SharedClaim:
        """Ask for the devices; see :class:`~anyaccel.workers.leases.Leases`."""
        plain = Request(terms=request.terms, else_cpu=request.else_cpu)

        def hold(held: object) -> None:
            held.allocation = replace(held.allocation, request=plain)  # type: ignore[attr-defined]
            on_held(held)  # type: ignore[arg-type]

        return super().claim(request, f"{note} ({self._note})", hold, on_failed, **options)


class UnsharedHeld:
    """Devices that Ray says are ours.

    Args:
        allocation: The devices.
        on_release: Called when they are given back.
    """

    lease = ""
    descriptors = ()

    def __init__(self, allocation: Allocation, on_release: Callable[[], None]) -> None:
        self.allocation = allocation
        self.release = on_release

    def set_aside(self, reason: str) -> None:
        """Say why they are kept: to nobody, since nobody else sees them."""


class UnsharedClaim:
    """It has been granted."""

    def withdraw(self) -> bool:
        """It is too late."""
        return False

    def first(self) -> bool:
        """Nobody competes."""
        return True

    def alone(self) -> bool:
        """Nobody competes."""
        return True

    def why(self) -> Verdict:
        """It does not wait."""
        raise AssertionError("it has been granted")


class UnsharedLeases:
    """Devices as Ray gives them, and nobody else is told.

    Args:
        inventory: What is on the node.

    Attributes:
        free: Set while nothing is held.
    """

    look_seconds: float | None = None

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.free = threading.Event()
        self.free.set()

    def check(self, request: Request) -> None:
        """Ray has given it."""

    def claim(
        self,
        request: Request,
        note: str,  # noqa: ARG002
        on_held: OnHeld,
        on_failed: OnFailed,  # noqa: ARG002
        **options: Any,  # noqa: ARG002
    ) -> UnsharedClaim:
        """Take the devices; see :class:`~anyaccel.workers.leases.Leases`."""
        given = _given(request)
        plain = Request(terms=request.terms, else_cpu=request.else_cpu)
        self.free.clear()
        on_held(UnsharedHeld(Allocation(id="ray", request=plain, grants=given.grants), self.free.set))
        return UnsharedClaim()

    def wanted(self, devices: Iterable[str]) -> frozenset[str]:  # noqa: ARG002
        """Nobody waits here."""
        return frozenset()

    def join(self, neighbor: Neighbor) -> None:
        """There is nothing to tell."""


def _given(request: Request) -> Given:
    assert isinstance(request, Given)  # noqa: S101 - the host asks for nothing else
    return request
