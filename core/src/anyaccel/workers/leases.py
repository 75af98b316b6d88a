"""Where a pool gets its devices from.

A pool asks for devices with a claim, hears when it holds them, and gives them back once the worker and everything that
the worker started has left the kernel.
"""

# The methods of a protocol have a docstring and no body.
# pyright: reportReturnType=false

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, reduce
from operator import or_
from typing import Protocol

from anyaccel.errors import AnyaccelError, NeverFitsError
from anyaccel.launcher.launch import open_scheduler
from anyaccel.ledger.mark import Mark
from anyaccel.model import Allocation, Inventory, Request, parts_of
from anyaccel.scheduler import Scheduler, Ticket, Verdict

OnHeld = Callable[["Held"], None]
OnFailed = Callable[[AnyaccelError], None]


class Held(Protocol):
    """Devices that are held."""

    @property
    def allocation(self) -> Allocation:
        """What is held."""

    @property
    def lease(self) -> str:
        """Identity of a lease that other processes see; empty when there is none."""

    @property
    def mark(self) -> Mark:
        """Mark that the lease names, for the worker to carry; empty when there is none."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that the worker must carry, so that the lease ends with the last process that does."""

    def set_aside(self, reason: str) -> None:
        """Say to others why it is kept although nobody uses it."""

    def release(self) -> None:
        """Give it back."""


class Neighbor(Protocol):
    """Whoever takes devices from the same leases as others do."""

    def line_up(self) -> None:
        """Somebody else is about to claim devices: claim now whatever you have put off."""

    def make_way(self, devices: frozenset[str]) -> None:
        """Somebody waits for devices: give those back that you hold without using them."""


class Claim(Protocol):
    """A wish for devices, until it is granted or withdrawn."""

    def withdraw(self) -> bool:
        """Stop waiting; False when it has been granted already."""

    def first(self) -> bool:
        """Whether nobody of another line who competes for the same devices comes before."""

    def alone(self) -> bool:
        """Whether nobody of another line waits for one of the same devices."""

    def why(self) -> Verdict:
        """What it waits for."""


class Leases(Protocol):
    """Gives devices, strictly first come first served among those that compete for the same ones."""

    @property
    def inventory(self) -> Inventory:
        """The machine."""

    @property
    def look_seconds(self) -> float | None:
        """How often to ask :meth:`wanted` for what is held without use; None when neighbors are told."""

    def check(self, request: Request) -> None:
        """Raise what :meth:`claim` would raise for a request that can never be served."""

    def claim(
        self,
        request: Request,
        note: str,
        on_held: OnHeld,
        on_failed: OnFailed,
        *,
        confined: bool = False,
        line: object = None,
    ) -> Claim:
        """Ask for devices.

        Args:
            request: What is asked for.
            note: What for, in words.
            on_held: Called once, by any thread, perhaps before this returns.
            on_failed: Called instead, when that becomes impossible.
            confined: Whether the holder will be confined to them, for people to read.
            line: Claims for which this is equal stand for each other, so that none of them is in the way of another;
                None for one that stands alone.

        Raises:
            UnknownNameError, NeverFitsError: When the request can never be served.
            LedgerError: When leases cannot be kept.
        """

    def wanted(self, devices: frozenset[str]) -> frozenset[str]:
        """Those of some devices, by id, for which somebody waits."""

    def join(self, neighbor: Neighbor) -> None:
        """Be told of others from now on; held weakly."""


def check(inventory: Inventory, request: Request) -> None:
    """Raise the error of a request that a machine can never serve.

    Raises:
        UnknownNameError: When nothing goes by one of its names.
        NeverFitsError: When there are not such devices, or not so many.
    """
    verdict = open_scheduler(inventory).why(request)
    if not (verdict.ever_fits or verdict.cpu):
        raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)


class LocalHeld:
    """Devices that a scheduler of this process has given."""

    __slots__ = ("_leases", "allocation")

    lease = ""
    mark = ()
    descriptors = ()

    def __init__(self, leases: LocalLeases, allocation: Allocation) -> None:
        self._leases = leases
        self.allocation = allocation

    def set_aside(self, reason: str) -> None:
        """Say why they are kept: to nobody, since nobody else sees them."""

    def release(self) -> None:
        """Give them back, and serve those who waited for them."""
        self._leases.scheduler.release(self.allocation)


class LocalClaim:
    """A place in the queue of a scheduler of this process."""

    __slots__ = ("_leases", "line", "ticket")

    def __init__(self, leases: LocalLeases, line: object) -> None:
        self._leases = leases
        self.line = line
        self.ticket: Ticket | None = None

    def withdraw(self) -> bool:
        """Stop waiting; False when it has been granted already."""
        ticket = self.ticket
        if ticket is None or not ticket.cancel():
            return False
        self._leases.left(ticket, self.line)
        return True

    def first(self) -> bool:
        """Whether nobody of another line who competes for the same devices comes before."""
        return self.ticket is not None and self._leases.first(self.ticket, self.line)

    def alone(self) -> bool:
        """Whether nobody of another line waits for one of the same devices."""
        return self.ticket is not None and self._leases.alone(self.ticket, self.line)

    def why(self) -> Verdict:
        """What it waits for."""
        assert self.ticket is not None  # noqa: S101 - set before anybody else has the claim
        return self.ticket.why()


class LocalLeases:
    """Devices of a machine, shared by all pools of this process and by nobody else.

    Args:
        scheduler: Knows the machine and who has what.
    """

    look_seconds: float | None = None

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, object], OrderedDict[int, Ticket]] = {}
        self._neighbors: weakref.WeakSet[Neighbor] = weakref.WeakSet()
        self._order = threading.RLock()
        self._lining_up = False
        bits = {device.id: 1 << place for place, device in enumerate(scheduler.inventory.devices)}
        parts = parts_of(scheduler.inventory.devices)
        self._masks = {key: reduce(or_, (bits[part] for part in parts.get(key, ())), bit) for key, bit in bits.items()}

    @property
    def inventory(self) -> Inventory:
        """The machine."""
        return self.scheduler.inventory

    def check(self, request: Request) -> None:
        """Raise what :meth:`claim` would raise for a request that can never be served."""
        check(self.inventory, request)

    def claim(
        self,
        request: Request,
        note: str,
        on_held: OnHeld,
        on_failed: OnFailed,  # noqa: ARG002 - nothing fails later here
        *,
        confined: bool = False,  # noqa: ARG002 - nobody else reads of these
        line: object = None,
    ) -> LocalClaim:
        """Ask for devices; see :class:`Leases`."""
        claim = LocalClaim(self, line)
        with self._order:
            self._line_up(line)
            ticket = claim.ticket = self.scheduler.submit(
                request, note=note, on_placed=partial(self._placed, on_held, line)
            )
            waits = self._enter(ticket, line)
        if waits:
            self._make_way(ticket.plan.mask)
        return claim

    def wanted(self, devices: frozenset[str]) -> frozenset[str]:
        """Those of some devices, by id, for which somebody waits."""
        if not self._waiting:
            return frozenset()
        with self._lock:
            mask = reduce(or_, (mask for mask, _ in self._waiting), 0)
        return frozenset(device_id for device_id in devices if self._masks[device_id] & mask)

    def join(self, neighbor: Neighbor) -> None:
        """Tell somebody of others; see :class:`Leases`."""
        with self._lock:
            self._neighbors.add(neighbor)

    def first(self, ticket: Ticket, line: object) -> bool:
        """Whether no ticket of another line that waits for one of the same devices comes before those of this one."""
        with self._lock:
            own = self._waiting.get((ticket.plan.mask, line)) or OrderedDict()
            first = ticket.number if line is None else next(iter(own), ticket.number)
            rivals = (group for (mask, _), group in self._waiting.items() if mask & ticket.plan.mask)
            return all(next(iter(group)) >= first for group in rivals)

    def alone(self, ticket: Ticket, line: object) -> bool:
        """Whether no ticket of another line waits for one of the same devices as this one, which waits."""
        with self._lock:
            rivals = {key: group for key, group in self._waiting.items() if key[0] & ticket.plan.mask}
            own = rivals.get((ticket.plan.mask, line)) or OrderedDict()
            others = any(other != line for _, other in rivals)
            return ticket.number in own and not others and (line is not None or len(own) == 1)

    def left(self, ticket: Ticket, line: object) -> None:
        """Count a ticket no more among those who wait."""
        key = ticket.plan.mask, line
        with self._lock:
            group = self._waiting.get(key)
            if group is not None and group.pop(ticket.number, None) is not None and not group:
                del self._waiting[key]

    def _enter(self, ticket: Ticket, line: object) -> bool:
        """Count a ticket among those who wait, if it does."""
        if ticket.allocation is not None:
            return False
        with self._lock:
            self._waiting.setdefault((ticket.plan.mask, line), OrderedDict())[ticket.number] = ticket
        if _is_placed(ticket):  # meanwhile, and then it was not found among those who wait
            self.left(ticket, line)
            return False
        return True

    def _placed(self, on_held: OnHeld, line: object, ticket: Ticket) -> None:
        self.left(ticket, line)
        assert ticket.allocation is not None  # noqa: S101 - that is what being placed means
        on_held(LocalHeld(self, ticket.allocation))

    def _line_up(self, line: object) -> None:
        """Let neighbors claim what they have put off, once for all of it; it stands behind a claim that waits."""
        with self._lock:
            needless = all(line is not None and other == line for _, other in self._waiting)
        if self._lining_up or needless:
            return
        self._lining_up = True
        try:
            for neighbor in self._present():
                neighbor.line_up()
        finally:
            self._lining_up = False

    def _make_way(self, mask: int) -> None:
        ids = frozenset(device_id for device_id, bit in self._masks.items() if bit & mask)
        for neighbor in self._present():
            neighbor.make_way(ids)

    def _present(self) -> list[Neighbor]:
        with self._lock:
            return list(self._neighbors)


def _is_placed(ticket: Ticket) -> bool:
    return ticket.allocation is not None
