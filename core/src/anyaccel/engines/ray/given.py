"""Leases of devices that Ray has chosen already: those, and for others on the node to see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anyaccel.engines.ray.node import Given
from anyaccel.errors import LedgerError
from anyaccel.launcher.launch import KnownNames, validate
from anyaccel.model import UNITS_PER_DEVICE, Allocation, Device, Extent, Grant, Inventory, Request, Term, replace
from anyaccel.scheduler import Choice, Verdict
from anyaccel.scheduler.choice import located
from anyaccel.workers.leases import Neighbor, OnFailed, OnHeld
from anyaccel.workers.shared_claim import SharedClaim
from anyaccel.workers.shared_leases import SharedLeases


class Preferred(Choice):
    """The devices that Ray has chosen, or others where a vendor's rule needs that.

    Ray knows no rule: it gives chips 1 and 3 where only 0 and 1, or 2 and 3, can work together. Then we choose in its
    place, among the devices that nobody on the node holds; Ray has seen to it that there are enough.

    Args:
        inventory: What is on the node.
        request: The request, with its devices.
        ruled: Whether a vendor has rules for such devices.
    """

    def __init__(self, inventory: Inventory, request: Given, *, ruled: bool) -> None:
        self._given = request.grants
        self._any: Choice | None = None
        self._accepted = not ruled or all(_accepted(grant) for grant in request.grants)
        if ruled:
            self._any = Choice(inventory, plain(request), validate, KnownNames())

    @property
    def candidates(self) -> tuple[Device, ...]:
        """The devices that will do."""
        return _devices(self._given) if self._any is None else self._any.candidates

    def choose(self, taken: Mapping[str, Extent]) -> tuple[Grant, ...] | None:
        """The devices, if nobody holds them."""
        if self._accepted and (free := located(self._given, taken)) is not None:
            return free
        return None if self._any is None else self._any.choose(taken)


def _devices(grants: tuple[Grant, ...]) -> tuple[Device, ...]:
    return tuple(share.device for grant in grants for share in grant.shares)


def plain(request: Request) -> Request:
    """A request without its devices."""
    return Request(terms=request.terms, else_cpu=request.else_cpu)


def _accepted(grant: Grant) -> bool:
    return validate(grant.term, [share.device for share in grant.shares]) is None


def _has_rules(like: Device, inventory: Inventory) -> bool:
    """Whether the vendor refuses some number of such devices, so that not every set of them will do."""
    devices = [device for device in inventory.devices if device.usable and device.type == like.type]
    terms = (Term(names=(like.resource,), units=UNITS_PER_DEVICE * count) for count in range(1, len(devices) + 1))
    return any(validate(term, devices[: term.count]) is not None for term in terms)


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
        self._ruled: dict[str, bool] = {}

    def choice(self, request: Request) -> Choice:
        """What Ray has chosen."""
        wanted = _given(request)
        ruled = any(self._is_ruled(share.device) for grant in wanted.grants for share in grant.shares)
        return Preferred(self.inventory, wanted, ruled=ruled)

    def _is_ruled(self, device: Device) -> bool:
        if device.type not in self._ruled:
            self._ruled[device.type] = _has_rules(device, self.inventory)
        return self._ruled[device.type]

    def claim(self, request: Request, note: str, on_held: OnHeld, on_failed: OnFailed, **options: Any) -> SharedClaim:
        """Ask for the devices; see :class:`~anyaccel.workers.leases.Leases`."""

        def hold(held: object) -> None:
            held.allocation = replace(held.allocation, request=plain(request))  # type: ignore[attr-defined]
            on_held(held)  # type: ignore[arg-type]

        return super().claim(request, f"{note} ({self._note})", hold, on_failed, **options)


class UnsharedHeld:
    """Devices that Ray says are ours.

    Args:
        allocation: The devices.
        on_release: Called when they are given back.
    """

    lease = ""
    mark = ()
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
        on_failed: OnFailed,
        **options: Any,  # noqa: ARG002
    ) -> UnsharedClaim:
        """Take the devices; see :class:`~anyaccel.workers.leases.Leases`."""
        given = _given(request)
        parts = [share.device.id for grant in given.grants for share in grant.shares if share.device.slots > 1]
        if parts and any(term.fraction for term in given.terms):
            reason = f"a share of {parts[0]} is some of its slots, and Ray does not say which"
            on_failed(LedgerError(reason, hint="let leases say it (shared=True), or ask for whole devices"))
            return UnsharedClaim()
        self.free.clear()
        on_held(UnsharedHeld(Allocation(id="ray", request=plain(request), grants=given.grants), self.free.set))
        return UnsharedClaim()

    def wanted(self, devices: Iterable[str]) -> frozenset[str]:  # noqa: ARG002
        """Nobody waits here."""
        return frozenset()

    def join(self, neighbor: Neighbor) -> None:
        """There is nothing to tell."""


def _given(request: Request) -> Given:
    assert isinstance(request, Given)  # noqa: S101 - the host asks for nothing else
    return request
