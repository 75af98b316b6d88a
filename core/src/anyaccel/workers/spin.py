"""Waiting for a message: awake for a moment where the last ones came quickly, else asleep.

To wake a process that sleeps costs as much as many a call, and while both take turns on one processor, each finds the
other's memory in its caches. Two that talk all the time therefore stay awake between two messages. Where that does not
help, since the other one has no processor to answer on, they sleep.
"""

from __future__ import annotations

import select
import socket
import threading
import time

from anyaccel.workers.wire import Message, receive

SPIN_SECONDS = 0.000_2
"""How long to stay awake at most, and how long the last wait may have been."""
SLEEPS = 8
"""How often to sleep after it was in vain, though the answer came soon."""

_awake = threading.Lock()
"""Held by the one thread that stays awake: several would be in each other's way."""


class Spin:
    """What one side of a channel has learned about the pace of the other."""

    __slots__ = ("_quick", "_sleeps")

    def __init__(self) -> None:
        self._quick = False
        self._sleeps = 0

    def receive(self, channel: socket.socket, seconds: float | None = None) -> Message | None:
        """Wait for one message, for so many seconds at most; None when the other side has gone.

        Raises:
            BlockingIOError: When there was none in time.
            ValueError: When it is not one of ours.
            OSError: When its memory cannot be mapped.
        """
        start = time.monotonic()
        in_vain = False
        if self._sleeps:
            self._sleeps -= 1
        elif self._quick and _awake.acquire(blocking=False):
            try:
                while time.monotonic() - start < SPIN_SECONDS:
                    try:
                        return receive(channel, wait=False)
                    except BlockingIOError:
                        in_vain = True
            finally:
                _awake.release()
        if seconds is not None:
            _sleep(channel, seconds - (time.monotonic() - start))
        message = receive(channel, wait=seconds is None)
        took = time.monotonic() - start
        if in_vain and took < 3 * SPIN_SECONDS:
            self._sleeps = SLEEPS
        else:
            self._quick = took < SPIN_SECONDS
        return message


def _sleep(channel: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.poll(max(0.0, seconds) * 1000)
