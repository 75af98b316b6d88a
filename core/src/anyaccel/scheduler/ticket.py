"""A request's place in the queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from anyaccel.model import Allocation, Request, Value
from anyaccel.scheduler.placement import Wanted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.scheduler.reasons import Verdict
    from anyaccel.scheduler.scheduler import Scheduler


class Plan(Value):
    """A request in the terms of one machine.

    Attributes:
        request: The request.
        wanted: Its terms.
        mask: All devices that could serve it, and their parts, as a bit mask: requests whose masks overlap are rivals.
        ever_fits: Whether it would be served if nothing were held.
    """

    request: Request
    wanted: tuple[Wanted, ...]
    mask: int
    ever_fits: bool


class Ticket:
    """A request's place in the queue, until it is placed or cancelled.

    Attributes:
        plan: The request in the terms of the machine.
        number: Position in the order of arrival.
        priority: The higher, the earlier.
        note: Whose it is, in words.
        on_placed: Called once when there is an allocation, or None.
        allocation: What the request got, or None as long as it waits.
        cancelled: Whether it was withdrawn.
    """

    __slots__ = ("_scheduler", "allocation", "cancelled", "note", "number", "on_placed", "plan", "priority")

    def __init__(
        self,
        scheduler: Scheduler,
        plan: Plan,
        *,
        number: int,
        priority: int,
        note: str,
        on_placed: Callable[[Ticket], None] | None,
    ) -> None:
        self._scheduler = scheduler
        self.plan = plan
        self.number = number
        self.on_placed = on_placed
        self.priority = priority
        self.note = note
        self.allocation: Allocation | None = None
        self.cancelled = False

    @property
    def id(self) -> str:
        """Identity, unique within the scheduler."""
        return f"t{self.number}"

    @property
    def request(self) -> Request:
        """The request."""
        return self.plan.request

    def cancel(self) -> bool:
        """Stop waiting.

        Returns:
            True when the ticket waited; False when it has its allocation, which then is to be released, or when it
            was cancelled before.
        """
        return self._scheduler.cancel(self)

    def why(self) -> Verdict:
        """Say what the ticket waits for."""
        return self._scheduler.why(self)

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else self.allocation.id if self.allocation else "waiting"
        return f"<Ticket {self.id} {self.request}: {state}>"


def notify(tickets: Iterable[Ticket]) -> None:
    """Tell those who were placed. Call it without a lock: what they do is up to them."""
    for ticket in tickets:
        on_placed = ticket.on_placed
        if on_placed is None:
            continue
        try:
            on_placed(ticket)
        except Exception:  # the thread that made room is not to blame, and the others are to be told
            import logging

            logging.getLogger("anyaccel").exception("on_placed of %r failed", ticket)
