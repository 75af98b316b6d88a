"""The thread of the dispatcher: it waits for everything at once, channels of workers and points in time.

Python runs handlers of signals in the main thread alone. So nothing that is done here is cut short by one, such as
Ctrl-C, and whatever several calls share is changed here.
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

from anyaccel.linux.fork import hold_while_forking, renew_in_child, tidy_in_child

Handler = Callable[[], object]

LONGEST_SECONDS = 86_400.0
"""Of one wait: the kernel takes no more than some weeks."""
_CROWD = 1024
"""Timers from which those that were cancelled are thrown out."""


class Timer:
    """Something to be done at a time, unless it is cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Handler) -> None:
        self.call: Handler | None = call

    def cancel(self) -> None:
        """Do not do it."""
        self.call = None


class Reactor:
    """Calls handlers when descriptors can be read and when times come, in a thread of its own.

    :meth:`call_soon`, :meth:`call_at` and :meth:`call_later` may be called by any thread, the rest by its own. A
    handler that raises is logged and costs nobody else.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN | select.EPOLLET)  # each write wakes, and none is read
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
        """Whether the calling thread is that of the reactor."""
        return threading.get_ident() == self._thread.ident

    def watch(self, descriptor: int, handler: Handler) -> None:
        """Call a handler whenever a descriptor can be read."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.EPOLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Stop that; nothing happens when it was not watched."""
        if self._handlers.pop(descriptor, None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(descriptor)

    def call_soon(self, call: Handler) -> None:
        """Do something in the thread of the reactor. Takes no lock, so a finalizer may use it, also in a fork."""
        if self._wake >= 0:
            self._soon.append(call)
            if self._sleeps:  # it says so before it looks for the last time
                os.eventfd_write(self._wake, 1)

    def call_at(self, when: float, call: Handler) -> Timer:
        """Do something in the thread of the reactor at a time of ``time.monotonic()``."""
        timer = Timer(call)
        if self.inside:
            self._set(when, timer)
        else:
            self.call_soon(partial(self._set, when, timer))
        return timer

    def call_later(self, seconds: float, call: Handler) -> Timer:
        """Do something in the thread of the reactor after some seconds."""
        return self.call_at(time.monotonic() + seconds, call)

    def abandon(self) -> None:
        """Forget everything: we are a fork, and the thread is the parent's."""
        self._poll.close()
        os.close(self._wake)
        self._wake = -1  # a finalizer may know us still, and the number may soon be that of another file

    def _set(self, when: float, timer: Timer) -> None:
        if len(self._timers) > self._crowd:  # most calls end long before their time is up
            self._timers = [entry for entry in self._timers if entry[2].call is not None]
            heapq.heapify(self._timers)
            self._crowd = max(_CROWD, 2 * len(self._timers))
        heapq.heappush(self._timers, (when, next(self._numbers), timer))

    def _run(self) -> None:
        while True:
            patience = self._patience()
            self._sleeps = True
            events = self._poll.poll(0 if self._soon else patience)
            self._sleeps = False
            with _handling:
                for descriptor, _ in events:
                    if handler := self._handlers.get(descriptor):
                        _guarded(handler)
                for _ in range(len(self._soon)):
                    _guarded(self._soon.popleft())
                if self._timers:
                    self._ring()

    def _patience(self) -> float | None:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_SECONDS)

    def _ring(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                _guarded(timer.call)


def _guarded(call: Handler) -> None:
    try:
        call()
    except BaseException:  # the others are to be served, whatever a callback raised
        logging.getLogger("anyaccel").exception("a handler of the reactor failed")


_handling = hold_while_forking(threading.RLock())
"""Held by the reactor while handlers run, and by a thread that forks.

So a child finds nothing that only a thread of its parent could go on with: no lock that is held, no structure that is
half changed and, above all, no module that is half imported, which the child could never import.
"""


@contextlib.contextmanager
def allow_forks() -> Iterator[None]:
    """Let other threads fork while the reactor runs callbacks of the user, which may take long or wait for them."""
    held = _handling._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition does
    if held:
        _handling.release()
    try:
        yield
    finally:
        if held:
            _handling.acquire()


_current: list[Reactor] = []
_starting = renew_in_child(threading.Lock())


def reactor() -> Reactor:
    """The reactor of this process."""
    if not _current:
        with _starting:
            if not _current:
                _current.append(Reactor())
    return _current[0]


@tidy_in_child
def _forget() -> None:
    while _current:
        _current.pop().abandon()
