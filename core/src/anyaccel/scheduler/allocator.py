"""The schedulers of one machine and of several, in one process: allocation, waiting and reasons."""

from __future__ import annotations

import contextlib
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from math import inf
from time import monotonic

from anyaccel._interrupts import finish_step
from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import AnyaccelError, NeverFitsError, NotFreeError, UsageError
from anyaccel.model import UNITS_PER_DEVICE, Allocation, Extent, Gang, Inventory, Request, replace
from anyaccel.policy import PLAIN, Holding, Policy, Usage, Waiting, sum_usage
from anyaccel.scheduler.books import NO_TERMS, Books, RequestPlan
from anyaccel.scheduler.grammar import parse_request
from anyaccel.scheduler.placement import NameRegistry, Placed
from anyaccel.scheduler.ticket import Queue, Ticket, notify, settled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from anyaccel.model import Verdict
    from anyaccel.scheduler.demand import Demand
    from anyaccel.scheduler.placement import Validate

RequestLike = str | Sequence[str] | Request
"""Accepted forms of a request: text, texts that form one request, or a value."""

_LAST = 1 << 62  # number of a request that does not wait: behind every ticket
_ALLOCATIONS = count(1)  # unique in the process, so that release() detects allocations of another scheduler


class Allocator:
    """Gives devices of machines to requests, exactly and in order. Methods are thread-safe.

    A request is served by the first machine, in their order, that can serve it now; a gang by the first ones.

    Args:
        machines: The machines by name.
        validate: The vendors' rules, as for :class:`~anyaccel.scheduler.Scheduler`, like all that follow.
        known: Names that are known beside those on the machines.
        policy: The queue policy; None for priority and arrival alone.
        clock: Returns the time in seconds for the policy.
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
        self._names = NameRegistry(known)
        self._lock = allocate_lock()
        self._books: dict[str, Books] = {}
        self._held: dict[str, Allocation] = {}
        self._former: set[str] = set()  # identities of restored members, which no new allocation gets
        self._queue = Queue()
        self._served: list[Ticket] = []  # those that were placed last, of which an interrupt may keep the notice
        self._numbers = count(1)
        self._policy = policy or PLAIN
        self._timed = policy is not None  # else time limits are ignored
        self._clock = clock
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
        time: Duration | None = None,
        user: int | None = None,
    ) -> Allocation:
        """Give devices to a request at once.

        No waiting request for the same devices with at least this priority is passed. With ``else=cpu``, a request that
        can *never* fit gets an allocation without devices; a request that could fit later raises an error, since a
        fallback from busy devices is rarely meant.

        Args:
            request: The request.
            hosts: Number of machines: each of a gang's gets the whole request, or none gets anything.
            priority: The higher, the earlier.
            note: Owner of the allocation, for other users' messages.
            time: Time limit, if the scheduler has a policy; None for no limit.
            user: Number of the user for limits and fair shares.

        Returns:
            The allocation, to be passed to :meth:`release`. With several machines it names the machine; a gang is a
            :class:`Gang`, with one ``members`` entry for each machine.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When no device has one of its names.
            UsageError: When ``hosts`` is not a positive whole number, or ``priority`` not a whole number.
            NeverFitsError: When the request can never be served; carries the verdict.
            NotFreeError: When the request cannot be served now; carries the verdict.
        """
        seconds = read_seconds("time", time, positive=True)
        allocation: Allocation | None = None
        try:
            with self._lock:
                plan = self._plan(request, hosts)
                waiting = self._waiting(plan, _LAST, priority, seconds, user)
                allocation = self._try(waiting, plan, note)
                if allocation is None:
                    verdict = self._judge(plan, waiting)
        except (AnyaccelError, ValueError):
            raise
        except BaseException:
            finish_step(lambda: self._undo(allocation))
            raise
        if allocation is not None:
            return allocation  # no bytecode since the attempt lets an interrupt in
        error = NotFreeError if verdict.ever_fits else NeverFitsError
        # With the machine's leases, a device may have become free since the attempt.
        message = f"{plan.request} was not free a moment ago." if verdict.fits_now else verdict.message
        raise error(message, verdict=verdict, hint=verdict.hint)

    def submit(
        self,
        request: RequestLike,
        *,
        hosts: int = 1,
        priority: int = 0,
        note: str = "",
        time: Duration | None = None,
        user: int | None = None,
        infeasible: Literal["raise", "pend"] = "raise",
        on_placed: Callable[[Ticket], None] | None = None,
    ) -> Ticket:
        """Give devices to a request as soon as the request is next.

        Requests compete if some device could serve both; competing requests are served in order, by priority. A gang
        competes for each device that could serve a member.

        Args:
            request: The request.
            hosts: As for :meth:`allocate`, like the next.
            priority: The higher, the earlier.
            note: Owner of the allocation, for other users' messages.
            time: Time limit.
            user: Number of the user for limits and fair shares.
            infeasible: Treatment of a request that can never fit: an error, or a ticket that blocks no other request
                and counts as demand.
            on_placed: Called once, with the ticket, when it has its allocation: before this method returns, or later by
                the thread that made room. The scheduler is not locked then. An exception is logged.

        Returns:
            The ticket, with its allocation if served at once. With ``else=cpu``, a request that can never fit
            gets an allocation without devices.

        Raises:
            RequestError, UnknownNameError, UsageError: As for :meth:`allocate`.
            NeverFitsError: When the request can never be served and ``infeasible`` is ``raise``.
        """
        seconds = read_seconds("time", time, positive=True)
        ticket: Ticket | None = None
        try:
            with self._lock:
                plan = self._plan(request, hosts)
                waiting = self._waiting(plan, next(self._numbers), priority, seconds, user)
                if infeasible == "raise" and self._never_fits(plan, waiting):
                    verdict = self._judge(plan, waiting)
                    raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)  # noqa: TRY301
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
                if ticket.allocation is None:
                    if plan.ever_fits:
                        self._wait_in_line(ticket)
                    self._queue.add(ticket)
            if ticket.allocation is not None:
                notify([ticket])
        except (AnyaccelError, ValueError):
            raise
        except BaseException:
            finish_step(lambda: self._undo(ticket=ticket))
            raise
        return ticket

    async def acquire(
        self,
        request: RequestLike,
        *,
        timeout: Duration | None = None,  # noqa: ASYNC109 -- as of asyncio.wait_for; nothing is left waiting when it ends
        hosts: int = 1,
        priority: int = 0,
        note: str = "",
        time: Duration | None = None,
        user: int | None = None,
    ) -> Allocation:
        """Wait on an asyncio loop until the request is served. Any thread may make the room.

        A cancelled task leaves the queue and holds nothing.

        Args:
            request: The request.
            timeout: Time to wait at most; no wait for 0 or less; None for no limit.
            hosts: As for :meth:`allocate`, like the next.
            priority: The higher, the earlier.
            note: Owner of the allocation, for other users' messages.
            time: Time limit.
            user: Number of the user for limits and fair shares.

        Returns:
            The allocation, to be passed to :meth:`release`.

        Raises:
            RequestError, UnknownNameError, NeverFitsError: As for :meth:`submit`.
            UsageError: Likewise; and when ``timeout`` is not a duration.
            NotFreeError: When the time is over; carries the verdict.
        """
        seconds = read_seconds("timeout", timeout, least=-inf)
        ticket = self.submit(request, hosts=hosts, priority=priority, note=note, time=time, user=user)
        return await settled(ticket, self.release, seconds)

    def release(self, allocation: Allocation) -> None:
        """Release an allocation, and serve waiting requests, whose callbacks run in this thread.

        Raises:
            ValueError: When the allocation is not held: it was released before, another scheduler made it, or it is a
                member of a gang, which is released as a whole.
        """
        try:
            with self._lock:
                held = self._held.pop(allocation.id, None)
                for member in held.members if held is not None else ():
                    self._give_back(member)
                placed = self._serve() if held is not None else []
            notify(placed)
        except BaseException:
            finish_step(self._repair)
            raise
        if held is None:
            raise ValueError(
                f"allocation {allocation.id} ({allocation.request}) is not held: it was released before, or "
                f"another scheduler made it; a gang is released as a whole"
            )

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a waiting request, and serve requests behind it; return whether the ticket waited.

        See :meth:`Ticket.cancel`. Tasks that await the ticket are woken.
        """
        try:
            with self._lock:
                ticket.cancelled = ticket.cancelled or ticket in self._queue
                waited = self._queue.remove(ticket)
                placed = self._serve() if waited else []
            notify(placed)
            if waited:
                ticket.wake()
        except BaseException:
            finish_step(self._repair)
            raise
        return waited

    def why(
        self,
        request: RequestLike | Ticket,
        *,
        hosts: int = 1,
        priority: int = 0,
        time: Duration | None = None,
        user: int | None = None,
    ) -> Verdict:
        """Explain whether a request would be served now or ever, why not, and what the nearest request is.

        Args:
            request: The request, or the ticket of a waiting request.
            hosts: Number of machines; a ticket has its own number, like all that follow.
            priority: The higher, the earlier.
            time: Time limit.
            user: Number of the user for limits and fair shares.

        Raises:
            RequestError, UnknownNameError, UsageError: As for :meth:`allocate`.
        """
        seconds = read_seconds("time", time, positive=True)
        with self._lock:
            if not isinstance(request, Ticket):
                plan = self._plan(request, hosts)
                return self._judge(plan, self._waiting(plan, _LAST, priority, seconds, user))
            if request.allocation is None or request.allocation.cpu:
                plan = self._make_plan(request.request, request.plan.hosts)
                return self._judge(plan, request.waiting)
        from anyaccel.model.verdict import Verdict

        return Verdict(request=request.request, fits_now=True, ever_fits=True)

    def pending(self) -> tuple[Ticket, ...]:
        """List waiting requests in the order of service, then requests that can never be served."""
        with self._lock:
            # The queue is by kind; only the policy knows the order across kinds.
            turn = self._policy.sort_key(self._counted(), self._clock())
            tickets = sorted(
                self._queue, key=lambda each: (self._never_fits(each.plan, each.waiting), turn(each.waiting))
            )
            return tuple(tickets)

    def demand(self) -> tuple[Demand, ...]:
        """Sum the quantities of waiting requests by requested name; then those of requests that can never be served.

        Requests over a limit that lasts are left out: no other device would serve them.
        """
        from anyaccel.scheduler.demand import summarize

        with self._lock:
            layouts = [books.layout for books in self._machines]
            plans = [ticket.plan for ticket in self._queue if not self._policy.bars(ticket.waiting)]
        return summarize(self._names, layouts, plans)

    def restore(
        self, allocation: Allocation, *, note: str = "", time: Duration | None = None, user: int | None = None
    ) -> None:
        """Count an allocation of a former scheduler as held, under its identity: after a restart of the program.

        The devices must be those of the present machines: make the scheduler with the inventories from before the
        restart, restore, and then call ``update``. Restore before new requests, which may get the same identities. What
        is not free, since it was given out meanwhile, counts when it is released.

        Args:
            allocation: The allocation, for instance by :func:`anyaccel.from_json`. Pass it to :meth:`release`.
            note: Owner of the allocation, for other users' messages.
            time: What is left of the time limit; 0 or less when it is over, None for no limit.
            user: Number of the user for limits and fair shares; usage over time counts from now.

        Raises:
            KeyError: When no machine has the name of the allocation's machine, or no device of it one of the ids.
            UsageError: When ``time`` is not a duration, or the scheduler is shared: leases outlast the program.
            ValueError: When something is held under its identity already.
        """
        seconds = read_seconds("time", time, least=-inf)
        with self._lock:
            members = [] if allocation.cpu else [(self._books[each.machine], each) for each in allocation.members]
            if allocation.id in self._held or any(each.id in books.held for books, each in members):
                raise ValueError(
                    f"allocation {allocation.id} ({allocation.request}) is held already, or another of its id"
                )
            for books, each in members:  # before any is taken
                if unknown := {device.id for device in each.devices} - books.layout.positions.keys():
                    raise KeyError(min(unknown))
            now, terms = self._clock(), NO_TERMS
            if self._timed:
                terms = Holding(device=None, user=user, since=now, until=None if seconds is None else now + seconds)
            try:
                for books, each in members:
                    books.restore(each, note, terms)
                    self._former.add(each.id)
                self._held[allocation.id] = allocation
            except BaseException:
                finish_step(self._recount)
                raise

    def _occupy(self, machine: str, held: Mapping[str, Extent], holder: str, note: str) -> Allocation:
        """Count parts of a machine's devices as held by a foreign holder; see :meth:`Scheduler.occupy`.

        Raises:
            KeyError: When no machine has this name, or no device of it one of the ids.
            ValueError: When something is held under this identity already.
        """
        with self._lock:
            books = self._books[machine]
            if holder in self._held or holder in books.held:
                raise ValueError(f"holder must be an identity under which nothing is held (got {holder!r:.60})")
            try:
                allocation = books.occupy(held, holder, note)
                self._held[allocation.id] = allocation
            except BaseException:
                finish_step(self._recount)
                raise
        return allocation

    # After an interrupt

    def _undo(self, allocation: Allocation | None = None, *, ticket: Ticket | None = None) -> None:
        """Undo an interrupted call, whose allocation or ticket never reaches the caller; may be called again."""
        self._repair()
        if ticket is not None:
            self.cancel(ticket)
            allocation = ticket.allocation
        if allocation is not None:
            with contextlib.suppress(ValueError):  # released by an earlier call
                self.release(allocation)

    def _repair(self) -> None:
        """Complete what an interrupt may have left half done: books, queue and notices; may be called again."""
        with self._lock:
            self._recount()
            self._arrange()
            former, placed = self._served, self._replan()
            placed += self._serve()
        notify([*former, *placed])

    def _recount(self) -> None:
        """Make the books agree with the allocations that are held; the caller holds the lock."""
        kept = {member.id for held in self._held.values() for member in held.members}
        for machine, books in tuple(self._books.items()):
            books.keep(kept)
            self._drop(machine)

    # Machines, with the lock held

    def _add(self, machine: str, inventory: Inventory) -> None:
        """Open the books of a new machine; :meth:`_arrange` is called afterwards.

        Raises:
            ValueError: When two devices have one id.
        """
        self._books[machine] = Books(inventory, self._validate, self._names, machine=machine, lock=self._lock)

    def _adopt(self, machine: str, inventory: Inventory | None) -> None:
        """Adopt a machine as of :meth:`_update`, and notify the placed tickets. Takes the lock."""
        try:
            with self._lock:
                placed = self._update(machine, inventory)
            notify(placed)
        except ValueError:
            raise
        except BaseException:
            finish_step(self._repair)
            raise

    def _update(self, machine: str, inventory: Inventory | None) -> list[Ticket]:
        """Adopt a new, changed or removed machine, plan each waiting request again, and serve requests.

        Returns:
            The placed tickets, which the caller notifies after releasing the lock.

        Raises:
            ValueError: When two devices have one id; then nothing has changed.
        """
        if machine in self._books:
            self._books[machine].update(inventory)
            self._drop(machine)
        elif inventory is not None:
            self._add(machine, inventory)
        self._arrange()
        placed = self._replan()
        return placed + self._serve()

    def _drop(self, machine: str) -> None:
        """Remove the books of a machine if it is gone and nothing is held there; else do nothing."""
        books = self._books[machine]
        if not books.there and not books.held:
            del self._books[machine]

    def _arrange(self) -> None:
        """Number the present machines in their order, and drop all plans."""
        self._machines = [books for books in self._books.values() if books.there]
        offset = 0
        for number, books in enumerate(self._machines):
            books.number, books.offset = number, offset
            offset += len(books.layout.devices)
        # As many different requests may wait, and each release asks all.
        self._make_plan = lru_cache(maxsize=4_096)(partial(RequestPlan, self._machines))

    def _replan(self) -> list[Ticket]:
        """Plan each waiting request again.

        A request with ``else=cpu`` that can never be served any more leaves the queue. Arrivals are kept.

        Returns:
            The tickets that now run on the CPU, with their allocations.
        """
        # By arrival: within a kind the queue relies on this order.
        tickets = sorted(self._queue, key=lambda ticket: ticket.number)
        queue, placed = Queue(), []
        for ticket in tickets:
            if ticket.allocation is not None or ticket.cancelled:  # an interrupt came before it left the queue
                ticket.notified = ticket.notified or ticket.cancelled
                placed.append(ticket)
                continue
            ticket.plan = plan = self._make_plan(ticket.request, ticket.plan.hosts)
            ticket.waiting = replace(ticket.waiting, **plan.quantities)
            if plan.ever_fits or not plan.request.else_cpu:
                queue.add(ticket)
            else:
                ticket.allocation = self._hold(plan, {}, ticket.note)
                placed.append(ticket)
        self._queue = queue
        return placed

    def _give_back(self, member: Allocation) -> None:
        """Release the part of an allocation on one machine, and count the user's usage if the policy has a half-life.

        A part on the CPU needs nothing. The books of a removed machine go with their last allocation.
        """
        books = self._books.get(member.machine)
        if books is None or member.id not in books.held:  # the request runs on the CPU
            return
        terms, half_life = books.release(member.id), self._policy.half_life
        self._drop(member.machine)
        if terms.since is not None and half_life is not None:
            # The policy keeps the usage, as it does for the ledger, where the usage comes from the journal.
            now, devices = self._clock(), sum(each.units for each in member.shares) / UNITS_PER_DEVICE
            usage = self._policy.past.get(terms.user, Usage()).with_lease(devices, now - terms.since, now, half_life)
            self._policy = replace(self._policy, past={**self._policy.past, terms.user: usage})

    # Requests

    def _plan(self, request: RequestLike, hosts: int) -> RequestPlan:
        """Resolve a request against the present machines.

        Raises:
            RequestError: When the request does not follow the grammar.
            UnknownNameError: When no device has one of its names.
            UsageError: When ``hosts`` is not a positive whole number.
        """
        wanted = parse_request(request)
        if type(hosts) is not int or hosts < 1:
            raise UsageError(f"hosts must be a whole number, 1 or more (got {hosts!r:.60})")
        return self._make_plan(wanted, hosts)

    def _never_fits(self, plan: RequestPlan, waiting: Waiting) -> bool:
        """Return whether a request can never be served, on the CPU neither, or exceeds a limit that lasts."""
        return self._policy.bars(waiting) or not (plan.ever_fits or plan.request.else_cpu)

    def _waiting(self, plan: RequestPlan, number: int, priority: int, time: float | None, user: int | None) -> Waiting:
        """Return a request that arrives now as the queue policy sees it; without a policy, time limits are left out.

        A request without a time limit gets the longest that the policy allows its user.

        Raises:
            UsageError: When ``priority`` is not a whole number: in the queue, it would break the calls of others.
        """
        if not isinstance(priority, int):
            raise UsageError(f"priority must be a whole number (got {priority!r:.60})")
        if time is None:
            time = self._policy.limits_of(user).seconds
        return Waiting(
            key=number,
            number=number,
            since=self._clock(),
            priority=priority,
            user=user,
            seconds=time if self._timed else None,
            **plan.quantities,
        )

    def _try(self, waiting: Waiting, plan: RequestPlan, note: str) -> Allocation | None:
        """Serve a new request, if each request ahead may be passed.

        Return None if not, if a limit is in the way, or if the free devices do not suffice. A request with ``else=cpu``
        that can never fit gets an allocation without devices.
        """
        if not plan.ever_fits:
            return self._hold(plan, {}, note) if plan.request.else_cpu else None
        if self._policy.over_limits(waiting, sum_usage(self._counted())):
            return None
        # The common case, an empty queue, skips the policy.
        rivals = self._rivals(waiting, self._queue.firsts()) if self._queue else []
        return self._place(waiting, plan, note, rivals)

    def _place(self, waiting: Waiting, plan: RequestPlan, note: str, rivals: Sequence[Ticket]) -> Allocation | None:
        """Place a request if it may pass its rivals: the earlier tickets that block it.

        Returns:
            The allocation, which is booked; None if a rival is in the way, or the free devices do not suffice.
        """
        now = self._clock()
        if rivals:
            if waiting.seconds is None:
                return None
            from anyaccel.backfill import may_pass  # only requests with a time limit, under a policy, pass others

            if not may_pass(self._policy, waiting, [each.waiting for each in rivals], self._holdings(), now):
                return None
        found = plan.find()
        if found is None:
            return None
        terms = NO_TERMS
        if self._timed:
            until = None if waiting.seconds is None else now + waiting.seconds
            terms = Holding(device=None, user=waiting.user, since=now, until=until, passed=now if rivals else None)
        return self._hold(plan, found, note, terms)

    def _rivals(self, waiting: Waiting, among: Iterable[Ticket]) -> list[Ticket]:
        """Return earlier tickets among ``among`` that block a request, in the order of service.

        See :meth:`anyaccel.policy.Policy.keeps_waiting`. To place a request, the first ticket of each kind is enough:
        no later ticket can start before the first.
        """
        held = self._counted()
        turn, used = self._policy.sort_key(held, self._clock()), sum_usage(held)
        own = turn(waiting)
        earlier = [(at, ticket) for ticket in among if ticket.plan.ever_fits and (at := turn(ticket.waiting)) < own]
        return [
            ticket
            for _, ticket in sorted(earlier, key=lambda each: each[0])
            if self._policy.keeps_waiting(ticket.waiting, waiting, used, competes=ticket.waiting.competes(waiting))
        ]

    def _counted(self) -> list[Holding]:
        """Return the allocations that count for users, if the policy depends on them; else an empty list.

        Those of foreign holders count for no user.
        """
        return [] if self._policy.plain else [each for each in self._holdings() if each.since is not None]

    def _holdings(self) -> list[Holding]:
        """Return the active allocations as the queue policy sees them; parts on removed machines are left out."""
        return [
            replace(entry.terms, device=books.offset + spot.position, units=each.units)
            for books in self._machines
            for entry in books.held.values()
            for spot, each in zip(entry.spots, entry.allocation.shares, strict=True)
        ]

    def _hold(self, plan: RequestPlan, found: Mapping[int, Placed], note: str, terms: Holding = NO_TERMS) -> Allocation:
        """Book the placed devices, by machine number, under new identities.

        Returns:
            The allocation; a :class:`Gang` for several machines, and one without devices for a request on the CPU.
        """
        given = [
            self._machines[number].hold(self._new_id(), plan.resolved[number], placed, note, terms)
            for number, placed in found.items()
        ]
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
        """Return an identity that is unused in this scheduler, also by foreign holders."""
        held, former = self._held, self._former
        return next(key for number in _ALLOCATIONS if (key := f"a{number}") not in held and key not in former)

    # The queue

    def _wait_in_line(self, ticket: Ticket) -> None:
        """Hook for a subclass whose tickets also wait elsewhere; called with the lock held."""

    def _serve(self) -> list[Ticket]:
        """Place the tickets whose turn has come, and take them out of the queue.

        Returns:
            The tickets, which the caller notifies after releasing the lock.
        """
        served = self._served = list[Ticket]()
        while self._queue and self._serve_next(served):
            pass
        return served

    def _serve_next(self, served: list[Ticket]) -> bool:
        """Place the first ticket that can be placed, in the order of service, and move the ticket from the queue.

        Args:
            served: Where the ticket goes, with its allocation.

        Returns:
            False when no ticket can be placed.
        """
        held = self._counted()
        turn = self._policy.sort_key(held, self._clock())
        used = sum_usage(held)
        ahead: list[Ticket] = []
        blocked = 0
        for ticket in sorted(self._queue.firsts(), key=lambda each: turn(each.waiting)):
            waiting, mask = ticket.waiting, ticket.plan.mask
            limited = bool(self._policy.over_limits(waiting, used))
            # Only a time limit allows to pass.
            if not limited and (not mask & blocked or waiting.seconds is not None):
                rivals = self._rivals(waiting, ahead) if ahead else []
                ticket.allocation = self._place(waiting, ticket.plan, ticket.note, rivals)
                if ticket.allocation is not None:
                    served.append(ticket)
                    self._queue.remove(ticket)
                    return True
            ahead.append(ticket)
            blocked |= 0 if limited else mask
        return False

    def _place_in_line(self, ticket: Ticket) -> int:
        """Return 1 and the number of tickets that block a ticket; 0 if it is not in line. Takes the lock."""
        with self._lock:
            if ticket not in self._queue or self._never_fits(ticket.plan, ticket.waiting):
                return 0
            return 1 + len(self._rivals(ticket.waiting, self._queue))

    def _ahead(self, plan: RequestPlan, waiting: Waiting) -> dict[str, str]:  # noqa: ARG002 -- a subclass needs it
        """Return the earlier tickets that block a request, by id, with a description."""
        ahead = self._rivals(waiting, self._queue)
        return {ticket.id: f"{ticket.id} ({ticket.note or ticket.request})" for ticket in ahead}

    def _judge(self, plan: RequestPlan, waiting: Waiting) -> Verdict:
        """Explain whether a request would be served now or ever, and the reasons against; call with the lock held."""
        from anyaccel.model.verdict import Verdict
        from anyaccel.scheduler.explain import judge

        ahead = self._ahead(plan, waiting)
        if plan.ever_fits and not ahead and plan.find() is not None:
            verdict = Verdict(request=plan.request, fits_now=True, ever_fits=True)
        else:
            verdict = judge(plan, plan.books, ahead)
        limits = self._policy.over_limits(waiting, sum_usage(self._counted()))
        if not limits:
            return verdict
        from anyaccel.scheduler.limits import apply_limits

        user = "" if waiting.user is None else f"user {waiting.user}"
        return apply_limits(verdict, limits, user=user, machine=False)


class Scheduler(Allocator):
    """Gives the devices of one machine to requests, exactly and in order. Methods are thread-safe.

    Args:
        inventory: The machine.
        validate: The vendors' rules: called with a term and devices of one vendor, returns a refusal or None. Must be a
            pure function; called while the scheduler is locked.
        known: Names that installed plug-ins know beside those on this machine: a request for one of them never fits,
            while any other name is an error.
        policy: The queue policy, as in the machine's ledger; None for priority and arrival alone.
        clock: Returns the time in seconds for the policy.
        list_holders: Makes the clause about holders in a verdict, given the description of each by id; None for one
            with these descriptions.
    """

    def __init__(
        self,
        inventory: Inventory,
        validate: Validate | None = None,
        known: Iterable[str] = (),
        *,
        policy: Policy | None = None,
        clock: Callable[[], float] = monotonic,
        list_holders: Callable[[Mapping[str, str]], str] | None = None,
    ) -> None:
        super().__init__({"": inventory}, validate, known, policy=policy, clock=clock)
        self._own = self._books[""]
        if list_holders is not None:
            self._own.list_holders = list_holders

    @property
    def inventory(self) -> Inventory:
        """The machine, as of the last update."""
        return self._own.inventory

    def update(self, inventory: Inventory) -> None:
        """Adopt a machine with lost, added, repaired or repartitioned devices.

        Allocations stay: a held part of a lost or indivisible device counts until its release, also if the device
        returns meanwhile. Waiting requests keep their positions, and are served if they now can be. A request that can
        never fit any more blocks no other request until it can fit again; with ``else=cpu`` it gets an allocation
        without devices. Known names stay known.

        Args:
            inventory: The present machine.

        Raises:
            ValueError: When two of its devices have one id; then nothing has changed.
        """
        self._adopt("", inventory)

    def occupy(self, held: Mapping[str, Extent], *, holder: str, note: str = "") -> Allocation:
        """Count parts of devices as held by a foreign holder.

        Args:
            held: Held extents by device id, counted as far as they are free.
            holder: Identity of the allocation, as known elsewhere.
            note: Description of the holder.

        Returns:
            An allocation, to be passed to :meth:`release`.

        Raises:
            KeyError: When no device has one of the ids.
            ValueError: When something is held under this identity already.

        Examples:
            >>> from anyaccel.model import Extent
            >>> scheduler = anyaccel.open_scheduler(anyaccel.detect("sim:H100:2"))
            >>> one, other = scheduler.inventory.devices
            >>> container = scheduler.occupy({one.id: Extent(), other.id: Extent(units=5_000)}, holder="container")
            >>> scheduler.free(other.id)
            5000
        """
        return self._occupy("", held, holder, note)

    def free(self, device_id: str) -> int:
        """Return the free units of a device in 1/10000; 0 for a hidden or unhealthy device.

        Raises:
            KeyError: When no device has this id.
        """
        return self._own.free(device_id)

    def holders(self, device_id: str) -> tuple[Allocation, ...]:
        """Return the allocations of a device, in order of arrival.

        Raises:
            KeyError: When no device has this id.
        """
        return self._own.holders(device_id)


class Fleet(Allocator):
    """Gives the devices of several machines to requests, exactly and in order. Methods are thread-safe.

    A request is served by the first machine, in their order, that can serve it now; so machines fill up one after the
    other. A gang, for which ``hosts`` is more than 1, is served by the first machines that can, by each at once.

    Args:
        machines: The machines by name.
        validate: The vendors' rules, as for :class:`Scheduler`, like the next.
        known: Names that are known beside those on the machines.
        policy: The queue policy; None for priority and arrival alone.
        clock: Returns the time in seconds for the policy.

    Examples:
        >>> nodes = {"node-a": anyaccel.detect("sim:H100:2"), "node-b": anyaccel.detect("sim:H100:2")}
        >>> fleet = anyaccel.open_scheduler(nodes)
        >>> fleet.allocate("GPU:1").machine, fleet.allocate("GPU:2").machine
        ('node-a', 'node-b')
    """

    @property
    def machines(self) -> Mapping[str, Inventory]:
        """The machines by name, as of the last updates."""
        return {books.machine: books.inventory for books in self._machines}

    def update(self, machine: str, inventory: Inventory | None) -> None:
        """Adopt a new, changed or removed machine.

        Allocations stay until their release, also on a removed machine. Waiting requests keep their positions; see
        :meth:`Scheduler.update`.

        Args:
            machine: Name of the machine.
            inventory: The present devices; None for a removed machine.

        Raises:
            ValueError: When two of its devices have one id; then nothing has changed.
        """
        self._adopt(machine, inventory)

    def occupy(self, machine: str, held: Mapping[str, Extent], *, holder: str, note: str = "") -> Allocation:
        """Count parts of a machine's devices as held by a foreign holder; see :meth:`Scheduler.occupy`.

        Raises:
            KeyError: When no machine has this name, or no device of it one of the ids.
            ValueError: When something is held under this identity already.
        """
        return self._occupy(machine, held, holder, note)

    def on(self, machine: str) -> Books:
        """Return the books of a machine, for reading: ``inventory``, ``free`` units and ``holders`` of a device.

        The books of a removed machine stay as long as something is held there.

        Raises:
            KeyError: When no machine has this name.
        """
        return self._books[machine]
