"""The reactor: a thread for the channels of workers and for timers.

Python runs signal handlers in the main thread alone. So Ctrl-C never interrupts a handler of the reactor, and all state
that several calls share is changed here.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from anyaccel.linux import hold_while_forking, renew_in_child, tidy_in_child

Handler = Callable[[], object]

LONGEST_SECONDS = 86_400.0
"""Longest wait: epoll takes its timeout as a 32-bit number of milliseconds."""
_CROWD = 1024
"""Number of timers from which on cancelled ones are removed: most calls end long before their time limit."""


class Timer:
    """A handler to call at a time, unless cancelled."""

    def __init__(self, call: Handler | None) -> None:
        self.call = call

    def cancel(self) -> None:
        """Drop the handler, which is not called then; no effect after the call."""
        self.call = None


NO_TIMER = Timer(None)
"""Stands for a timer that was not set."""


class Reactor:
    """Calls handlers when descriptors become readable and when timers expire, in a thread of its own.

    Any thread may call :meth:`call_soon` and :meth:`call_later`; the other methods are for handlers.
    The exception of a handler is logged, and the other handlers go on.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN | select.EPOLLET)  # edge-triggered: it need not be read
        self._handlers: dict[int, Handler] = {}
        self._soon: deque[Handler] = deque()
        self._sleeps = False
        self._timers: list[tuple[float, int, Timer]] = []
        self._crowd = _CROWD
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name="anyaccel workers", daemon=True)
        self._thread.start()

    @property
    def inside(self) -> bool:
        """Whether the calling thread is the reactor's."""
        return threading.get_ident() == self._thread.ident

    def watch(self, descriptor: int, handler: Handler) -> None:
        """Call a handler again and again while a descriptor, not watched yet, is readable or at its end.

        Raises:
            OSError: When the kernel cannot watch the descriptor, such as a regular file, or already watches it, which
                goes on with the earlier handler.
        """
        self._poll.register(descriptor, select.EPOLLIN)
        self._handlers[descriptor] = handler

    def unwatch(self, descriptor: int) -> None:
        """Stop watching a descriptor; no effect if it was not watched."""
        if self._handlers.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(descriptor)

    def call_soon(self, call: Handler) -> None:
        """Have the reactor call a handler in its thread, behind the handlers of earlier calls; return at once.

        Takes no lock, so a finalizer may use it, also in a forked child. No effect in an abandoned reactor.
        """
        if self._wake >= 0:
            self._soon.append(call)
            if self._sleeps:  # set before the reactor checks _soon for the last time, so no note is missed
                os.eventfd_write(self._wake, 1)

    def call_later(self, seconds: float, call: Handler) -> Timer:
        """Call a handler in the reactor's thread after so many seconds; return its timer."""
        timer = Timer(call)
        self.call_soon(partial(self._set, time.monotonic() + seconds, timer))
        return timer

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which has no thread for them."""
        self._poll.close()
        os.close(self._wake)
        self._wake = -1  # a finalizer may still call call_soon(), and the number may soon be that of another file

    def _set(self, when: float, timer: Timer) -> None:
        """Add a timer for a time of the monotonic clock; remove the cancelled timers first if there are many.

        Many are more than 1024, and more than twice the timers that the last removal has left.
        """
        if len(self._timers) > self._crowd:
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._crowd = max(_CROWD, 2 * len(self._timers))
        heapq.heappush(self._timers, (when, next(self._numbers), timer))

    def _run(self) -> None:
        """Call the handlers of readable descriptors, of :meth:`call_soon` and of expired timers, for ever."""
        while True:
            timeout = self._get_timeout()
            self._sleeps = True
            events = self._poll.poll(0 if self._soon else timeout)
            self._sleeps = False
            with _handling:
                for descriptor, _ in events:
                    if handler := self._handlers.get(descriptor):
                        run_guarded(handler)
                for _ in range(len(self._soon)):
                    run_guarded(self._soon.popleft())
                if self._timers:
                    self._run_timers()

    def _get_timeout(self) -> float | None:
        """Drop cancelled timers at the front, and return the seconds until the first timer.

        Returns:
            At most :data:`LONGEST_SECONDS`; 0 if the timer has expired; None without timers.
        """
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_SECONDS)

    def _run_timers(self) -> None:
        """Call the handlers of all expired timers, without the cancelled ones."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                run_guarded(timer.call)


def run_guarded(call: Handler) -> None:
    """Call a handler; log any exception, also SystemExit, and drop the exception."""
    try:
        call()
    except BaseException:  # also SystemExit of a user's callback: the other handlers must run
        logging.getLogger("anyaccel").exception("a handler of the reactor failed")


_handling = hold_while_forking(threading.RLock())
"""Held by the reactor while handlers run, and by a thread that forks.

So a forked child, which has no reactor thread, finds no lock that is held, no structure that is half changed and no
module that is half imported, which it could never import.
"""


@contextlib.contextmanager
def allow_forks() -> Iterator[None]:
    """Let other threads fork while the reactor runs a callback of the user, which may wait for the fork.

    A context; no effect in a thread that does not keep others from forking.
    """
    held = _handling._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition does
    if held:
        _handling.release()
    try:
        yield
    finally:
        if held:
            _handling.acquire()


_current: list[Reactor] = []
_starting = renew_in_child(threading.RLock())


def find_reactor() -> Reactor:
    """Return the reactor of this process; start it on the first call."""
    if not _current:
        with _starting:
            if not _current:
                # Second, and never used, if the handler of a signal that interrupts this has started one.
                _current.append(Reactor())
    return _current[0]


@tidy_in_child
def _abandon_reactor() -> None:
    """Drop the parent's reactor in a forked child, and close its descriptors."""
    while _current:
        _current.pop().abandon()
