"""The scheduler of one process: who gets which device, who waits, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from threading import Lock

from anyaccel.errors import NeverFitsError, NotFreeError
from anyaccel.model import Allocation, Extent, Grant, Inventory, Request, Term, slot_numbers
from anyaccel.scheduler.choice import grants, share
from anyaccel.scheduler.grammar import parse_request
from anyaccel.scheduler.placement import Layout, Occupancy, Spot, Validate, place, want
from anyaccel.scheduler.queue import Queue
from anyaccel.scheduler.ticket import Plan, Ticket, notify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from anyaccel.scheduler.demand import Demand
    from anyaccel.scheduler.reasons import Verdict

RequestLike = str | Sequence[str] | Request
"""What a request can be given as: text, texts that form one request, or a value."""

_PLANS = 4_096
_LAST = 1 << 62
_ALLOCATIONS = count(1)  # unique in the process, so that no scheduler takes back what another one gave


class Scheduler:
    """Gives the devices of one machine to requests, exactly and in order. Every method may be called by any thread.

    Args:
        inventory: The machine.
        validate: The vendors' rules: called with a term and the devices of one vendor, returns a reason against them
            or None. Must be a pure function; it is called while the scheduler is locked.
        known: Names that installed plug-ins know beside those on this machine: a request for one of them never fits,
            while any other name is an error.
    """

    def __init__(self, inventory: Inventory, validate: Validate | None = None, known: Iterable[str] = ()) -> None:
        self._layout = Layout(inventory, known)
        self._validate = validate
        self._lock = Lock()
        self._free = Occupancy(self._layout)
        self._held: dict[str, Allocation] = {}
        self._notes: dict[str, str] = {}
        self._holders: list[dict[str, Allocation]] = [{} for _ in inventory.devices]
        self._queue: Queue[Ticket] = Queue()
        self._infeasible: dict[int, Ticket] = {}
        self._plans: dict[Request, Plan] = {}
        self._numbers = count(1)

    @property
    def inventory(self) -> Inventory:
        """The machine."""
        return self._layout.inventory

    def allocate(self, request: RequestLike, *, priority: int = 0, note: str = "") -> Allocation:
        """Give devices to a request at once.

        Nobody who waits for the same devices with at least this priority is overtaken. With ``else=cpu``, a request
        that can *never* fit gets an allocation without devices; one that could fit later does not, since falling
        back while devices are merely busy is rarely meant.

        Args:
            request: What is asked for.
            priority: The higher, the earlier.
            note: Whose it is, in words, for those who find the devices taken.

        Returns:
            The allocation, to be given back to :meth:`release`.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
            NeverFitsError: When this machine can never serve it; carries the verdict.
            NotFreeError: When this machine cannot serve it now; carries the verdict.
        """
        plan = self._plan(parse_request(request))
        with self._lock:
            allocation = self._try(plan, priority, note)
            if allocation is None:
                verdict = self._judge(plan, priority)
        if allocation is not None:
            return allocation
        error = NotFreeError if verdict.ever_fits else NeverFitsError
        raise error(verdict.message, verdict=verdict, hint=verdict.hint)

    def submit(
        self,
        request: RequestLike,
        *,
        priority: int = 0,
        note: str = "",
        infeasible: Literal["raise", "pend"] = "raise",
        on_placed: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Give devices to a request as soon as it is its turn.

        Args:
            request: What is asked for.
            priority: The higher, the earlier.
            note: Whose it is, in words.
            infeasible: What becomes of a request that can never fit: an error, or a ticket that stands in nobody's
                way and counts as demand.
            on_placed: Called once, with the ticket, when it has its allocation: before this method returns, or later
                by the thread that made room. The scheduler is not locked then. An exception is logged.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
            NeverFitsError: When this machine can never serve it and ``infeasible`` is ``raise``.
        """
        plan = self._plan(parse_request(request))
        never = not (plan.ever_fits or plan.request.else_cpu)
        with self._lock:
            verdict = self._judge(plan, priority) if never and infeasible == "raise" else None
            if verdict is None:
                number = next(self._numbers)
                ticket = Ticket(self, plan, number=number, priority=priority, note=note, on_placed=on_placed)
                ticket.allocation = self._try(plan, priority, note)
                if never:
                    self._infeasible[number] = ticket
                elif ticket.allocation is None:
                    self._queue.add(ticket, priority=priority, number=number, mask=plan.mask)
        if verdict is not None:
            raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
        if ticket.allocation is not None:
            notify([ticket])
        return ticket

    def release(self, allocation: Allocation) -> None:
        """Take back what an allocation holds, and serve those who waited for it.

        Raises:
            ValueError: When it is not held: it was released before, or another scheduler gave it.
        """
        with self._lock:
            held = self._held.pop(allocation.id, None)
            if held is None:
                raise ValueError(
                    f"allocation {allocation.id} ({allocation.request}) is not held: it was released before, or "
                    f"another scheduler gave it"
                )
            self._notes.pop(allocation.id, None)
            changed = 0
            for share in held.shares:
                position = self._layout.positions[share.device.id]
                self._free.give((self._free.spot_of(share),))
                self._holders[position].pop(allocation.id, None)
                changed |= 1 << position
            placed = self._serve(self._layout.with_parts(changed))
        notify(placed)

    def cancel(self, ticket: Ticket) -> bool:
        """Stop waiting; see :meth:`Ticket.cancel`."""
        with self._lock:
            waited = self._infeasible.pop(ticket.number, None) is not None
            placed: list[Ticket] = []
            if not waited:
                mask = ticket.plan.mask
                waited = self._queue.remove(priority=ticket.priority, number=ticket.number, mask=mask)
                placed = self._serve(mask) if waited else []
            ticket.cancelled = ticket.cancelled or waited
        notify(placed)
        return waited

    def occupy(self, held: Mapping[str, Extent], *, holder: str, note: str = "") -> Allocation:
        """Count parts of devices as held by somebody who did not ask this scheduler.

        Args:
            held: What is held, by device id; no more than is free is counted.
            holder: Identity of the allocation, as others know it.
            note: Who that is, in words.

        Returns:
            An allocation, to be given back to :meth:`release` when it is over.

        Raises:
            KeyError: When no device has one of the ids.
        """
        with self._lock:
            made = [self._occupied(device_id, extent) for device_id, extent in held.items()]
            request = Request(terms=tuple(grant.term for grant in made))
            return self._enter(Allocation(id=holder, request=request, grants=tuple(made)), note)

    def _occupied(self, device_id: str, extent: Extent) -> Grant:
        position = self._layout.positions[device_id]
        device = self._layout.devices[position]
        spot = self._free.spot_within(position, extent)
        part = share(device, spot.units, slot_numbers(spot.slots))
        return Grant(term=Term(names=(device.type,), units=extent.units), shares=(part,))

    def why(self, request: RequestLike | Ticket, *, priority: int = 0) -> Verdict:
        """Say whether a request would be served now or ever, why not, and what near to it would.

        Args:
            request: What would be asked for, or the ticket of who waits for it.
            priority: The higher, the earlier; a ticket has its own.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
        """
        if isinstance(request, Ticket):
            with self._lock:
                if request.allocation is not None and not request.allocation.cpu:
                    from anyaccel.scheduler.reasons import Verdict

                    return Verdict(request=request.request, fits_now=True, ever_fits=True)
                return self._judge(request.plan, request.priority, request.number)
        plan = self._plan(parse_request(request))
        with self._lock:
            return self._judge(plan, priority)

    def free(self, device_id: str) -> int:
        """Free units of a device in 1/10000; 0 for one that is hidden or unhealthy.

        Raises:
            KeyError: When no device has this id.
        """
        with self._lock:
            return self._free.units[self._layout.positions[device_id]]

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """The allocations that hold a device, first to come first.

        Raises:
            KeyError: When no device has this id.
        """
        with self._lock:
            return tuple(self._holders[self._layout.positions[device_id]].values())

    def pending(self) -> tuple[Ticket, ...]:
        """Those who wait, first to be served first; after them those who can never be."""
        with self._lock:
            return (*self._queue, *self._infeasible.values())

    def demand(self) -> tuple[Demand, ...]:
        """What those who wait want, by the name that they asked for."""
        from anyaccel.scheduler.demand import summarize

        with self._lock:
            feasible = [ticket.request for ticket in self._queue]
            infeasible = [ticket.request for ticket in self._infeasible.values()]
        return (
            *summarize(self._layout, feasible, infeasible=False),
            *summarize(self._layout, infeasible, infeasible=True),
        )

    def _plan(self, request: Request) -> Plan:
        """Resolve a request against the machine. Needs no lock: it depends on nothing that changes."""
        found = self._plans.get(request)
        if found is None:
            wanted = tuple(want(self._layout, term) for term in request.terms)
            mask = 0
            for each in wanted:
                mask |= self._layout.with_parts(each.mask)
            empty = Occupancy(self._layout)
            ever = place(self._layout, empty, wanted, self._validate) is not None
            found = Plan(request=request, wanted=wanted, mask=mask, ever_fits=ever)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[request] = found
        return found

    def _try(self, plan: Plan, priority: int, note: str) -> Allocation | None:
        """Serve a newcomer unless that would overtake somebody."""
        if not plan.ever_fits:
            return self._hold(plan, (), note) if plan.request.else_cpu else None
        if self._queue.blocked(priority=priority, mask=plan.mask):
            return None
        return self._place(plan, note)

    def _place(self, plan: Plan, note: str) -> Allocation | None:
        placed = place(self._layout, self._free, plan.wanted, self._validate)
        return None if placed is None else self._hold(plan, placed, note)

    def _hold(self, plan: Plan, placed: Sequence[Sequence[Spot]], note: str) -> Allocation:
        wanted = plan.wanted if placed else ()  # nothing is placed on the CPU
        made = grants(self._layout, wanted, placed)
        return self._enter(Allocation(id=f"a{next(_ALLOCATIONS)}", request=plan.request, grants=made), note)

    def _enter(self, allocation: Allocation, note: str) -> Allocation:
        """Write an allocation into the books."""
        for each in allocation.shares:
            position = self._layout.positions[each.device.id]
            self._free.take((self._free.spot_of(each),))
            self._holders[position][allocation.id] = allocation
        self._held[allocation.id] = allocation
        if note:
            self._notes[allocation.id] = note
        return allocation

    def _serve(self, changed: int) -> list[Ticket]:
        """Place those whose turn it is; the caller notifies them once the lock is open."""
        served: list[Ticket] = []

        def serve(ticket: Ticket) -> bool:
            ticket.allocation = self._place(ticket.plan, ticket.note)
            if ticket.allocation is not None:
                served.append(ticket)
            return ticket.allocation is not None

        self._queue.serve(changed, serve)
        return served

    def _judge(self, plan: Plan, priority: int, number: int = _LAST) -> Verdict:
        from anyaccel.scheduler.explain import Scene, judge

        ahead = self._queue.ahead(priority=priority, number=number, mask=plan.mask)
        scene = Scene(
            layout=self._layout,
            free=self._free,
            validate=self._validate,
            holders=self._describe_holders,
            ahead={ticket.id: _named(ticket.id, ticket.note or str(ticket.request)) for ticket in ahead},
        )
        return judge(scene, plan.request)

    def _describe_holders(self, position: int) -> dict[str, str]:
        """Who holds a device, a part of it, or one that it is a part of."""
        parts = self._layout.parts.get(position, 0)
        found: dict[str, str] = {}
        for other in (position, *self._layout.kin.get(position, ())):
            device = self._layout.devices[other].id
            by = "" if other == position else f", its part {device}" if parts >> other & 1 else f", all of {device}"
            for key, allocation in self._holders[other].items():
                found.setdefault(key, _named(key, (self._notes.get(key) or str(allocation.request)) + by))
        return found


def _named(key: str, note: str) -> str:
    return f"{key} ({note})"
