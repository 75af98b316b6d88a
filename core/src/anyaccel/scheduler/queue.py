"""Waiting tickets, grouped so that a decision inspects only the first of each kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import chain

from anyaccel.scheduler.ticket import Ticket


class Queue:
    """Tickets by kind, each kind in order of arrival.

    Tickets of one kind have the same request, user, priority and time limit. So every policy serves them in order of
    arrival, and if the first cannot be placed, no later ticket can.
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
        """Yield the first ticket of each kind."""
        return (next(iter(tickets.values())) for tickets in self._kinds.values())

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
