"""Who gets which device, who waits, and why: what is the same for one machine and for several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import inf
from threading import Lock
from time import monotonic

from anyaccel.errors import NeverFitsError, NotFreeError, UsageError
from anyaccel.model import Allocation, Extent, Gang, Inventory, Request, replace
from anyaccel.policy import PLAIN, Holding, Policy, Waiting
from anyaccel.scheduler.books import Books, Placed
from anyaccel.scheduler.grammar import parse_request
from anyaccel.scheduler.names import LazyNames
from anyaccel.scheduler.placement import Validate
from anyaccel.scheduler.plan import Arrangement, RequestPlan
from anyaccel.scheduler.queue import Queue
from anyaccel.scheduler.ticket import Ticket, notify, settled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from anyaccel.model.verdict import Verdict
    from anyaccel.scheduler.demand import Demand

RequestLike = str | Sequence[str] | Request
"""What a request can be given as: text, texts that form one request, or a value."""

_LAST = 1 << 62
_ALLOCATIONS = count(1)  # unique in the process, so that no scheduler takes back what another one gave


class Allocator:
    """Gives the devices of machines to requests, exactly and in order. Every method may be called by any thread.

    A request is served by the first machine, in their order, that can serve it now; a gang by the first ones.

    Args:
        machines: The machines by name.
        validate: The vendors' rules, as of :class:`~anyaccel.scheduler.scheduler.Scheduler`, like all that follow.
        known: Names that are known beside those on the machines.
        policy: The order of service, and which requests may pass; None for priority and arrival alone.
        clock: Seconds of the clock that the policy goes by.
    """

    def __init__(
        self,
        machines: Mapping[str, Inventory],
        validate: Validate | None = None,
        known: Iterable[str] = (),
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._validate = validate
        self._known = LazyNames(known)
        self._lock = Lock()
        self._books: dict[str, Books] = {}
        self._held: dict[str, Allocation] = {}
        self._queue = Queue()
        self._infeasible: dict[int, Ticket] = {}
        self._numbers = count(1)
        self._policy = policy or PLAIN
        self._plain = self._policy.plain
        self._timed = policy is not None  # else no request says when it ends
        self._clock = clock
        self._terms: dict[str, tuple[int | None, float | None, float | None]] = {}
        self._named: dict[str, None] = {}
        for name, inventory in machines.items():
            self._add(name, inventory)
        self._arrange()

    def allocate(
        self,
        request: RequestLike,
        *,
        hosts: int = 1,
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
            hosts: On how many machines: each of a gang's gets all that is asked for, or none gets anything.
            priority: The higher, the earlier.
            note: Whose it is, in words, for those who find the devices taken.
            time: Seconds for which it holds them at most, where the scheduler has a policy; None when it does not say.
            user: Number of the user whom the policy counts it for.

        Returns:
            The allocation, to be given back to :meth:`release`. Where there are several machines it says the machine,
            and that of a gang is a :class:`Gang`, which has one for each, its ``members``.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When nothing goes by one of its names.
            UsageError: When ``hosts`` is no number of machines.
            NeverFitsError: When it can never be served; carries the verdict.
            NotFreeError: When it cannot be served now; carries the verdict.
        """
        plan = self._resolve(request, hosts)
        with self._lock:
            plan = self._current(plan)
            waiting = self._waiting(plan, _LAST, priority, time, user)
            allocation = self._try(waiting, plan, note)
            if allocation is None:
                verdict = self._judge(plan, waiting)
        if allocation is not None:
            return allocation
        error = NotFreeError if verdict.ever_fits else NeverFitsError
        message = f"{plan.request} was not free a moment ago." if verdict.fits_now else verdict.message
        raise error(message, verdict=verdict, hint=verdict.hint)

    def submit(
        self,
        request: RequestLike,
        *,
        hosts: int = 1,
        priority: int = 0,
        note: str = "",
        time: float | None = None,
        user: int | None = None,
        infeasible: Literal["raise", "pend"] = "raise",
        on_placed: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Give devices to a request as soon as it is its turn.

        Requests compete where some device could serve both; those that do are served in order, by priority. A gang
        competes for each device that could serve one of its members.

        Args:
            request: What is asked for.
            hosts: As of :meth:`allocate`, like the next.
            priority: The higher, the earlier.
            note: Whose it is, in words.
            time: How long it holds them at most.
            user: Whom the policy counts it for.
            infeasible: What becomes of a request that can never fit: an error, or a ticket that stands in nobody's
                way and counts as demand.
            on_placed: Called once, with the ticket, when it has its allocation: before this method returns, or later
                by the thread that made room. The scheduler is not locked then. An exception is logged.

        Raises:
            RequestError, UnknownNameError, UsageError: As of :meth:`allocate`.
            NeverFitsError: When it can never be served and ``infeasible`` is ``raise``.
        """
        plan = self._resolve(request, hosts)
        with self._lock:
            plan = self._current(plan)
            never = not (plan.ever_fits or plan.request.else_cpu)
            verdict = None
            if never and infeasible == "raise":
                verdict = self._judge(plan, self._waiting(plan, _LAST, priority, time, user))
            else:
                number = next(self._numbers)
                waiting = self._waiting(plan, number, priority, time, user)
                ticket = Ticket(
                    plan,
                    waiting=waiting,
                    cancel=self.cancel,
                    why=self.why,
                    place=self._place_in_line,
                    note=note,
                    on_placed=on_placed,
                )
                ticket.allocation = self._try(waiting, plan, note)
                if never:
                    self._infeasible[number] = ticket
                elif ticket.allocation is None:
                    self._wait_in_line(ticket)
                    self._queue.add(ticket)
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
        hosts: int = 1,
        priority: int = 0,
        note: str = "",
        time: float | None = None,
        user: int | None = None,
    ) -> Allocation:
        """Wait on an asyncio loop until it is the request's turn. Any thread may make the room.

        A task that is cancelled meanwhile leaves the queue, and holds nothing.

        Args:
            request: What is asked for.
            timeout: Seconds to wait at most, not at all for 0 or less; None for no end.
            hosts: As of :meth:`allocate`, like the next.
            priority: The higher, the earlier.
            note: Whose it is, in words.
            time: How long it holds them at most.
            user: Whom the policy counts it for.

        Returns:
            The allocation, to be given back to :meth:`release`.

        Raises:
            RequestError, UnknownNameError, NeverFitsError: As of :meth:`submit`.
            UsageError: Likewise; and when ``timeout`` is no time.
            NotFreeError: When the time is over; carries the verdict.
        """
        given: object = timeout  # what callers without a type checker may pass
        if given is not None and not (isinstance(given, int | float) and given >= -inf):
            raise UsageError(f"timeout must be seconds, or None (got {timeout!r:.60})")
        ticket = self.submit(request, hosts=hosts, priority=priority, note=note, time=time, user=user)
        return await settled(ticket, self.release, timeout)

    def release(self, allocation: Allocation) -> None:
        """Take back what an allocation holds, and serve those who waited for it.

        Raises:
            ValueError: When it is not held: it was released before, another scheduler gave it, or it is a member of a
                gang, which is released as a whole.
        """
        with self._lock:
            held = self._held.pop(allocation.id, None)
            if held is None:
                raise ValueError(
                    f"allocation {allocation.id} ({allocation.request}) is not held: it was released before, or "
                    f"another scheduler gave it; a gang is released as a whole"
                )
            self._terms.pop(allocation.id, None)
            for member in held.members:
                self._give_back(member)
            placed = self._serve()
        notify(placed)

    def cancel(self, ticket: Ticket) -> bool:
        """Stop waiting; see :meth:`Ticket.cancel`."""
        with self._lock:
            waited = self._infeasible.pop(ticket.number, None) is not None
            placed: list[Ticket] = []
            if not waited:
                waited = self._leave(ticket)
                placed = self._serve() if waited else []
            ticket.cancelled = ticket.cancelled or waited
        notify(placed)
        if waited:
            ticket.wake()
        return waited

    def why(self, request: RequestLike | Ticket, *, hosts: int = 1, priority: int = 0) -> Verdict:
        """Say whether a request would be served now or ever, why not, and what near to it would.

        Args:
            request: What would be asked for, or the ticket of who waits for it.
            hosts: On how many machines; a ticket has its own number, like the next.
            priority: The higher, the earlier.

        Raises:
            RequestError, UnknownNameError, UsageError: As of :meth:`allocate`.
        """
        if isinstance(request, Ticket):
            with self._lock:
                if request.allocation is not None and not request.allocation.cpu:
                    from anyaccel.model.verdict import Verdict

                    return Verdict(request=request.request, fits_now=True, ever_fits=True)
                return self._judge(self._current(request.plan), request.waiting)
        plan = self._resolve(request, hosts)
        with self._lock:
            plan = self._current(plan)
            return self._judge(plan, self._waiting(plan, _LAST, priority, None, None))

    def pending(self) -> tuple[Ticket, ...]:
        """Those who wait, first to be served first; after them those who can never be."""
        with self._lock:
            turn = self._policy.turn(self._counted(), self._clock())
            return (*sorted(self._queue, key=lambda ticket: turn(ticket.waiting)), *self._infeasible.values())

    def demand(self) -> tuple[Demand, ...]:
        """What those who wait want, by the name that they asked for."""
        from anyaccel.scheduler.demand import summarize

        with self._lock:
            layouts = [site.books.layout for site in self._arrangement.sites]
            feasible = [ticket.plan for ticket in self._queue]
            infeasible = [ticket.plan for ticket in self._infeasible.values()]
        return (
            *summarize(layouts, feasible, infeasible=False),
            *summarize(layouts, infeasible, infeasible=True),
        )

    def _occupy(self, machine: str, held: Mapping[str, Extent], holder: str, note: str) -> Allocation:
        with self._lock:
            books = self._books[machine]
            if holder in self._held or holder in books.held:
                raise ValueError(f"holder must be an identity under which nothing is held (got {holder!r:.60})")
            allocation = books.occupy(held, holder, note)
            self._held[allocation.id] = allocation
        return allocation

    # Machines, with the lock held

    def _add(self, machine: str, inventory: Inventory) -> None:
        self._books[machine] = Books(inventory, self._validate, self._known, machine=machine, lock=self._lock)

    def _update(self, machine: str, inventory: Inventory | None) -> list[Ticket]:
        """Go on with a machine that is new, has changed, or is gone; the caller notifies those who are placed."""
        if machine in self._books:
            self._books[machine].update(inventory)
            self._drop(machine)
        elif inventory is not None:
            self._add(machine, inventory)
        self._arrange()
        placed = self._replan()
        return placed + self._serve()

    def _drop(self, machine: str) -> None:
        """Forget a machine that is gone, once nothing of it is held."""
        books = self._books[machine]
        if not books.there and not books.held:
            del self._books[machine]

    def _arrange(self) -> None:
        """Take the machines as they are now. Each knows the names of all: a request may name what another one has."""
        for books in self._books.values():
            self._named.update(dict.fromkeys(books.layout.names))
        for books in self._books.values():
            books.layout.names.learn(self._named)
        self._arrangement = Arrangement(books for books in self._books.values() if books.there)

    def _replan(self) -> list[Ticket]:
        """Look anew where all who wait can be served; those who get the CPU alone are placed."""
        tickets = sorted((*self._queue, *self._infeasible.values()), key=lambda ticket: ticket.number)
        self._queue, self._infeasible = Queue(), {}
        placed = []
        for ticket in tickets:
            ticket.plan = plan = self._current(ticket.plan)
            was = ticket.waiting
            ticket.waiting = replace(
                self._waiting(plan, was.number, was.priority, was.seconds, was.user), since=was.since
            )
            if plan.ever_fits:
                self._queue.add(ticket)
            elif plan.request.else_cpu:
                ticket.allocation = self._hold(plan, {}, ticket.note)
                placed.append(ticket)
            else:
                self._infeasible[ticket.number] = ticket
        return placed

    def _give_back(self, member: Allocation) -> None:
        """Take back what is held of one machine."""
        books = self._books.get(member.machine)
        if books is None or member.id not in books.held:  # it is the CPU's
            return
        books.release(member.id)
        site = self._arrangement.by_name.get(member.machine)
        if site is None:
            self._drop(member.machine)
        else:
            self._arrangement.note(site.number)

    # Requests

    def _resolve(self, request: RequestLike, hosts: int) -> RequestPlan:
        """Resolve a request, without the lock: others are served meanwhile, and it may have to be done again."""
        wanted = parse_request(request)
        if type(hosts) is not int or hosts < 1:
            raise UsageError(f"hosts must be a whole number, 1 or more (got {hosts!r:.60})")
        return self._arrangement.plan(wanted, hosts)

    def _current(self, plan: RequestPlan) -> RequestPlan:
        """A plan, made again when a machine has changed."""
        now = self._arrangement
        return plan if plan.arrangement is now else now.plan(plan.request, plan.hosts)

    def _waiting(self, plan: RequestPlan, number: int, priority: int, time: float | None, user: int | None) -> Waiting:
        """A request as the policy sees it."""
        return Waiting(
            key=number,
            number=number,
            since=self._clock(),
            priority=priority,
            user=user,
            seconds=time if self._timed else None,
            needs=plan.needs[0] if plan.needs else (),
            sites=plan.needs if len(plan.needs) > 1 else (),
            hosts=plan.hosts,
            wants=plan.wants,
        )

    def _try(self, waiting: Waiting, plan: RequestPlan, note: str) -> Allocation | None:
        """Serve a newcomer unless that would overtake a request that it may not pass."""
        if not plan.ever_fits:
            return self._hold(plan, {}, note) if plan.request.else_cpu else None
        held = self._counted()
        rivals = self._rivals(waiting, plan.mask, held, self._queue.firsts()) if self._queue else []
        return self._place(waiting, plan, note, rivals, held)

    def _place(
        self, waiting: Waiting, plan: RequestPlan, note: str, rivals: Sequence[Ticket], held: Sequence[Holding]
    ) -> Allocation | None:
        """Place a request if it may pass its rivals: tickets that are served before it and want one of its devices."""
        if self._limited(waiting, held) or (rivals and waiting.seconds is None):
            return None
        now = self._clock()
        if rivals:
            ahead = [ticket.waiting for ticket in rivals]
            if not self._policy.may_pass(waiting, ahead, held or self._holdings(), now):
                return None
        found = plan.find()
        if found is None:
            return None
        allocation = self._hold(plan, found, note)
        if self._timed:
            until = None if waiting.seconds is None else now + waiting.seconds
            self._terms[allocation.id] = (waiting.user, until, now if rivals else None)
        return allocation

    def _rivals(self, waiting: Waiting, mask: int, held: Sequence[Holding], among: Iterable[Ticket]) -> list[Ticket]:
        """Those of some tickets that are served before a request and want one of its devices, in the order of service.

        The first of each kind is enough to place a request: no later one can start before it.
        """
        turn = self._policy.turn(held, self._clock())
        own, found = turn(waiting), []
        for ticket in among:
            if ticket.plan.mask & mask:
                at = turn(ticket.waiting)
                if at < own and not self._limited(ticket.waiting, held):
                    found.append((at, ticket))
        return [ticket for _, ticket in sorted(found, key=lambda each: each[0])]

    def _limited(self, waiting: Waiting, held: Sequence[Holding]) -> bool:
        """Whether a request waits until its user holds less: then it waits for no other one, and none for it."""
        return not self._plain and self._policy.limited(waiting, held)

    def _counted(self) -> list[Holding]:
        """All that is held where the order of service depends on it; else nothing."""
        return [] if self._plain else self._holdings()

    def _holdings(self) -> list[Holding]:
        """All that is held, as the policy sees it."""
        found = []
        for allocation in self._held.values():
            user, until, passed = self._terms.get(allocation.id, (None, None, None))
            for member in allocation.members:
                site = self._arrangement.by_name.get(member.machine)
                if site is None:  # the machine is gone, or there is none: the CPU's
                    continue
                for each in member.shares:
                    device = site.offset + site.books.layout.positions[each.device.id]
                    found.append(Holding(device=device, units=each.units, user=user, until=until, passed=passed))
        return found

    def _hold(self, plan: RequestPlan, found: Mapping[int, Placed], note: str) -> Allocation:
        """Take what was found; nothing where a request runs on the CPU."""
        given = []
        for number in sorted(found):
            key = self._new_id()
            books = self._arrangement.sites[number].books
            given.append(books.hold(key, plan.request, plan.wanted[number], found[number], note))
        allocation: Allocation
        if len(given) == 1:
            allocation = given[0]
        elif given:
            allocation = Gang(id=self._new_id(), request=plan.request, grants=(), gang=tuple(given))
        else:
            allocation = Allocation(id=self._new_id(), request=plan.request, grants=())
        self._held[allocation.id] = allocation
        return allocation

    def _new_id(self) -> str:
        """An identity that nobody who did not ask has, such as a scheduler of another process."""
        return next(key for number in _ALLOCATIONS if (key := f"a{number}") not in self._held)

    # The queue

    def _wait_in_line(self, ticket: Ticket) -> None:
        """Do what a ticket needs beside its place in the queue, which is nothing here; with the lock held."""

    def _leave(self, ticket: Ticket) -> bool:
        """Take a ticket out of the queue; False when it does not wait there."""
        return self._queue.remove(ticket)

    def _serve(self) -> list[Ticket]:
        """Place the tickets whose turn it is; the caller notifies them once the lock is open."""
        served: list[Ticket] = []
        while self._queue and (ticket := self._serve_next()) is not None:
            served.append(ticket)
        return served

    def _serve_next(self) -> Ticket | None:
        """Place the first ticket in the order of service that can be placed; None when none can."""
        held = self._counted()
        turn = self._policy.turn(held, self._clock())
        ahead: list[Ticket] = []
        blocked = 0
        for ticket in sorted(self._queue.firsts(), key=lambda each: turn(each.waiting)):
            if self._limited(ticket.waiting, held):
                continue
            mask = ticket.plan.mask
            if not mask & blocked or ticket.waiting.seconds is not None:
                rivals = [each for each in ahead if each.plan.mask & mask]
                ticket.allocation = self._place(ticket.waiting, ticket.plan, ticket.note, rivals, held)
                if ticket.allocation is not None:
                    self._leave(ticket)
                    return ticket
            ahead.append(ticket)
            blocked |= mask
        return None

    def _place_in_line(self, ticket: Ticket) -> int:
        """The place of a ticket; see :attr:`Ticket.place`."""
        with self._lock:
            if ticket not in self._queue:
                return 0
            return 1 + len(self._rivals(ticket.waiting, ticket.plan.mask, self._counted(), self._queue))

    def _ahead(self, plan: RequestPlan, waiting: Waiting) -> dict[str, str]:
        """Tickets that come first and want the same devices, with what to call them."""
        ahead = self._rivals(waiting, plan.mask, self._counted(), self._queue)
        return {ticket.id: f"{ticket.id} ({ticket.note or ticket.request})" for ticket in ahead}

    def _judge(self, plan: RequestPlan, waiting: Waiting) -> Verdict:
        """Say whether a request would be served now or ever, and why not."""
        from anyaccel.model.verdict import Reason, ReasonCode, Verdict
        from anyaccel.scheduler.explain import judge

        ahead = self._ahead(plan, waiting)
        if plan.ever_fits and not ahead and plan.find() is not None:
            verdict = Verdict(request=plan.request, fits_now=True, ever_fits=True)
        else:
            verdict = judge(plan, [site.books for site in self._arrangement.sites], ahead)
        held = self._counted()
        if verdict.ever_fits and self._limited(waiting, held):
            user = "" if waiting.user is None else f"user {waiting.user}"
            over = [each for each in self._policy.over_limits(waiting, held) if each.limit == "devices"]
            limits = (Reason(code=ReasonCode.LIMIT, message=each.message(user)) for each in over)
            return replace(verdict, fits_now=False, reasons=(*limits, *verdict.reasons))
        return verdict
