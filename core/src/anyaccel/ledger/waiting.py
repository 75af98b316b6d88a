"""Our place in line while we wait, and what wakes us.

Whoever is next watches the state directory for leases that end; everybody else watches the ticket of the one ahead. So
a device that becomes free wakes one, and one who leaves the line wakes one. Threads of one process need no watch for
that: whoever leaves the line tells the one behind. All look again now and then in any case: a
user has few watches, and whoever is ahead may be stopped.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from functools import cached_property

from anyaccel.ledger import tickets
from anyaccel.ledger.directory import StateDirectory
from anyaccel.ledger.lease import Place
from anyaccel.ledger.listing import Listing
from anyaccel.ledger.lockfile import Life, look
from anyaccel.ledger.names import parse_lease
from anyaccel.ledger.tickets import Standing, Ticket
from anyaccel.ledger.turns import Turns
from anyaccel.linux.fork import tidy_in_child
from anyaccel.linux.inotify import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

IMPATIENT_SECONDS = 0.010
"""Who waits for less than that has no place in line: making one costs more than what it is good for."""

_REAL_LOOKS_EVERY = 1.0
_FOLLOWER_LOOKS_EVERY = 10.0
_FOLLOWER_INTERVALS = 4  # between two real looks of one who follows a thread of this process
_WITHOUT_WATCH = 0.02
_WITHOUT_WATCH_PER_PLACE = 0.004
_WATCHING = 64  # of those who want the same devices; a user has 128 watches in all by default
_SECOND_LOOK = 0.001

_behind: dict[str, set[int]] = {}
"""Tickets of this process, and the event descriptors of those of its threads that wait for one of them to go. A name is
here until all of them were told, so that a descriptor is closed only when nobody writes to it any more. There is no
lock, which an interrupt could leave locked: each step is one that the interpreter does as a whole."""
_idle: list[int] = []
"""Event descriptors that may still be written to; given to the next, or closed when no ticket is left."""


@tidy_in_child
def _forget_in_child() -> None:
    """Leave the line to the parent: a child has no part in it."""
    _behind.clear()
    while _idle:
        os.close(_idle.pop())


class Waiter:
    """One who waits, or will if the devices are not free.

    Args:
        state: The state directory.
        turns: What the rules say about the request.
        note: What it is for.
        deadline: Until when to wait, by the monotonic clock; None for as long as it takes.
        kept: The place that the request had before, or None.

    Attributes:
        ticket: Our place in line; None when there is none.
        place: How many are ahead, as far as is known.
        refused: Whether the ledger was locked by somebody else for too long.
    """

    def __init__(
        self,
        state: StateDirectory,
        turns: Turns,
        *,
        note: str,
        deadline: float | None,
        kept: Place | None = None,
    ) -> None:
        self.place = 0
        self.refused = False
        self._state = state
        self._note = note
        self._deadline = deadline
        self._began = self._looked = time.monotonic()
        self._before: str | None = None
        self._turns = turns
        self._kept = kept
        self._news = False
        self.ticket: Ticket | None = None
        self._watch: Watch | None = None
        self._event = -1
        self._followed: list[str] = []
        self._leaving: list[int] = []
        self._again = False

    @cached_property
    def _line(self) -> tickets.Line:
        return tickets.Line(self._turns)

    @property
    def _follows(self) -> bool:
        """Whether a thread of this process is ahead of us, which wakes us when it leaves the line."""
        return self._before in self._followed and self._before in _behind

    def follows(self) -> bool:
        """Whether a thread of this process is still ahead of us: then the directory need not even be opened."""
        if self.ticket is None or self._news or not self._follows:
            return False
        if time.monotonic() - self._looked > max(_FOLLOWER_LOOKS_EVERY, _FOLLOWER_INTERVALS * self._interval):
            return False
        self.ticket.stamp()
        return True

    def still_behind(self, directory: int) -> bool:
        """Whether the one ahead of us is still there: a cheap look, in place of most of the real ones."""
        if self.ticket is None or self._before is None:
            return False
        if self._news:
            self._news = False
            return False
        if time.monotonic() - self._looked > max(_REAL_LOOKS_EVERY, self._interval):
            return False
        if look(directory, self._before)[0] is Life.OVER:
            return False
        self.ticket.stamp()
        if self._before in self._followed or (self._watch is not None and self._before not in _behind):
            return True
        own = self.ticket.name
        self.place = min(self.place, sum("t1." <= name < own for name in os.listdir(directory)))
        return not self._aim(directory)

    def stand(self, directory: int, listing: Listing) -> Standing:
        """Find out where we stand, and show that we look."""
        if self.ticket and self.ticket.name not in listing.tickets:  # somebody emptied the directory
            self._leave(self.ticket)
        self._looked = time.monotonic()
        standing = self._line.stand(directory, listing, self._own) if listing.tickets else tickets.FIRST
        self.place, self._before = standing.place, standing.before
        if self.ticket:
            self.ticket.stamp()
        return standing

    def in_front(self, directory: int, listing: Listing, standing: Standing) -> bool:
        """Whether nobody came in front of us since we found where we stand."""
        return not listing.tickets or self._line.in_front(directory, listing, self._own, standing)

    def enter(self, directory: int, lock: Callable[[int], bool], *, at_once: bool) -> bool:
        """Get a place in line and watch what we wait for, once the wait is worth it.

        Args:
            directory: Descriptor of the state directory.
            lock: Locks it, or says that it cannot.
            at_once: Whether it is worth it whatever the wait has been so far.

        Returns:
            Whether to look again at once, since we did not watch before.
        """
        if self.ticket is None:
            if not at_once and self._kept is None and time.monotonic() - self._began < IMPATIENT_SECONDS:
                return False
            self._make_ticket(directory, lock)
        return self.ticket is not None and self._aim(directory)

    def _make_ticket(self, directory: int, lock: Callable[[int], bool]) -> None:
        if not lock(directory):
            return
        ticket = self.ticket = Ticket(self._state)
        try:
            if not self._state.replaced(directory):
                number = None if self._kept is None else self._kept.number
                number = ticket.publish(directory, self._turns, self._note, number)
                if self._kept is not None:
                    self._kept.number, self._kept.since = number, self._turns.since
        except FileNotFoundError:  # somebody who cannot see this process took it for debris
            self._again = True
        finally:
            self._state.unlock(directory)
            if ticket.name:
                _behind[ticket.name] = set()
            else:
                self._leave(ticket)

    def _aim(self, directory: int) -> bool:
        """Watch whoever is ahead, or the directory; whether something may have happened before we did."""
        before = None if self._turns.watches_all else self._before
        if before and self._follow(before):
            self._stop_watching()
            return look(directory, before)[0] is Life.OVER
        if self.place >= _WATCHING:
            return False
        path = f"{self._state.path}/{before}" if before else self._state.path
        try:
            self._watch = self._watch or Watch()
            if self._watch.path == path:
                return False
            self._watch.follow(path)
        except FileNotFoundError:  # it has just gone away
            return True
        except (OSError, ImportError):  # there is no watch to be had: then we poll
            return False
        return before is None or look(directory, before)[0] is Life.OVER

    def _follow(self, ticket: str) -> bool:
        """Have the thread that has a ticket wake us when it leaves the line; False when that is none of ours."""
        followers = _behind.get(ticket)
        if followers is None:
            return False
        if ticket not in self._followed:
            try:
                if self._event < 0:
                    self._event = _idle.pop() if _idle else os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            except (OSError, IndexError):  # there is none to be had: then we watch, or poll
                return False
            self._followed = [*filter(_behind.__contains__, self._followed), ticket]
            followers.add(self._event)
        return True

    def follow(self, pid: int) -> None:
        """Be woken when a process that has ended leaves the kernel, too."""
        try:
            self._leaving.append(os.pidfd_open(pid))
        except OSError:
            self._again = True

    def look_soon(self) -> None:
        """Have the next look soon."""
        self._again = True

    def forget(self) -> None:
        """Be no longer woken by processes."""
        while self._leaving:
            with contextlib.suppress(OSError):
                os.close(self._leaving.pop())

    def descriptors(self) -> list[int]:
        """What becomes readable when something happens; then ask :meth:`noted`."""
        own = [self._event] if self._event >= 0 else []
        return [*self._leaving, *own, *([self._watch.fileno()] if self._watch else [])]

    def noted(self, ready: int) -> bool:
        """Whether what happened is worth another look.

        Args:
            ready: The descriptor that is readable.
        """
        if ready == self._event:
            self._news = True
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(ready)
        if self._watch is None or ready != self._watch.fileno():
            return True
        worth = False
        for name, removed in self._watch.events():
            if name and name.startswith("t1.") and removed and self._turns.watches_all:
                worth = self._news = True
                continue
            lease = parse_lease(name) if name else None
            if name and (lease is None or lease.device not in self._turns.want.candidates):
                continue
            worth = True
            self._news = self._turns.watches_all
            if not removed:
                self._again = True
        return worth

    def pause(self) -> float:
        """Seconds after which to look again whatever happens."""
        if self.ticket is None:  # nothing wakes us: at random, so that rivals do not march in step
            import random

            pause = random.uniform(0.0002, 0.001) if self._before is None else IMPATIENT_SECONDS  # noqa: S311
        elif self.refused or self._again:
            pause, self._again = _SECOND_LOOK, False
        elif self._before not in self._followed and (self._watch is None or not self._watch.path):
            pause = max(_WITHOUT_WATCH, _WITHOUT_WATCH_PER_PLACE * self.place)
        else:
            pause = self._interval
        return pause if self._deadline is None else max(0.0, min(pause, self._deadline - time.monotonic()))

    def sleep(self, cancel: Any) -> bool:
        """Wait until it may be worth another look; False when somebody cancelled the wait.

        Args:
            cancel: What becomes readable then; None for nothing.
        """
        poll = select.poll()
        for descriptor in self.descriptors():
            poll.register(descriptor, select.POLLIN)
        cancelled = -1
        if cancel is not None:
            poll.register(cancel, select.POLLIN)
            cancelled = cancel if isinstance(cancel, int) else cancel.fileno()
        now = time.monotonic()
        end = now + self.pause()
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, end - now) * 1000)]
            if cancelled in ready:
                return False
            if not ready or any(self.noted(descriptor) for descriptor in ready):
                return True
            now = time.monotonic()

    def close(self) -> None:
        """Leave the line."""
        if self.ticket:
            self._leave(self.ticket)
        if self._event >= 0:
            event, self._event = self._event, -1
            if any(event in events for events in tuple(_behind.values())):  # also of one who had it before us
                _idle.append(event)
            else:
                os.close(event)
        self.forget()
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._watch:
            self._watch.close()
            self._watch = None

    def _leave(self, ticket: Ticket) -> None:
        """Give our place in line up."""
        ticket.drop()
        self.ticket = None
        for event in tuple(_behind.get(ticket.name, ())):
            os.eventfd_write(event, 1)
        _behind.pop(ticket.name, None)
        with contextlib.suppress(IndexError):
            while not _behind:
                os.close(_idle.pop())

    @property
    def _interval(self) -> float:
        """Seconds until we look again though nothing happened: more where a thread of ours wakes us."""
        seconds = tickets.interval(self.place)
        # Whoever cancels a ticket waits 30 seconds for us to notice.
        return max(seconds, min(2 * seconds, _FOLLOWER_LOOKS_EVERY)) if self._follows else seconds

    @property
    def _own(self) -> str | None:
        return self.ticket.name if self.ticket else None
