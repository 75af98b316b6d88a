"""One thread that waits for everything at once: channels of workers, and points in time."""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count

from anyaccel.linux.fork import renew_in_child, tidy_in_child
from anyaccel.pool.channel import LONGEST_SECONDS

Handler = Callable[[], None]

_CROWD = 1024
"""Timers from which those that were cancelled are thrown out."""

_LOAN = 0.001
"""Seconds for which a descriptor that was given back stays with those who borrow it in turns."""


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

    Every method may be called by any thread. A handler that raises is logged and costs nobody else.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._handlers: dict[int, Handler] = {}
        self._lending = threading.Lock()
        self._returned: dict[int, float] = {}
        self._collecting = False
        self._soon: deque[Handler] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._crowd = _CROWD
        self._lock = threading.Lock()
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name="anyaccel workers", daemon=True)
        self._thread.start()

    @property
    def inside(self) -> bool:
        """Whether the calling thread is that of the reactor."""
        return threading.current_thread() is self._thread

    def watch(self, descriptor: int, handler: Handler) -> None:
        """Call a handler whenever a descriptor can be read."""
        self._handlers[descriptor] = handler
        self._poll.register(descriptor, select.EPOLLIN)

    def borrow(self, descriptor: int) -> None:
        """Do not call the handler until :meth:`give_back`, since the caller reads, in its own thread."""
        if self._returned.pop(descriptor, None) is None:
            with self._lending:
                self._poll.modify(descriptor, 0)

    def give_back(self, descriptor: int) -> None:
        """Call the handler again in a moment; whoever borrows until then does not wake the reactor's thread."""
        self._returned[descriptor] = time.monotonic()
        if not self._collecting:
            with self._lending:
                self._collect_later()

    def unwatch(self, descriptor: int) -> None:
        """Stop that; nothing happens when it was not watched."""
        with self._lending:
            self._returned.pop(descriptor, None)
            if self._handlers.pop(descriptor, None) is not None:
                with contextlib.suppress(OSError):
                    self._poll.unregister(descriptor)

    def call_soon(self, call: Handler) -> None:
        """Do something in the thread of the reactor. Takes no lock, so a finalizer may use it, also in a fork."""
        if self._wake >= 0:
            self._soon.append(call)
            os.eventfd_write(self._wake, 1)

    def call_at(self, when: float, call: Handler) -> Timer:
        """Do something in the thread of the reactor at a time of ``time.monotonic()``."""
        timer = Timer(call)
        with self._lock:
            if len(self._timers) > self._crowd:  # most calls end long before their time is up
                self._timers = [entry for entry in self._timers if entry[2].call is not None]
                heapq.heapify(self._timers)
                self._crowd = max(_CROWD, 2 * len(self._timers))
            first = not self._timers or when < self._timers[0][0]
            heapq.heappush(self._timers, (when, next(self._numbers), timer))
        if first and not self.inside:
            os.eventfd_write(self._wake, 1)
        return timer

    def call_later(self, seconds: float, call: Handler) -> Timer:
        """Do something in the thread of the reactor after some seconds."""
        return self.call_at(time.monotonic() + seconds, call)

    def abandon(self) -> None:
        """Forget everything: we are a fork, and the thread is the parent's."""
        self._poll.close()
        os.close(self._wake)
        self._wake = -1  # a finalizer may know us still, and the number may soon be that of another file

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(self._patience()):
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                elif handler := self._handlers.get(descriptor):
                    _guarded(handler)
            while self._soon:
                _guarded(self._soon.popleft())
            self._ring()

    def _collect_later(self) -> None:
        if not self._collecting:
            self._collecting = True
            self.call_later(_LOAN, self._collect)

    def _collect(self) -> None:
        """Watch again what nobody has borrowed for a moment."""
        latest = time.monotonic() - _LOAN
        with self._lending:
            for descriptor, when in tuple(self._returned.items()):
                if when <= latest and self._returned.pop(descriptor, None) is not None:
                    self._poll.modify(descriptor, select.EPOLLIN)
            self._collecting = False  # before the look: who gives back looks the other way round
            if self._returned:
                self._collect_later()

    def _patience(self) -> float | None:
        with self._lock:
            while self._timers and self._timers[0][2].call is None:
                heapq.heappop(self._timers)
            if not self._timers:
                return None
            return min(max(0.0, self._timers[0][0] - time.monotonic()), LONGEST_SECONDS)

    def _ring(self) -> None:
        now = time.monotonic()
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                timer = heapq.heappop(self._timers)[2]
            if timer.call is not None:
                _guarded(timer.call)


def _guarded(call: Handler) -> None:
    try:
        call()
    except BaseException:  # the others are to be served, whatever a callback raised
        logging.getLogger("anyaccel").exception("a handler of the reactor failed")


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
