"""Workers from the fork server: have them forked, also ahead of need, and hear of their end."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from anyaccel.errors import WorkerStartError
from anyaccel.forkserver import client
from anyaccel.forkserver.client import Gone
from anyaccel.linux.mark import Mark, carries
from anyaccel.linux.process import describe_end
from anyaccel.linux.teardown import Teardown, describe_left, find_carriers
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


class WorkerOwner(Protocol):
    """WorkerOwner of a worker.

    Attributes:
        mark: What it and all that it starts carry; empty before it has been told.
    """

    mark: Mark

    def ended(self, gone: Gone) -> None:
        """It and everything that it started has left the kernel. Nothing follows."""

    def on_stuck(self, reason: str) -> None:
        """Something of it ignores even SIGKILL."""


class Process:
    """A process of a fork server, and the channel to it.

    Args:
        server: The fork server.
        ahead: Whether nothing waits for it yet.

    Attributes:
        server: The fork server.
        number: Its number there.
        channel: Our end of the channel.
        end: Its end: what it never took out is there once it has gone.
        owner: Whom it works for; None before it is needed, when nothing that becomes of it matters.

    Raises:
        BrokenPipeError: When the fork server has died.
        OSError: When there are no descriptors left.
    """

    def __init__(self, server: WorkerServer, *, ahead: bool) -> None:
        self.server = server
        self.owner: WorkerOwner | None = None
        self.channel, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self.number = server.draw()
        try:
            server.spawn(self.number, self, TARGET, (self.end.fileno(),), argument=ahead)
        except OSError:
            self.close()
            raise

    @property
    def mark(self) -> Mark:
        """What it and all that it starts carry; empty before it has been told."""
        return () if self.owner is None else self.owner.mark

    def stop(self, grace: float) -> None:
        """Have the fork server end it, with so many seconds between asking and killing."""
        self.server.stop(self.number, grace, by=15)  # SIGTERM

    def shut(self, directions: int) -> None:
        """Shut the channel."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(directions)

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()
        self.end.close()

    def ended(self, gone: Gone) -> None:
        """Take notice that it and everything that it started has left the kernel."""
        if self.owner is not None:
            self.owner.ended(gone)
        self.close()

    def on_stuck(self, reason: str) -> None:
        """Take notice that something of it ignores even SIGKILL."""
        if self.owner is not None:
            self.owner.on_stuck(reason)


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
        self._spare: Process | None = None
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

    def start_worker(self, owner: WorkerOwner, *, grace: float, leases: Sequence[int], ahead: bool) -> Process:
        """Have a worker forked, or take the one that was forked ahead.

        Args:
            owner: Whom it works for.
            grace: Seconds that what it leaves behind has between being asked to end and being killed.
            leases: Descriptors that are kept until it and whatever it started have gone.
            ahead: Whether it may be the one that was forked ahead.

        Raises:
            BrokenPipeError: When the fork server has died.
            OSError: When there are no descriptors left.
        """
        process = (self._take_spare() if ahead else None) or Process(self, ahead=False)
        try:
            self.send_or_drop(process.number, {"hold": process.number, "grace": grace}, leases)
        except OSError:
            process.close()
            raise
        process.owner = owner
        return process

    def fork_ahead(self) -> None:
        """Have one worker forked before it is needed: that is most of the time that a fresh one takes."""
        self._spare = self._take_spare()
        if self._spare is None and self.users and self.alive:
            with contextlib.suppress(OSError):
                self._spare = Process(self, ahead=True)

    def use(self) -> None:
        """Say that a pool uses it."""
        self.users += 1

    def leave(self) -> None:
        """Say that a pool does not use it any more: without users, nothing is forked ahead."""
        self.users -= 1
        spare = None if self.users else self._take_spare()
        if spare is not None:
            spare.shut(socket.SHUT_WR)

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """End it and whatever is left of its workers."""
        self._reactor.unwatch(self.fileno())
        ended = super().close(seconds)
        if not ended:
            self.kill()  # something of it is stuck in the kernel, which nothing helps
        for child in self.take_children():
            child.ended(Gone(reason="its fork server was closed"))
        return ended

    def _take_spare(self) -> Process | None:
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

    def _end(self, children: list[Process], gone: Gone) -> None:
        """Kill what is left of some workers, each with all that carries its mark."""
        rest = Teardown(find_carriers(child.mark for child in children), grace=0)
        self._go_on(rest, children, gone)

    def _go_on(self, rest: Teardown, children: list[Process], gone: Gone) -> None:
        pause = rest.step()
        if pause is not None:
            self._reactor.call_later(pause, partial(self._go_on, rest, children, gone))
            return
        stuck = [child for child in children if any(carries(pid, child.mark) for pid in rest.own)]
        for child in children:
            if child in stuck:
                child.on_stuck("; ".join(describe_left(rest, "a worker")))
            else:
                carried = any(carries(pid, child.mark) for pid in rest.others)
                child.ended(Gone(reason=gone.reason, carried=carried))
        if stuck:
            self._reactor.call_later(STUCK_LOOK_SECONDS, partial(self._end, stuck, gone))


def fork_server(preload: Sequence[str] = ()) -> WorkerServer:
    """The fork server of this process that has preloaded exactly these modules; started when there is none.

    Raises:
        WorkerStartError: When it cannot be started.
    """
    key = tuple(preload)
    return client.find_server((WorkerServer, key), lambda: WorkerServer(key))


def spawn(owner: WorkerOwner, preload: Sequence[str], *, grace: float, leases: Sequence[int], ahead: bool) -> Process:
    """Have a worker forked, by a new fork server where the last one has died.

    See :meth:`WorkerServer.start_worker` for the arguments.

    Raises:
        WorkerStartError: When no fork server can be started, or it cannot be reached.
    """
    for _ in range(2):
        found = fork_server(preload)
        try:
            return found.start_worker(owner, grace=grace, leases=leases, ahead=ahead)
        except (BrokenPipeError, ConnectionResetError):
            found.alive = False
        except OSError as error:
            raise WorkerStartError(f"no worker can be started: {error.strerror}") from error
    raise WorkerStartError("no worker can be started: the fork server dies as soon as it has been started")
