"""A worker as its caller sees it: a channel, and an end to hear of."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from anyaccel.ledger.mark import Mark
from anyaccel.workers.loop import Loop
from anyaccel.workers.pickling import Pickled
from anyaccel.workers.spin import Spin
from anyaccel.workers.wire import Kind, Message, receive, send

_GONE = {errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN}
"""The other end has been closed, or ours has since the end was noticed."""


class Gone(NamedTuple):
    """How a worker ended.

    Attributes:
        pid: Its process id, or 0 when it never had one.
        status: Its exit status, the negative number of a signal, or None when nobody could tell.
        reason: Why there is no worker any more, where its own end is not the reason.
        forked: Whether there was a process at all.
    """

    pid: int = 0
    status: int | None = None
    reason: str = ""
    forked: bool = True


class Owner(Protocol):
    """Whoever wants to hear of a worker."""

    def on_message(self, _: Worker, message: Message) -> None:
        """It sent something."""

    def on_gone(self, _: Worker, gone: Gone) -> None:
        """It and everything that it started has left the kernel. Nothing follows."""

    def on_stuck(self, _: Worker, reason: str) -> None:
        """Something of it ignores even SIGKILL."""

    def on_fault(self, _: Worker, reason: str) -> None:
        """What it sent is no answer, or cannot be read; it is being ended."""


class Worker:
    """A process that a nursery forked for us, or is about to fork.

    Args:
        number: Its number in the nursery.
        owner: Who wants to hear of it.
        channel: Our end of its channel.
        end: Its end: whatever it has not taken out can be taken back there.
        loop: The loop that listens.
        stop: Asks the nursery to end it, given the seconds between asking and killing.

    Attributes:
        awaited: How many answers may be there at once.
        mark: What it and all that it starts carry; empty before it has been told.
    """

    __slots__ = (
        "_channel", "_deliveries", "_end", "_gone", "_loop", "_open", "_reading", "_spin", "awaited", "mark", "number",
        "owner", "stop",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        owner: Owner,
        channel: socket.socket,
        end: socket.socket,
        loop: Loop,
        *,
        stop: Callable[[float], None],
    ) -> None:
        self.number = number
        self.owner = owner
        self.stop = stop
        self.awaited = 1
        self.mark: Mark = ()
        self._channel = channel
        self._end = end
        self._loop = loop
        self._open = True
        self._spin = Spin()
        self._reading = threading.Lock()
        self._deliveries = 0
        self._gone: Gone | None = None

    @property
    def begun(self) -> bool:
        """Whether it runs what it was sent: it does so at once."""
        return True

    def listen(self) -> None:
        """Hand over what it sends from now on."""
        self._loop.watch(self._channel.fileno(), self.read)

    def send(
        self, kind: Kind, body: Pickled | bytes = b"", descriptors: Sequence[int] = (), *, number: int = 0
    ) -> bool:
        """Send it a message; False when it has gone.

        Raises:
            OSError: When there is no memory or no descriptor left for the message.
        """
        try:
            send(self._channel, kind, body, descriptors, number=number)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        return True

    def finish(self) -> None:
        """Let it end in its own time, once it has done what it was sent."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def take_back(self) -> Message | None:
        """Take back the first message that it has not taken out, or None: the kernel gives it to one of us alone."""
        try:
            return receive(self._end, wait=False)
        except (OSError, ValueError):  # there is none, or it cannot be understood here, and the worker will say so
            return None

    def read(self) -> None:
        """Take what answers there are from the channel, and hand them over."""
        messages = []
        with self._reading:
            for _ in range(self.awaited):
                message = self._receive()
                if message is None:
                    break
                messages.append(message)
            self._deliveries += len(messages)
        if messages:
            self._deliver(messages)

    def attend(self, pending: Callable[[], bool], seconds: float | None = None) -> None:
        """Take the next message in this thread, which saves the way through the loop's, and hand it over.

        Args:
            pending: Whether the calling thread still waits for that message; if not, nothing is done.
            seconds: How long to wait for it; None for as long as it takes.
        """
        # Of several answers, the loop takes all that are there at once, and it serves those who wait for the others.
        if self.awaited > 1 or not self._reading.acquire(blocking=False):
            return  # somebody else is about to take it
        try:
            # What is being handed over may be the message: then no other one may ever come.
            if not self._open or self._deliveries or not pending():
                return
            descriptor = self._channel.fileno()
            self._loop.borrow(descriptor)
            try:
                message = self._receive(partial(self._spin.receive, self._channel, seconds))
            finally:
                if self._open:
                    self._loop.give_back(descriptor)
            self._deliveries += message is not None
        finally:
            self._reading.release()
        if message is not None:
            self._deliver([message])

    def refuse(self, reason: str) -> None:
        """It sent what is no answer: end it, since nothing that it says can be believed any more."""
        self.stop(0)
        self.interrupt()
        self.owner.on_fault(self, reason)

    def interrupt(self) -> None:
        """Let nobody wait for its answer any more."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RD)

    def ended(self, gone: Gone) -> None:
        """Hand over what it said last, and that it has gone."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # nothing is sent any more, since nobody would take it out
        while self._open:
            with self._reading:
                message = self._receive(last=True)
            if message is not None:
                self.owner.on_message(self, message)
        self._channel.close()
        with self._reading:
            self._gone = gone
            if self._deliveries:
                return  # whoever hands over its last message says so afterwards
        self._hand_over_end(gone)

    def forget(self) -> None:
        """Close the channel: nobody was there."""
        with self._reading:
            self._deaf()
        self._channel.close()
        self._end.close()

    def _deliver(self, messages: Sequence[Message]) -> None:
        """Hand over messages, and the end of the worker where that was heard of meanwhile."""
        try:
            for message in messages:
                self.owner.on_message(self, message)
        finally:
            with self._reading:
                self._deliveries -= len(messages)
                gone = None if self._deliveries else self._gone
            if gone is not None:
                self._hand_over_end(gone)

    def _hand_over_end(self, gone: Gone) -> None:
        self.owner.on_gone(self, gone)
        self._end.close()

    def _receive(self, take: Callable[[], Message | None] | None = None, *, last: bool = False) -> Message | None:
        if not self._open:
            return None
        try:
            message = _checked(receive(self._channel, wait=False) if take is None else take())
        except BlockingIOError:
            if not last:
                return None
            message = None
        except (OSError, ValueError) as error:  # it is none of ours, or no descriptors or memory are left for it
            self.stop(0)
            self.owner.on_fault(self, f"its answer could not be read: {error}")
            message = None
        if message is None:
            self._deaf()
        return message

    def _deaf(self) -> None:
        if self._open:
            self._open = False
            self._loop.unwatch(self._channel.fileno())


def _checked(message: Message | None) -> Message | None:
    """A message of a worker, which passes no descriptors along.

    Raises:
        ValueError: When it does.
    """
    if message is None or not message.descriptors:
        return message
    for descriptor in message.descriptors:
        os.close(descriptor)
    raise ValueError("it passes descriptors along")
