"""The scheduler of several machines in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from threading import Lock

from anyaccel.errors import NeverFitsError, NotFreeError
from anyaccel.model import Allocation, Inventory, Request, replace
from anyaccel.policy import Waiting
from anyaccel.scheduler.cells import bits
from anyaccel.scheduler.grammar import parse_request
from anyaccel.scheduler.names import names_of
from anyaccel.scheduler.placement import Validate
from anyaccel.scheduler.queue import Queue
from anyaccel.scheduler.reasons import Reason, Verdict
from anyaccel.scheduler.scheduler import RequestLike, Scheduler
from anyaccel.scheduler.ticket import Plan, Ticket, notify, settled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

_LAST = 1 << 62
_PLANS = 4_096
_TOLD = 4
"""Machines whose reasons are told one by one."""


class Fleet:
    """Gives the devices of several machines to requests, each of them on one machine, exactly and in order.

    A request gets the first machine, in their order, that can serve it now; so machines fill up one after the other.
    Every method may be called by any thread.

    Args:
        machines: The machines by name.
        validate: The vendors' rules, as of :class:`Scheduler`.
        known: Names that are known beside those on the machines, likewise.
    """

    def __init__(
        self, machines: Mapping[str, Inventory], validate: Validate | None = None, known: Iterable[str] = ()
    ) -> None:
        self._validate = validate
        self._lock = Lock()
        self._known = _Known(known)
        self._named: dict[str, None] = {}
        self._names: list[str] = []
        self._schedulers: dict[str, Scheduler] = {}
        self._places: dict[str, _Place] = {}
        self._held: dict[str, Allocation] = {}
        self._queue: Queue[Ticket] = Queue()
        self._infeasible: dict[int, Ticket] = {}
        self._numbers = count(1)
        self._plans: dict[Request, _Plan] = {}
        self._changes = _Changes(0)
        self._there = set(machines)
        for name, inventory in machines.items():
            self._schedulers[name] = Scheduler(inventory, validate, self._known)
        self._know(machines.values())
        self._arrange()

    @property
    def machines(self) -> Mapping[str, Inventory]:
        """The machines by name, as they were last told."""
        return {name: self._schedulers[name].inventory for name in self._names}

    def update(self, machine: str, inventory: Inventory | None) -> None:
        """Go on with a machine that is new, has changed, or is gone.

        Nothing that is held is lost, also of a machine that is gone, until it is released. Who waits keeps the place;
        see :meth:`Scheduler.update`.

        Args:
            machine: Its name.
            inventory: What it has now; None when it is gone.
        """
        with self._lock:
            if inventory is None:
                self._there.discard(machine)
            else:
                self._there.add(machine)
            scheduler = self._schedulers.get(machine)
            if scheduler is not None:
                scheduler.update(inventory or Inventory(machine=scheduler.inventory.machine, devices=()))
            elif inventory is not None:
                self._schedulers[machine] = Scheduler(inventory, self._validate, self._known)
            self._know([inventory] if inventory else [])
            self._drop(machine)
            self._arrange()
            placed = self._replan()
            placed += self._serve((1 << self._width) - 1)
        notify(placed)

    def allocate(self, request: RequestLike, *, priority: int = 0, note: str = "") -> Allocation:
        """Give devices of one machine to a request at once; see :meth:`Scheduler.allocate`.

        Args:
            request: What is asked for.
            priority: The higher, the earlier.
            note: Whose it is, in words.

        Returns:
            The allocation, which says the machine, to be given back to :meth:`release`.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
            NeverFitsError: When no machine can ever serve it; carries the verdict.
            NotFreeError: When none can serve it now; carries the verdict.
        """
        wanted = parse_request(request)
        with self._lock:
            plan = self._plan(wanted)
            allocation = self._try(plan, priority, note)
            if allocation is not None:
                return allocation
            verdict = self._judge(plan, priority)
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
        """Give devices of one machine to a request as soon as it is its turn; see :meth:`Scheduler.submit`.

        Requests compete where one machine has a device that could serve both; they are served in order, by priority.

        Args:
            request: What is asked for.
            priority: The higher, the earlier.
            note: Whose it is, in words.
            infeasible: What becomes of a request that no machine can ever serve.
            on_placed: Called once, with the ticket, when it has its allocation.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
            NeverFitsError: When no machine can ever serve it and ``infeasible`` is ``raise``.
        """
        wanted = parse_request(request)
        with self._lock:
            plan = self._plan(wanted)
            never = not (plan.mask or wanted.else_cpu)
            if never and infeasible == "raise":
                verdict = self._judge(plan, priority)
                raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
            number = next(self._numbers)
            ticket = Ticket(
                plan.told,
                cancel=self.cancel,
                why=self.why,
                place=self._place_in_line,
                waiting=Waiting(key=number, number=number, since=0.0, priority=priority),
                note=note,
                on_placed=on_placed,
            )
            ticket.allocation = self._try(plan, priority, note)
            if never:
                self._infeasible[number] = ticket
            elif ticket.allocation is None:
                self._queue.add(ticket, priority=priority, number=number, mask=plan.mask)
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
    ) -> Allocation:
        """Wait on an asyncio loop until it is the request's turn; see :meth:`Scheduler.acquire`."""
        return await settled(self.submit(request, priority=priority, note=note), self.release, timeout)

    def release(self, allocation: Allocation) -> None:
        """Take back what an allocation holds, and serve those who waited for it.

        Raises:
            ValueError: When it is not held: it was released before, or another scheduler gave it.
        """
        with self._lock:
            if self._held.pop(allocation.id, None) is None:
                raise ValueError(
                    f"allocation {allocation.id} ({allocation.request}) is not held: it was released before"
                )
            if not allocation.machine:  # the CPU's
                return
            self._schedulers[allocation.machine].release(allocation)
            if allocation.machine not in self._places:
                self._drop(allocation.machine)
                return
            place = self._places[allocation.machine]
            self._changes.note(place.number)
            placed = self._serve(place.mask)
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

    def why(self, request: RequestLike | Ticket, *, priority: int = 0) -> Verdict:
        """Say whether a request would be served now or ever, and why not; see :meth:`Scheduler.why`."""
        wanted = request.request if isinstance(request, Ticket) else parse_request(request)
        with self._lock:
            if not isinstance(request, Ticket):
                return self._judge(self._plan(wanted), priority)
            if request.allocation is not None and not request.allocation.cpu:
                return Verdict(request=wanted, fits_now=True, ever_fits=True)
            return self._judge(self._plan(wanted), request.priority, request.number)

    def on(self, machine: str) -> Scheduler:
        """The books of one machine, to look at: what is free there and who holds it.

        Raises:
            KeyError: When no machine has this name.
        """
        return self._schedulers[machine]

    def pending(self) -> tuple[Ticket, ...]:
        """Those who wait, first to be served first; after them those who can never be."""
        with self._lock:
            return (*self._queue, *self._infeasible.values())

    # With the lock held

    def _know(self, inventories: Iterable[Inventory]) -> None:
        """Let every machine know the names of all: a request may name what another one has."""
        found = (name for inventory in inventories for device in inventory.devices for name in names_of(device))
        self._named.update(dict.fromkeys(found))
        for scheduler in self._schedulers.values():
            scheduler.know(self._named)

    def _drop(self, machine: str) -> None:
        """Forget a machine that is gone, once nothing of it is held."""
        held = any(allocation.machine == machine for allocation in self._held.values())
        if machine not in self._there and not held:
            self._schedulers.pop(machine, None)

    def _arrange(self) -> None:
        """Give each machine that is there its number, and its devices their positions among all devices."""
        self._names = [name for name in self._schedulers if name in self._there]
        self._places, self._width = {}, 0
        for number, name in enumerate(self._names):
            width = len(self._schedulers[name].inventory.devices)
            self._places[name] = _Place(number, self._width, width)
            self._width += width
        self._plans, self._changes = {}, _Changes(len(self._names))

    def _plan(self, request: Request) -> _Plan:
        """Which machines can ever serve a request: asked once, until a machine changes.

        Raises:
            UnknownNameError: When nothing goes by one of its names.
        """
        found = self._plans.get(request)
        if found is None:
            machines = mask = 0
            for name, place in self._places.items():
                rivals = self._schedulers[name].rivals(request)
                if rivals:
                    machines |= 1 << place.number
                    mask |= rivals << place.offset
            found = _Plan(request, machines, mask)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[request] = found
        return found

    def _try(self, plan: _Plan, priority: int, note: str) -> Allocation | None:
        """Serve a newcomer unless that would overtake somebody who may not be passed."""
        if not plan.mask:
            if not plan.request.else_cpu:
                return None
            return self._hold(Allocation(id=f"c{next(self._numbers)}", request=plan.request, grants=()), "")
        if self._queue.blocked(priority=priority, mask=plan.mask):
            return None
        return self._place(plan, note)

    def _place(self, plan: _Plan, note: str) -> Allocation | None:
        """Serve a request on the first machine that can; one that refused is asked again once it got something back."""
        plan.catch_up(self._changes)
        while plan.open:
            number = (plan.open & -plan.open).bit_length() - 1
            name = self._names[number]
            allocation = self._schedulers[name].attempt(plan.request, note)
            if allocation is not None:
                return self._hold(allocation, name)
            plan.open &= plan.open - 1
        return None

    def _hold(self, allocation: Allocation, machine: str) -> Allocation:
        found = self._held[allocation.id] = replace(allocation, machine=machine)
        return found

    def _serve(self, changed: int) -> list[Ticket]:
        served: list[Ticket] = []

        def serve(ticket: Ticket) -> bool:
            ticket.allocation = self._place(self._plan(ticket.request), ticket.note)
            if ticket.allocation is not None:
                served.append(ticket)
            return ticket.allocation is not None

        self._queue.serve(changed, serve)
        return served

    def _replan(self) -> list[Ticket]:
        """Look anew where all who wait can ever be served; those who get the CPU alone are placed."""
        tickets = sorted((*self._queue, *self._infeasible.values()), key=lambda ticket: ticket.number)
        self._queue, self._infeasible = Queue(), {}
        placed = []
        for ticket in tickets:
            plan = self._plan(ticket.request)
            ticket.plan = plan.told
            if plan.mask:
                self._queue.add(ticket, priority=ticket.priority, number=ticket.number, mask=plan.mask)
            elif ticket.request.else_cpu:
                ticket.allocation = self._try(plan, ticket.priority, ticket.note)
                placed.append(ticket)
            else:
                self._infeasible[ticket.number] = ticket
        return placed

    def _place_in_line(self, ticket: Ticket) -> int:
        with self._lock:
            if all(each is not ticket for each in self._queue):
                return 0
            return 1 + len(self._ahead(ticket.plan.mask, ticket.priority, ticket.number))

    def _ahead(self, mask: int, priority: int, number: int) -> list[Ticket]:
        return list(self._queue.ahead(priority=priority, number=number, mask=mask))

    def _judge(self, plan: _Plan, priority: int, number: int = _LAST) -> Verdict:
        """Say why no machine serves a request, of the first ones one by one."""
        ahead = self._ahead(plan.mask, priority, number)
        allocation = None if ahead else self._place(plan, "")
        if allocation is not None:
            del self._held[allocation.id]
            self._schedulers[allocation.machine].release(allocation)
            return Verdict(request=plan.request, fits_now=True, ever_fits=True)
        reasons: list[Reason] = []
        if ahead:
            from anyaccel.scheduler.explain import waiting_behind

            reasons.append(waiting_behind({each.id: f"{each.id} ({each.note or each.request})" for each in ahead}))
        names = [self._names[each] for each in bits(plan.machines)] or self._names
        verdicts: list[Verdict] = []
        for name in names[:_TOLD]:
            verdicts.append(self._schedulers[name].why(plan.request))
            reasons += [replace(each, message=f"{name}: {each.message}") for each in verdicts[-1].reasons]
        if reasons and len(names) > _TOLD:
            more = len(names) - _TOLD
            message = f"{reasons[-1].message}; {more} more machine{'s' if more > 1 else ''} likewise"
            reasons[-1] = replace(reasons[-1], message=message)
        near = (verdict.nearest for verdict in verdicts if verdict.nearest is not None)
        now = (verdict.nearest_now for verdict in verdicts if verdict.nearest_now is not None)
        return Verdict(
            request=plan.request,
            fits_now=False,
            ever_fits=bool(plan.mask),
            reasons=tuple(reasons),
            nearest=None if plan.mask else next(near, None),
            nearest_now=None if ahead else next(now, None),
            ways_out=tuple(dict.fromkeys(way for verdict in verdicts for way in verdict.ways_out)),
        )


class _Place:
    """Where a machine stands among all.

    Attributes:
        number: Its number.
        offset: Position of its first device among all devices.
        mask: The positions of all its devices, as a bit mask.
    """

    __slots__ = ("mask", "number", "offset")

    def __init__(self, number: int, offset: int, width: int) -> None:
        self.number = number
        self.offset = offset
        self.mask = ((1 << width) - 1) << offset


class _Changes:
    """On which machines something was given back, in order: who asks takes note of what is new, and nothing else."""

    def __init__(self, machines: int) -> None:
        self._most = 2 * machines + 64
        self._log: list[int] = []
        self._dropped = 0

    def note(self, machine: int) -> None:
        """Something was given back there."""
        self._log.append(machine)
        if len(self._log) > 2 * self._most:
            del self._log[: self._most]
            self._dropped += self._most

    @property
    def end(self) -> int:
        """How many changes there were."""
        return self._dropped + len(self._log)

    def since(self, at: int) -> list[int] | None:
        """The machines of the changes after so many; None when that is too long ago."""
        return self._log[at - self._dropped :] if at >= self._dropped else None


class _Plan:
    """A request in the terms of all machines.

    Attributes:
        request: The request.
        machines: The machines that can ever serve it, as a bit mask.
        mask: The devices for which it competes, by their positions among all, likewise.
        open: The machines that have not refused it since something was given back there.
        told: The same for tickets.
    """

    __slots__ = ("_seen", "machines", "mask", "open", "request", "told")

    def __init__(self, request: Request, machines: int, mask: int) -> None:
        self.request = request
        self.machines = self.open = machines
        self.mask = mask
        self.told = Plan(request=request, wanted=(), mask=mask, ever_fits=bool(mask))
        self._seen = 0

    def catch_up(self, changes: _Changes) -> None:
        """Take note of the machines where something was given back."""
        new = changes.since(self._seen)
        self._seen = changes.end
        if new is None:
            self.open = self.machines
            return
        for number in new:
            self.open |= self.machines & 1 << number


class _Known:
    """Names that are known though no machine has them: looked for once, when one of the machines wants to know."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = names
        self._found: tuple[str, ...] | None = None

    def __iter__(self) -> Iterator[str]:
        if self._found is None:
            self._found = tuple(self._names)
        return iter(self._found)
