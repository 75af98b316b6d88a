"""The scheduler of one process: who gets which device, who waits, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Lock
from time import monotonic

from anyaccel.errors import NeverFitsError, NotFreeError
from anyaccel.model import Allocation, Device, Extent, Grant, Health, Inventory, Request, Term, replace, slot_numbers
from anyaccel.policy import Holding, Need, Policy, Waiting
from anyaccel.scheduler.cells import bits
from anyaccel.scheduler.choice import extent_within, grants, share
from anyaccel.scheduler.grammar import parse_request
from anyaccel.scheduler.placement import Layout, Occupancy, Spot, Validate, place, want
from anyaccel.scheduler.queue import Queue
from anyaccel.scheduler.ticket import Plan, Ticket, notify, settled

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
        policy: Who is next and who may pass whom, as for those who wait in the machine's ledger; None for priority and
            arrival alone.
        clock: Seconds of the clock that the policy goes by.
    """

    def __init__(
        self,
        inventory: Inventory,
        validate: Validate | None = None,
        known: Iterable[str] = (),
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._inventory = inventory
        self._layout = Layout(inventory, known)
        self._validate = validate
        self._lock = Lock()
        self._free = Occupancy(self._layout)
        self._spots: dict[str, tuple[Spot, ...]] = {}
        self._short = False
        self._held: dict[str, Allocation] = {}
        self._notes: dict[str, str] = {}
        self._holders: list[dict[str, Allocation]] = [{} for _ in inventory.devices]
        self._queue: Queue[Ticket] = Queue()
        self._infeasible: dict[int, Ticket] = {}
        self._plans: tuple[Layout, dict[Request, Plan]] = (self._layout, {})
        self._numbers = count(1)
        self._policy = policy
        self._clock = clock
        self._terms: dict[str, tuple[int | None, float | None, float | None]] = {}

    @property
    def inventory(self) -> Inventory:
        """The machine, as it was last told."""
        return self._inventory

    def update(self, inventory: Inventory) -> None:
        """Go on with a machine of which devices were lost, added, repaired or divided anew.

        Nothing that is held is lost: what somebody holds of a device that is no longer there, or that can no longer be
        given out, counts until it is released, also should the device come back meanwhile. Who waits keeps the place,
        and whoever can be served now is. Who waits for what can never fit any more stands in nobody's way until it can
        again; with ``else=cpu`` it gets an allocation without devices. Names that were known stay known.

        Args:
            inventory: The machine as it is now.
        """
        with self._lock:
            there = {device.id for device in inventory.devices}
            lost = {
                each.device.id: _lost(each.device)
                for allocation in self._held.values()
                for each in allocation.shares
                if each.device.id not in there
            }
            layout = Layout(replace(inventory, devices=(*inventory.devices, *lost.values())))
            layout.names.keep(self._layout.names)
            self._inventory, self._layout, self._plans = inventory, layout, (layout, {})
            self._holders = [{} for _ in layout.devices]
            for key, allocation in self._held.items():
                for each in allocation.shares:
                    self._holders[layout.positions[each.device.id]][key] = allocation
            self._recount()
            placed = self._replan()
            placed += self._serve((1 << len(layout.devices)) - 1)
        notify(placed)

    def _recount(self) -> None:
        """Count all that is held on the machine as it is now, first come first."""
        self._free, self._short = Occupancy(self._layout), False
        for key, allocation in self._held.items():
            spots = []
            for each in allocation.shares:
                position = self._layout.positions[each.device.id]
                device = self._layout.devices[position]
                spot = self._free.spot_within(position, extent_within(each, device))
                self._free.take((spot,))
                self._short |= device.usable and spot.units < each.units
                spots.append(spot)
            self._spots[key] = tuple(spots)

    def _replan(self) -> list[Ticket]:
        """Resolve the requests of all who wait anew; those who get the CPU alone are placed."""
        tickets = sorted((*self._queue, *self._infeasible.values()), key=lambda ticket: ticket.number)
        self._queue, self._infeasible = Queue(), {}
        placed = []
        for ticket in tickets:
            plan, was = self._plan(*self._plans, ticket.request), ticket.waiting
            ticket.plan = plan
            ticket.waiting = replace(
                self._waiting(plan, was.number, was.priority, was.seconds, was.user), since=was.since
            )
            if plan.ever_fits:
                self._queue.add(ticket, priority=ticket.priority, number=ticket.number, mask=plan.mask)
            elif plan.request.else_cpu:
                ticket.allocation = self._hold(plan, (), ticket.note)
                placed.append(ticket)
            else:
                self._infeasible[ticket.number] = ticket
        return placed

    def allocate(
        self,
        request: RequestLike,
        *,
        priority: int = 0,
        note: str = "",
        time: float | None = None,
        user: int | None = None,
    ) -> Allocation:
        """Give devices to a request at once.

        Nobody who waits for the same devices with at least this priority is overtaken. With ``else=cpu``, a request
        that can *never* fit gets an allocation without devices; one that could fit later does not, since falling
        back while devices are merely busy is rarely meant.

        Args:
            request: What is asked for.
            priority: The higher, the earlier.
            note: Whose it is, in words, for those who find the devices taken.
            time: Seconds for which it holds them at most, where the scheduler has a policy; None when it does not say.
            user: Number of the user whom the policy counts it for.

        Returns:
            The allocation, to be given back to :meth:`release`.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
            NeverFitsError: When this machine can never serve it; carries the verdict.
            NotFreeError: When this machine cannot serve it now; carries the verdict.
        """
        with self._resolved(request) as plan:
            allocation = self._try(self._waiting(plan, _LAST, priority, time, user), plan, note)
            if allocation is None:
                verdict = self._judge(plan, priority)
        if allocation is not None:
            return allocation
        error = NotFreeError if verdict.ever_fits else NeverFitsError
        raise error(verdict.message, verdict=verdict, hint=verdict.hint)

    def know(self, names: Iterable[str]) -> None:
        """Take some names for known: nothing on this machine goes by them, and asking for them is no error."""
        with self._lock:
            self._layout.names.learn(names)

    def attempt(self, request: Request, note: str = "") -> Allocation | None:
        """Give devices to a request at once as :meth:`allocate` does, or say no more than that it cannot be served now.

        Args:
            request: What is asked for.
            note: Whose it is, in words.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        with self._resolved(request) as plan:
            return self._try(self._waiting(plan, _LAST, 0, None, None), plan, note) if plan.ever_fits else None

    def rivals(self, request: Request) -> int:
        """The devices for which a request competes, as a bit mask by their position; 0 where it can never fit.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        with self._resolved(request) as plan:
            return plan.mask if plan.ever_fits else 0

    def submit(
        self,
        request: RequestLike,
        *,
        priority: int = 0,
        note: str = "",
        time: float | None = None,
        user: int | None = None,
        infeasible: Literal["raise", "pend"] = "raise",
        on_placed: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Give devices to a request as soon as it is its turn.

        Args:
            request: What is asked for.
            priority: The higher, the earlier.
            note: Whose it is, in words.
            time: As of :meth:`allocate`, like the next.
            user: Whom the policy counts it for.
            infeasible: What becomes of a request that can never fit: an error, or a ticket that stands in nobody's
                way and counts as demand.
            on_placed: Called once, with the ticket, when it has its allocation: before this method returns, or later
                by the thread that made room. The scheduler is not locked then. An exception is logged.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
            NeverFitsError: When this machine can never serve it and ``infeasible`` is ``raise``.
        """
        with self._resolved(request) as plan:
            never = not (plan.ever_fits or plan.request.else_cpu)
            verdict = self._judge(plan, priority) if never and infeasible == "raise" else None
            if verdict is None:
                number = next(self._numbers)
                waiting = self._waiting(plan, number, priority, time, user)
                ticket = self._ticket(plan, waiting, note, on_placed)
                ticket.allocation = self._try(waiting, plan, note)
                if never:
                    self._infeasible[number] = ticket
                elif ticket.allocation is None:
                    self._queue.add(ticket, priority=priority, number=number, mask=plan.mask)
        if verdict is not None:
            raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
        if ticket.allocation is not None:
            notify([ticket])
        return ticket

    async def acquire(
        self,
        request: RequestLike,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 -- as of asyncio.wait_for; nothing is left waiting when it ends
        priority: int = 0,
        note: str = "",
        time: float | None = None,
        user: int | None = None,
    ) -> Allocation:
        """Wait on an asyncio loop until it is the request's turn. Any thread may make the room.

        A task that is cancelled meanwhile leaves the queue, and holds nothing.

        Args:
            request: What is asked for.
            timeout: Seconds to wait at most; None for no end.
            priority: The higher, the earlier.
            note: Whose it is, in words.
            time: As of :meth:`allocate`, like the next.
            user: Whom the policy counts it for.

        Returns:
            The allocation, to be given back to :meth:`release`.

        Raises:
            RequestError, UnknownNameError, NeverFitsError: As of :meth:`submit`.
            NotFreeError: When the time is over; carries the verdict.
        """
        ticket = self.submit(request, priority=priority, note=note, time=time, user=user)
        return await settled(ticket, self.release, timeout)

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
            self._terms.pop(allocation.id, None)
            changed = 0
            for spot in self._spots.pop(allocation.id):
                self._free.give((spot,))
                self._holders[spot.position].pop(allocation.id, None)
                changed |= 1 << spot.position
            if self._short:  # others hold more than a device that shrank still has: it is theirs before it is free
                self._recount()
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
        if waited:
            ticket.wake()
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
            return self._count(held, holder, note)

    def _count(self, held: Mapping[str, Extent], holder: str, note: str) -> Allocation:
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
        with self._resolved(request) as plan:
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

    @contextmanager
    def _resolved(self, request: RequestLike) -> Iterator[Plan]:
        """Resolve a request, then take the lock; once more when the machine was updated meanwhile."""
        wanted = parse_request(request)
        while True:
            layout, plans = self._plans
            plan = self._plan(layout, plans, wanted)
            with self._lock:
                if layout is self._layout:
                    yield plan
                    return

    def _plan(self, layout: Layout, plans: dict[Request, Plan], request: Request) -> Plan:
        """Resolve a request against a machine. Needs no lock: it depends on nothing that changes."""
        found = plans.get(request)
        if found is None:
            wanted = tuple(want(layout, term) for term in request.terms)
            mask = 0
            for each in wanted:
                mask |= layout.with_parts(each.mask)
            ever = place(layout, Occupancy(layout), wanted, self._validate) is not None
            found = Plan(request=request, wanted=wanted, mask=mask, ever_fits=ever)
            if len(plans) >= _PLANS:
                plans.clear()
            plans[request] = found
        return found

    def _waiting(self, plan: Plan, number: int, priority: int, time: float | None, user: int | None) -> Waiting:
        """A request as the policy sees it; without a policy, the order alone."""
        if self._policy is None:
            return Waiting(key=number, number=number, since=0.0, priority=priority)
        needs = tuple(
            Need(count=each.term.count, units=each.units, among=frozenset(bits(each.mask))) for each in plan.wanted
        )
        return Waiting(
            key=number,
            number=number,
            since=self._clock(),
            priority=priority,
            user=user,
            seconds=time,
            needs=needs,
            wants=frozenset(bits(plan.mask)),
        )

    def _ticket(self, plan: Plan, waiting: Waiting, note: str, on_placed: Callable[[Ticket], None] | None) -> Ticket:
        return Ticket(
            plan,
            cancel=self.cancel,
            why=self.why,
            place=self._place_in_line,
            waiting=waiting,
            note=note,
            on_placed=on_placed,
        )

    def _place_in_line(self, ticket: Ticket) -> int:
        """The place of a ticket; see :attr:`Ticket.place`."""
        with self._lock:
            line = {each.number: each for each in self._queue}
            if ticket.number not in line:
                return 0
            if self._policy is None:
                mask = ticket.plan.mask
                return 1 + sum(1 for _ in self._queue.ahead(priority=ticket.priority, number=ticket.number, mask=mask))
            order = self._policy.order([each.waiting for each in line.values()], self._holdings(), self._clock())
            ahead = order[: next(at for at, each in enumerate(order) if each.number == ticket.number)]
            return 1 + sum(each.competes(ticket.waiting) for each in ahead)

    def _try(self, waiting: Waiting, plan: Plan, note: str) -> Allocation | None:
        """Serve a newcomer unless that would overtake somebody who may not be passed."""
        if not plan.ever_fits:
            return self._hold(plan, (), note) if plan.request.else_cpu else None
        if self._policy is not None:
            held, now = self._holdings(), self._clock()
            line = [ticket.waiting for ticket in self._queue]
            return self._place_in_turn(waiting, plan, note, self._policy.order([*line, waiting], held, now), held, now)
        if self._queue.blocked(priority=waiting.priority, mask=plan.mask):
            return None
        return self._place(plan, note)

    def _place_in_turn(  # noqa: PLR0917 -- what was found out once for all who wait
        self,
        waiting: Waiting,
        plan: Plan,
        note: str,
        order: Sequence[Waiting],
        held: Sequence[Holding],
        now: float,
    ) -> Allocation | None:
        """Place a request if it is its turn, or it may pass those whose turn it is."""
        policy = self._policy
        if policy is None or policy.limited(waiting, held):
            return None
        at = next(position for position, each in enumerate(order) if each is waiting)
        ahead = [each for each in order[:at] if waiting.competes(each) and not policy.limited(each, held)]
        if ahead and not policy.may_pass(waiting, ahead, held, now):
            return None
        allocation = self._place(plan, note)
        if allocation is not None:
            until = None if waiting.seconds is None else now + waiting.seconds
            self._terms[allocation.id] = (waiting.user, until, now if ahead else None)
        return allocation

    def _holdings(self) -> list[Holding]:
        """All that is held, as the policy sees it."""
        found = []
        for allocation in self._held.values():
            user, until, passed = self._terms.get(allocation.id, (None, None, None))
            for each in allocation.shares:
                position = self._layout.positions[each.device.id]
                found.append(Holding(device=position, units=each.units, user=user, until=until, passed=passed))
        return found

    def _place(self, plan: Plan, note: str) -> Allocation | None:
        placed = place(self._layout, self._free, plan.wanted, self._validate)
        return None if placed is None else self._hold(plan, placed, note)

    def _hold(self, plan: Plan, placed: Sequence[Sequence[Spot]], note: str) -> Allocation:
        wanted = plan.wanted if placed else ()  # nothing is placed on the CPU
        made = grants(self._layout, wanted, placed)
        return self._enter(Allocation(id=f"a{next(_ALLOCATIONS)}", request=plan.request, grants=made), note)

    def _enter(self, allocation: Allocation, note: str) -> Allocation:
        """Write an allocation into the books."""
        spots = tuple(self._free.spot_of(each) for each in allocation.shares)
        for spot in spots:
            self._free.take((spot,))
            self._holders[spot.position][allocation.id] = allocation
        self._spots[allocation.id] = spots
        self._held[allocation.id] = allocation
        if note:
            self._notes[allocation.id] = note
        return allocation

    def _serve(self, changed: int) -> list[Ticket]:
        """Place those whose turn it is; the caller notifies them once the lock is open."""
        served: list[Ticket] = []
        if self._policy is not None:
            while (ticket := self._serve_next(self._policy)) is not None:
                served.append(ticket)
            return served

        def serve(ticket: Ticket) -> bool:
            ticket.allocation = self._place(ticket.plan, ticket.note)
            if ticket.allocation is not None:
                served.append(ticket)
            return ticket.allocation is not None

        self._queue.serve(changed, serve)
        return served

    def _serve_next(self, policy: Policy) -> Ticket | None:
        """Place the first in the order of service that can be placed; None when nobody can."""
        held, now = self._holdings(), self._clock()
        tickets = {ticket.number: ticket for ticket in self._queue}
        order = policy.order([ticket.waiting for ticket in tickets.values()], held, now)
        for each in order:
            ticket = tickets[each.number]
            ticket.allocation = self._place_in_turn(each, ticket.plan, ticket.note, order, held, now)
            if ticket.allocation is not None:
                self._queue.remove(priority=ticket.priority, number=ticket.number, mask=ticket.plan.mask)
                return ticket
        return None

    def _judge(self, plan: Plan, priority: int, number: int = _LAST) -> Verdict:
        from anyaccel.scheduler.explain import Scene, judge

        scene = Scene(
            layout=self._layout,
            free=self._free,
            validate=self._validate,
            holders=self._describe_holders,
            ahead=self._ahead(plan, priority, number),
        )
        return judge(scene, plan.request)

    def _ahead(self, plan: Plan, priority: int, number: int) -> dict[str, str]:
        """Tickets that come first and want the same devices, with what to call them."""
        ahead = self._queue.ahead(priority=priority, number=number, mask=plan.mask)
        return {ticket.id: _named(ticket.id, ticket.note or str(ticket.request)) for ticket in ahead}

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


def _lost(device: Device) -> Device:
    """A device that is no longer there, though somebody holds it: given to nobody, near nothing."""
    return replace(
        device,
        links={},
        numa_node=None,
        pci_bus_id=None,
        health=Health.UNHEALTHY,
        health_reason="lost, though it is still held",
        health_remedy="",
    )
