"""Waiting requests of a scheduler, and their queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from itertools import chain

from anyaccel.errors import NotFreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    import logging

    from anyaccel.model import Allocation, Request, Verdict
    from anyaccel.policy import Waiting
    from anyaccel.scheduler.books import RequestPlan


class Ticket:
    """A request's position in the queue, until it is placed or cancelled.

    On an asyncio loop, ``await ticket`` waits for the allocation, any number of times; a cancelled ticket raises
    :class:`asyncio.CancelledError` there, as a task does. Ending such a wait does not cancel the ticket.

    Attributes:
        plan: The request, resolved against the machines.
        waiting: The request as the queue policy sees it.
        number: Position in the order of arrival.
        priority: The higher, the earlier.
        note: Owner, in words.
        on_placed: Called once when there is an allocation, or None.
        allocation: The allocation, or None while the request waits.
        cancelled: Whether the ticket was cancelled.
        error: The error that ended the wait, which ``await`` raises; else None.
        notified: Whether ``on_placed`` was called, or will be by the thread that made room.
    """

    def __init__(
        self,
        plan: RequestPlan,
        *,
        waiting: Waiting,
        cancel: Callable[[Ticket], bool],
        why: Callable[[Ticket], Verdict],
        place: Callable[[Ticket], int],
        note: str,
        on_placed: Callable[[Ticket], None] | None,
    ) -> None:
        self._awaiting: dict[asyncio.Future[None], Callable[[Allocation], None] | None] = {}
        self._cancel = cancel
        self._why = why
        self._place = place
        self.plan = plan
        self.waiting = waiting
        self.number = waiting.number
        self.on_placed = on_placed
        self.priority = waiting.priority
        self.note = note
        self.allocation: Allocation | None = None
        self.cancelled = False
        self.error: Exception | None = None
        self.notified = False

    @property
    def id(self) -> str:
        """Identity, unique within the scheduler."""
        return f"t{self.number}"

    @property
    def request(self) -> Request:
        """The request."""
        return self.plan.request

    def cancel(self) -> bool:
        """Stop waiting; requests behind the ticket are served, and tasks that await the ticket are woken.

        Returns:
            True if the ticket waited; False if it has its allocation, which then is to be released, or was cancelled
            before.
        """
        return self._cancel(self)

    def __await__(self) -> Generator[object, None, Allocation]:
        return self._wait(None).__await__()

    async def _wait(self, release: Callable[[Allocation], None] | None) -> Allocation:
        """Wait for the allocation, as ``await`` does.

        Args:
            release: Called with an allocation that comes when the loop of this wait is closed, so that the waiting task
                will never receive it; None if the allocation belongs to another caller.

        Raises:
            asyncio.CancelledError: When the ticket was cancelled. Instead, :attr:`error` is raised if there is one.
        """
        import asyncio

        while not self._settled():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._awaiting[future] = release
            try:
                if not self._settled():  # after registration, so that no wake-up is lost
                    await future
            finally:
                del self._awaiting[future]
        if self.error is not None:
            raise self.error
        if self.allocation is None:
            raise asyncio.CancelledError(f"ticket {self.id} ({self.request}) was cancelled")
        return self.allocation

    def _settled(self) -> bool:
        """Return whether the wait is over: placed, cancelled or failed."""
        return self.allocation is not None or self.cancelled or self.error is not None

    def wake(self) -> None:
        """Wake tasks that await the ticket, and release the allocation for a wait whose loop is closed. Thread-safe."""
        for future in tuple(self._awaiting):
            try:
                future.get_loop().call_soon_threadsafe(_finish, future)
            except RuntimeError:  # the loop is closed: the waiting task can never receive the allocation
                release = self._awaiting.get(future)
                if self.allocation is not None and release is not None:
                    release(self.allocation)

    @property
    def place(self) -> int:
        """Queue position: 1, and 1 more for each earlier request that blocks this one; 0 if not waiting."""
        return self._place(self)

    def why(self) -> Verdict:
        """Explain the reasons for the wait; a placed ticket gets a verdict that the request fits now."""
        return self._why(self)

    def __repr__(self) -> str:
        ended = "cancelled" if self.cancelled else "failed" if self.error else ""
        state = ended or (self.allocation.id if self.allocation else "waiting")
        return f"<Ticket {self.id} {self.request}: {state}>"


class Queue:
    """Waiting tickets by kind, each kind in order of arrival: a decision inspects only the first of each kind.

    Tickets of one kind have the same request, user, priority and time limit. So every policy serves them in order of
    arrival, and if the first cannot be placed, no later ticket can. Requests that can never be served wait here, too,
    until they can.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, OrderedDict[int, Ticket]] = {}

    def add(self, ticket: Ticket) -> None:
        """Add a ticket, the latest of its kind."""
        self._kinds.setdefault(_kind(ticket), OrderedDict())[ticket.number] = ticket

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket; return False if the queue does not have the ticket."""
        tickets = self._kinds.get(kind := _kind(ticket), OrderedDict())
        found = tickets.pop(ticket.number, None) is not None
        if found and not tickets:
            del self._kinds[kind]
        return found

    def firsts(self) -> Iterator[Ticket]:
        """Yield the first ticket of each kind that can ever be served."""
        firsts = (next(iter(tickets.values())) for tickets in self._kinds.values())
        return (ticket for ticket in firsts if ticket.plan.ever_fits)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket.number in self._kinds.get(_kind(ticket), ())

    def __iter__(self) -> Iterator[Ticket]:
        return chain.from_iterable(tickets.values() for tickets in self._kinds.values())

    def __bool__(self) -> bool:
        return bool(self._kinds)


def _kind(ticket: Ticket) -> Hashable:
    """Return the kind of a ticket: plan, user, priority and time limit."""
    waiting = ticket.waiting
    return ticket.plan, waiting.user, waiting.priority, waiting.seconds


def notify(tickets: Iterable[Ticket]) -> None:
    """Wake the tasks that await settled tickets, and call ``on_placed`` of placed ones, once; call without a lock.

    An exception of a callback is logged. For a failed ticket with a callback, the error is logged instead.
    """
    for ticket in tickets:
        ticket.wake()
        on_placed = ticket.on_placed
        if on_placed is None or ticket.notified:
            continue
        ticket.notified = True
        if ticket.error is not None:
            _log().error("%r waits no more: %s", ticket, ticket.error)
            continue
        try:
            on_placed(ticket)
        except Exception:  # noqa: BLE001 -- the thread that made room is not to blame, and other callbacks must run
            _log().exception("on_placed of %r failed", ticket)


async def settled(ticket: Ticket, release: Callable[[Allocation], None], seconds: float | None) -> Allocation:
    """Wait on an asyncio loop for a ticket, which is cancelled with the task, or at the time limit.

    Any other exception cancels the ticket, too, and releases an allocation that came meanwhile; only a closed loop does
    neither.

    Args:
        ticket: The ticket.
        release: Called with an allocation that the task can no longer receive.
        seconds: Time limit; None for no limit.

    Returns:
        The allocation, also if it comes at the last moment.

    Raises:
        NotFreeError: When the time is over; carries the verdict.
        asyncio.CancelledError: When the ticket was cancelled.
    """
    import asyncio

    try:
        try:
            async with asyncio.timeout(seconds):
                return await ticket._wait(release)  # noqa: SLF001 -- the only wait for this ticket, so it may release
        except TimeoutError:
            verdict = ticket.why()
            if not ticket.cancel() and ticket.allocation is not None:  # placed at the last moment
                return ticket.allocation
            raise NotFreeError(
                f"not free within {max(0, seconds or 0):g} s: {verdict.message}", verdict=verdict, hint=verdict.hint
            ) from None
    except GeneratorExit:  # the loop is closed; garbage collection may run with the lock held, so do nothing
        raise
    except BaseException:
        # The allocation may have come while the cancellation was on its way: the caller will never see it.
        if not ticket.cancel() and ticket.allocation is not None:
            release(ticket.allocation)
        raise


def _finish(future: asyncio.Future[None]) -> None:
    """Wake the wait for a future, unless the future is done."""
    if not future.done():
        future.set_result(None)


def _log() -> logging.Logger:
    import logging

    return logging.getLogger("anyaccel")
