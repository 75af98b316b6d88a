"""Workers from the fork server: have them forked, also ahead of need, and hear of their end."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from anyaccel.errors import WorkerStartError
from anyaccel.forkserver import client
from anyaccel.forkserver.client import Gone
from anyaccel.linux.mark import Mark, carries
from anyaccel.linux.process import describe_end
from anyaccel.linux.teardown import Teardown, find_carriers, tell_left
from anyaccel.pool.reactor import reactor

TARGET = "anyaccel.pool.worker:serve"
OWN = ("cloudpickle", "anyaccel.pool.worker")
"""What all workers need, and should not each load."""
LAST_GRACE = 0.5
"""Seconds between asking and killing when the caller has gone: nothing is left to wait for a clean end."""
STUCK_SECONDS = 60.0
CLOSE_SECONDS = 5.0
STUCK_LOOK_SECONDS = 5.0
"""Pause between two looks at what ignores SIGKILL after the death of a fork server."""
BUFFER = 1 << 18


class Child(Protocol):
    """Owner of a worker.

    Attributes:
        mark: What it and all that it starts carry; empty before it has been told.
    """

    mark: Mark

    def attach(self, channel: socket.socket, end: socket.socket, stop: Callable[[float], None]) -> None:
        """It has these two ends of a channel, and the fork server ends it when asked."""

    def detach(self) -> None:
        """There is none after all."""

    def ended(self, gone: Gone) -> None:
        """It and everything that it started has left the kernel. Nothing follows."""

    def on_stuck(self, reason: str) -> None:
        """Something of it ignores even SIGKILL."""


class WorkerServer(client.ForkServer):
    """The fork server of some workers; all but :meth:`close` is for the thread of the reactor.

    Args:
        preload: Modules that it imports for all of them.

    Raises:
        WorkerStartError: When it cannot be started.
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self.environ = dict(os.environ)
        self.path = list(sys.path)
        self.users = 0
        self._spare: _Spare | None = None
        self._reactor = reactor()
        config = {
            "own": OWN,
            "preload": preload,
            "argv": [str.__str__(str(word)) for word in sys.argv],
            "grace": LAST_GRACE,
            "stuck": STUCK_SECONDS,
        }
        try:
            super().__init__(config, env=self.environ)
        except OSError as error:
            raise WorkerStartError(f"the fork server cannot be started: {error}") from error
        self._reactor.watch(self.fileno(), self._on_control)

    def start_worker(self, child: Child, *, grace: float, leases: Sequence[int], ahead: bool) -> None:
        """Have a worker forked, or take the one that was forked ahead.

        Args:
            child: Who gets it.
            grace: Seconds that what it leaves behind has between being asked to end and being killed.
            leases: Descriptors that are kept until it and whatever it started have gone.
            ahead: Whether it may be the one that was forked ahead.

        Raises:
            BrokenPipeError: When the fork server has died.
            OSError: When there are no descriptors left.
        """
        spare = self._take_spare() if ahead else None
        if spare is not None:
            self.children[spare.number] = child
            child.attach(spare.channel, spare.end, partial(self._stop, spare.number))
        number = self._fork(child, ahead=False) if spare is None else spare.number
        try:
            self.tell(number, {"hold": number, "grace": grace}, leases)
        except OSError:
            child.detach()
            raise

    def fork_ahead(self) -> None:
        """Have one worker forked before it is needed: that is most of the time that a fresh one takes."""
        self._spare = self._take_spare()
        if self._spare is None and self.users and self.alive:
            spare = _Spare()
            with contextlib.suppress(OSError):
                spare.number = self._fork(spare, ahead=True)
                self._spare = spare

    def use(self) -> None:
        """Say that a pool uses it."""
        self.users += 1

    def leave(self) -> None:
        """Say that a pool does not use it any more: without users, nothing is forked ahead."""
        self.users -= 1
        spare = None if self.users else self._take_spare()
        if spare is not None:
            spare.finish()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """End it and whatever is left of its workers."""
        self._reactor.unwatch(self.fileno())
        ended = super().close(seconds)
        if not ended:
            self.kill()  # something of it is stuck in the kernel, which nothing helps
        for child in self.take_children():
            child.ended(Gone(reason="its fork server was closed"))
        return ended

    def _fork(self, child: Child, *, ahead: bool) -> int:
        """Have a worker forked; returns its number."""
        channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        number = self.draw()
        child.attach(channel, end, partial(self._stop, number))
        try:
            self.spawn(number, child, TARGET, (end.fileno(),), argument=ahead)
        except OSError:
            child.detach()
            raise
        return number

    def _stop(self, number: int, grace: float) -> None:
        self.stop(number, grace, by=15)  # SIGTERM

    def _take_spare(self) -> _Spare | None:
        """Take the worker that was forked ahead, unless it has ended."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and self.children.get(spare.number) is spare else None

    def _on_control(self) -> None:
        if not self.hear():
            self._on_death()

    def _on_death(self) -> None:
        """End what its workers started in its place, and tell the owners when that is done."""
        self._reactor.unwatch(self.fileno())
        children = self.take_children()
        code = self.wait()
        self._control.close()
        self._end(children, Gone(reason=f"its fork server {describe_end(code)}"))

    def _end(self, children: list[Child], gone: Gone) -> None:
        """Kill what is left of some workers, each with all that carries its mark."""
        rest = Teardown(find_carriers(child.mark for child in children), grace=0)
        self._go_on(rest, children, gone)

    def _go_on(self, rest: Teardown, children: list[Child], gone: Gone) -> None:
        pause = rest.step()
        if pause is not None:
            self._reactor.call_later(pause, partial(self._go_on, rest, children, gone))
            return
        stuck = [child for child in children if any(carries(pid, child.mark) for pid in rest.own)]
        for child in children:
            if child in stuck:
                child.on_stuck("; ".join(tell_left(rest, "a worker")))
            else:
                carried = any(carries(pid, child.mark) for pid in rest.others)
                child.ended(Gone(reason=gone.reason, carried=carried))
        if stuck:
            self._reactor.call_later(STUCK_LOOK_SECONDS, partial(self._end, stuck, gone))


class _Spare:
    """A process that was forked before it is needed. Nothing that becomes of it matters."""

    mark: Mark = ()

    def __init__(self) -> None:
        self.number = 0

    def attach(self, channel: socket.socket, end: socket.socket, stop: Callable[[float], None]) -> None:  # noqa: ARG002
        """It has these ends of a channel."""
        self.channel, self.end = channel, end

    def detach(self) -> None:
        """It will not be forked."""
        self.channel.close()
        self.end.close()

    def finish(self) -> None:
        """It is not needed any more."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)

    def ended(self, gone: Gone) -> None:  # noqa: ARG002
        """The next one will be forked when it is needed."""
        self.detach()

    def on_stuck(self, reason: str) -> None:
        """It holds nothing."""


def fork_server(preload: Sequence[str] = ()) -> WorkerServer:
    """The fork server of this process that has preloaded exactly these modules; started when there is none.

    Raises:
        WorkerStartError: When it cannot be started.
    """
    key = tuple(preload)
    return client.find_server((WorkerServer, key), lambda: WorkerServer(key))


def spawn(
    child: Child, preload: Sequence[str], *, grace: float, leases: Sequence[int] = (), ahead: bool = True
) -> WorkerServer:
    """Have a worker forked, by a new fork server where the last one has died; returns that.

    See :meth:`WorkerServer.start_worker` for the arguments.

    Raises:
        WorkerStartError: When no fork server can be started, or it cannot be reached.
    """
    for _ in range(2):
        found = fork_server(preload)
        try:
            found.start_worker(child, grace=grace, leases=leases, ahead=ahead)
        except (BrokenPipeError, ConnectionResetError):
            found.alive = False
        except OSError as error:
            raise WorkerStartError(f"no worker can be started: {error.strerror}") from error
        else:
            return found
    raise WorkerStartError("no worker can be started: the fork server dies as soon as it has been started")
