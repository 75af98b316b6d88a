"""The caller's side of the fork server: start it, have workers forked, hear of their end."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

from anyaccel.errors import WorkerStartError
from anyaccel.interpreter import Interpreter, start
from anyaccel.linux.fork import renew_in_child, tidy_in_child
from anyaccel.linux.mark import Mark, carries
from anyaccel.linux.process import describe_end
from anyaccel.linux.teardown import Teardown, find_carriers, tell_left
from anyaccel.pool.channel import GONE, HOLD, NUMBER, SPAWN, STOP, Kind, Message, receive, send
from anyaccel.pool.reactor import reactor

CLOSE_SECONDS = 5.0
STUCK_LOOK_SECONDS = 5.0
"""Pause between two looks at what ignores SIGKILL after the death of a fork server."""
BUFFER = 1 << 18


class Gone(NamedTuple):
    """How a worker ended.

    Attributes:
        pid: Its process id, or 0 when it never had one.
        status: Its exit status, the negative number of a signal, or None when nobody could tell.
        reason: Why there is no worker any more, where its own end is not the reason.
        forked: Whether there was a process at all.
        carried: Whether processes of other users carry its mark, which it may have started: then its devices are left
            to the mark.
    """

    pid: int = 0
    status: int | None = None
    reason: str = ""
    forked: bool = True
    carried: bool = False


class Child(Protocol):
    """Whoever has a process of the fork server.

    Attributes:
        mark: What it and all that it starts carry; empty before it has been told.
    """

    mark: Mark

    def attach(self, channel: socket.socket, end: socket.socket, stop: Callable[[float], None]) -> None:
        """It has these two ends of a channel, and the fork server ends it when asked."""

    def detach(self) -> None:
        """There is none after all."""

    def listen(self) -> None:
        """It has been asked for."""

    def ended(self, gone: Gone) -> None:
        """It and everything that it started has left the kernel. Nothing follows."""

    def on_stuck(self, reason: str) -> None:
        """Something of it ignores even SIGKILL."""


class ForkServer:
    """One server process and its workers, by number. Every method may be called by any thread.

    Args:
        preload: Modules that it imports for all its workers.

    Raises:
        WorkerStartError: When it cannot be started.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self.preload = tuple(preload)
        self.environ = dict(os.environ)
        self.path = list(sys.path)
        self.alive = True
        self.users = 0
        self._spare: _Spare | None = None
        self._children: dict[int, Child] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._reactor = reactor()
        self._process = self._start()
        self._control = socket.socket(fileno=self._process.control)
        self._reactor.watch(self._control.fileno(), self._on_control)

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._process.pid

    def spawn(self, child: Child, *, grace: float, leases: Sequence[int] = (), ahead: bool = True) -> None:
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
        with self._lock:
            spare = self._spare if ahead else None
            if spare is not None:
                self._spare = None
                self._children[spare.number] = child
                child.attach(spare.channel, spare.end, partial(self._stop, spare.number))
        if spare is not None:
            child.listen()
        number = self._fork(child, ahead=False) if spare is None else spare.number
        self._tell(number, Kind.HOLD, HOLD.pack(number, grace), leases)

    def fork_ahead(self) -> None:
        """Have one worker forked before it is needed: that is most of the time that a fresh one takes."""
        with self._lock:
            if self._spare is not None or not self.users or not self.alive:
                return
        with contextlib.suppress(OSError):
            spare = _Spare()
            spare.number = self._fork(spare, ahead=True)
            with self._lock:
                # Another thread may have done the same, and the last user may have left.
                extra, self._spare = (self._spare, spare) if self.users else (spare, self._spare)
            if extra is not None:
                extra.finish()

    def use(self) -> None:
        """Say that a pool uses it."""
        with self._lock:
            self.users += 1

    def leave(self) -> None:
        """Say that a pool does not use it any more: without users, nothing is forked ahead."""
        with self._lock:
            self.users -= 1
            spare = self._spare if not self.users else None
            if spare is not None:
                self._spare = None
        if spare is not None:
            spare.finish()

    def _fork(self, child: Child, *, ahead: bool) -> int:
        """Have a worker forked; returns its number."""
        channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        number = next(self._numbers)
        child.attach(channel, end, partial(self._stop, number))
        with self._lock:
            alive = self.alive
            if alive:
                self._children[number] = child
        if not alive:
            child.detach()
            raise BrokenPipeError("the fork server has died")
        child.listen()
        self._tell(number, Kind.SPAWN, SPAWN.pack(number, ahead), (end.fileno(),))
        return number

    def _tell(self, number: int, kind: Kind, body: bytes, descriptors: Sequence[int]) -> None:
        """Send something about a worker. If that fails, there is none, and whoever should get it hears nothing."""
        try:
            send(self._control, kind, body, descriptors)
        except OSError:
            with self._lock:
                child = self._children.pop(number, None)
            if child is not None:  # else the fork server's death was noticed meanwhile, of which the child is told
                child.detach()
                raise

    def close(self) -> None:
        """End it and whatever is left of its workers."""
        self.alive = False
        self._reactor.unwatch(self._control.fileno())
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if self._process.wait(CLOSE_SECONDS) is None:
            self._process.kill()  # something of it is stuck in the kernel, and nobody can help that
        self._control.close()
        with self._lock:
            children, self._children, self._spare = self._children, {}, None
        for child in children.values():
            child.ended(Gone(reason="its fork server was closed"))

    def abandon(self) -> None:
        """Forget it: we are a fork of the process that it belongs to."""
        self.alive = False
        self._control.close()

    def _start(self) -> Interpreter:
        config = {"argv": [str.__str__(str(word)) for word in sys.argv], "caller": os.getpid(), "preload": self.preload}
        try:
            return start("anyaccel.pool.forkserver.server", config, env=self.environ)
        except OSError as error:
            raise WorkerStartError(f"the fork server cannot be started: {error}") from error

    def _stop(self, number: int, grace: float) -> None:
        with contextlib.suppress(OSError):
            send(self._control, Kind.STOP, STOP.pack(number, grace))

    def _on_control(self) -> None:
        try:
            message = receive(self._control, wait=False)
            if message is not None:
                self._hear(message)
        except BlockingIOError:
            return
        except (OSError, ValueError, LookupError, struct.error):
            self._process.kill()  # it has lost its mind; what it guards ends with it, and its calls are told
            return
        if message is None:
            self._on_death()

    def _hear(self, message: Message) -> None:
        data = bytes(message.data)
        if message.kind == Kind.GONE:
            number, pid, status = GONE.unpack(data)
            gone = Gone(pid, status)
        else:
            (number,), reason = NUMBER.unpack_from(data), data[NUMBER.size :].decode()
            if message.kind == Kind.STUCK:
                self._children[number].on_stuck(reason)
                return
            gone = Gone(reason=reason, forked=False)
        with self._lock:
            child = self._children.pop(number)
            if self._spare is child:
                self._spare = None
        child.ended(gone)

    def _on_death(self) -> None:
        """End what its workers started in its place, and tell the owners when that is done."""
        self._reactor.unwatch(self._control.fileno())
        with self._lock:
            self.alive = False
            children, self._children, self._spare = self._children, {}, None
        code = self._process.wait()
        reason = f"its fork server {describe_end(code)}"
        self._control.close()
        self._end(list(children.values()), Gone(reason=reason))

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
                child.ended(gone._replace(carried=any(carries(pid, child.mark) for pid in rest.others)))
        if stuck:
            self._reactor.call_later(STUCK_LOOK_SECONDS, partial(self._end, stuck, gone))


class _Spare:
    """A process that was forked before anybody needs it. Nothing that becomes of it matters."""

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

    def listen(self) -> None:
        """It says nothing before it was asked."""

    def finish(self) -> None:
        """Nobody needs it any more."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)

    def ended(self, gone: Gone) -> None:  # noqa: ARG002
        """The next one will be forked when it is needed."""
        self.detach()

    def on_stuck(self, reason: str) -> None:
        """It holds nothing."""


_servers: dict[tuple[str, ...], ForkServer] = {}
_lock = renew_in_child(threading.Lock())


def fork_server(preload: Sequence[str] = ()) -> ForkServer:
    """The fork server of this process that has preloaded exactly these modules; started when there is none.

    Raises:
        WorkerStartError: When it cannot be started.
    """
    key = tuple(preload)
    with _lock:
        found = _servers.get(key)
        if found is None or not found.alive:
            found = _servers[key] = ForkServer(key)
        return found


def spawn(
    child: Child, preload: Sequence[str], *, grace: float, leases: Sequence[int] = (), ahead: bool = True
) -> ForkServer:
    """Have a worker forked, by a new fork server where the last one has died; returns that.

    See :meth:`ForkServer.spawn` for the arguments.

    Raises:
        WorkerStartError: When no fork server can be started, or it cannot be reached.
    """
    for _ in range(2):
        found = fork_server(preload)
        try:
            found.spawn(child, grace=grace, leases=leases, ahead=ahead)
        except (BrokenPipeError, ConnectionResetError):
            found.alive = False
        except OSError as error:
            raise WorkerStartError(f"no worker can be started: {error.strerror}") from error
        else:
            return found
    raise WorkerStartError("no worker can be started: the fork server dies as soon as it has been started")


@atexit.register
def _close_all() -> None:
    while _servers:
        _servers.popitem()[1].close()


@tidy_in_child
def _abandon_all() -> None:
    while _servers:
        _servers.popitem()[1].abandon()
