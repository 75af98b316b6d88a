"""The calling side of guarded calls: functions that may hang, crash or exit, run where that costs nothing.

The caller never forks: it may have threads, or a device open. A fork server does, one process for each
:class:`GuardedProcess`, and kills what that leaves behind.
"""

from __future__ import annotations

import _socket
import atexit
import contextlib
import json
import os
import select
import time
from _thread import RLock
from _weakrefset import WeakSet
from collections.abc import Callable, Mapping

from anyaccel.forkserver.client import ForkServer, Gone, close_all
from anyaccel.linux.fork import tidy_in_child
from anyaccel.model import Value
from anyaccel.vendors.protocol import ANSWER, BEGUN, CALL, CHUNK, HEADER, PRINTED_LIMIT
from anyaccel.vendors.server import IDLE_SECONDS, find_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

TARGET = "anyaccel.vendors.answering:serve"
START_SECONDS = 20.0
"""Time that processes may take to start beside their calls, on a machine under load."""
ANSWER_LIMIT = 8 << 20
"""Bytes that an answer may have."""
END_SECONDS = 1.0
"""How long a process may live on that has closed its socket."""
HEAR_SECONDS = 10.0
"""How long the fork server may take to tell of an end, on a machine under load."""
TRACE_SECONDS = 0.5
"""How long a process may take to print where it is, and to end."""
BUSY_SECONDS = 5.0
"""Likewise, where it only waits for a processor."""
ABORTED = "Fatal Python error: Aborted\n\n"
"""What stands before that."""


class Outcome(Value):
    """What came out of one guarded call.

    Attributes:
        value: What the function returned, as JSON data; None when it failed.
        fault: ``raised``, ``timeout``, ``died`` or ``contract``; empty when it returned.
        reason: Why it failed.
        details: Traceback, and the end of what its process had printed.
    """

    value: Any = None
    fault: str = ""
    reason: str = ""
    details: str = ""


class _Running:
    """One process, from when it is asked for until its end.

    Attributes:
        calls: The socket on which it answers calls.
        output: The pipe with what it prints; -1 once nothing more can come.
        pid: Its process id; 0 until it has begun to answer.
        gone: How it ended; None until that is known.

    Raises:
        OSError: When the server has ended, or no descriptor is left.
    """

    def __init__(self, server: ForkServer) -> None:
        self.pid = 0
        self.gone: Gone | None = None
        self._server = server
        self._printed = bytearray()
        self.calls, theirs = _socket.socketpair()
        with contextlib.closing(theirs), contextlib.ExitStack() as undo:
            undo.callback(self.calls.close)
            self.output, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(self.forget)
            try:
                self._number = server.draw()
                server.spawn(self._number, self, TARGET, (theirs.fileno(), output), alone=True)
            finally:
                os.close(output)
            undo.pop_all()

    def ended(self, gone: Gone) -> None:
        """Take notice of its end."""
        self.gone = gone

    def on_stuck(self, reason: str) -> None:
        """Take notice that it does not end."""
        self.gone = Gone(reason=reason)

    def drain(self) -> None:
        """Take what it has printed out of the pipe, a part of it where it prints without end."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16 if self.output >= 0 else 0):
                chunk = os.read(self.output, 1 << 16)
                if not chunk:
                    self._close_output()
                    break
                self._printed += chunk
                del self._printed[:-PRINTED_LIMIT]

    def printed(self) -> str:
        """Return the end of what it has printed."""
        self.drain()
        return self._printed.decode(errors="replace")

    def end(self, *, kill: bool, trace: bool) -> tuple[Gone, str]:
        """End it; return how it ended, and the end of what it has printed.

        Args:
            kill: Whether it may live; otherwise it has closed its socket.
            trace: Whether it prints where it is before it is killed.
        """
        self.calls.close()
        if trace:
            self._abort()
        self._server.stop(self._number, 0.0 if kill else END_SECONDS)
        self._wait(HEAR_SECONDS)
        printed = self.printed()
        self.forget()
        return self.gone or Gone(), printed

    def forget(self) -> None:
        """Take no further notice of it."""
        self.calls.close()
        if self.output >= 0:
            self._close_output()

    def _close_output(self) -> None:
        output, self.output = self.output, -1  # first: a fork in between would close it a second time
        os.close(output)

    def _abort(self) -> None:
        from anyaccel.linux.process import state

        self._server.stop(self._number, BUSY_SECONDS, by=6)  # SIGABRT, by which Python says where it is
        self._wait(TRACE_SECONDS)
        if self.gone is None and state(self.pid) == "R":
            self._wait(BUSY_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait until its end is known, the server has gone, or the time is over."""
        deadline = time.monotonic() + seconds
        with self._server.hearing:
            while self.gone is None and (left := deadline - time.monotonic()) > 0:
                poll = select.poll()
                try:
                    for descriptor in (self._server.fileno(), *([self.output] if self.output >= 0 else ())):
                        poll.register(descriptor, select.POLLIN)
                    poll.poll(left * 1000 + 1)
                    if not self._server.hear():
                        self._server.close()
                        return
                except (OSError, ValueError):  # it was closed meanwhile
                    return
                self.drain()


class GuardedProcess:
    """A process for guarded calls, which keeps its state from one call to the next.

    The first call starts it, and so does the next one after its end. One call runs at a time: whoever calls enters the
    process before, and other threads wait.

    Args:
        preload: Names of modules that its fork server imports.

    Attributes:
        starts: How often it was started.
        fresh: Whether it has not begun to answer.
    """

    def __init__(self, *preload: str) -> None:
        self.starts = 0
        self.fresh = False
        self._preload = preload
        self._lock = RLock()
        self._running: _Running | None = None
        self._used = 0.0
        _processes.add(self)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def lives(self) -> bool:
        """Whether it was started and has not ended, as far as is known, nor been idle so long that it is about to."""
        return self._running is not None and time.monotonic() - self._used < IDLE_SECONDS - 10

    @property
    def running(self) -> _Running:
        """The process, which was started."""
        assert self._running is not None  # noqa: S101
        return self._running

    def start(self) -> None:
        """Start it unless it lives. Called, like the next three, by who has entered it, or alone has it.

        Raises:
            OSError: When no process can be started.
        """
        if self.lives:
            return
        self.close()
        server = find_server(*self._preload)
        try:
            self._running = _Running(server)
        except (BrokenPipeError, ConnectionResetError):  # the server was idle for long, or was killed
            server.close()
            self._running = _Running(find_server(*self._preload))
        self._used = time.monotonic()
        self.starts += 1
        self.fresh = True

    def send(self, data: bytes, seconds: float) -> None:
        """Send a call.

        Raises:
            OSError: When the process has gone, or does not take it in time.
        """
        calls = self.running.calls
        self._used = time.monotonic()
        data = HEADER.pack(CALL, len(data)) + data
        try:  # nearly always there is room for all of it, and nothing to wait for
            sent = calls.send(data, _socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            calls.settimeout(seconds)
            calls.sendall(data[sent:])

    def receive(self) -> bytes:
        """Some bytes of its answer, at least one; nothing when it has gone."""
        self._used = time.monotonic()
        try:
            return self.running.calls.recv(CHUNK)
        except OSError:
            return b""

    def end(self, *, kill: bool, trace: bool = False) -> tuple[Gone, str]:
        """End it, as :meth:`_Running.end`."""
        running, self._running = self._running, None
        return running.end(kill=kill, trace=trace) if running else (Gone(), "")

    def printed(self) -> str:
        """The end of what it has printed since it was started."""
        with self._lock:
            return self._running.printed() if self._running else ""

    def close(self) -> None:
        """End it."""
        with self._lock:
            self.end(kill=True)

    def forget(self) -> None:
        """Take no further notice of it: its server has ended, or belongs to the process that this one is a fork of."""
        running, self._running = self._running, None
        if running is not None:
            running.forget()

    def unlock(self) -> None:
        """Make the lock anew in a fork, since another thread of the parent may have held it."""
        self._lock = RLock()


def call_all(
    calls: Mapping[GuardedProcess, tuple[str, Any]],
    seconds: float,
    *,
    limit: int = ANSWER_LIMIT,
    enough: Callable[[], float | None] = lambda: None,
    came: Callable[[GuardedProcess, Outcome], object] = lambda *_: None,
) -> dict[GuardedProcess, Outcome]:
    """Call functions in several processes at once, which the caller has entered, or alone has.

    Args:
        calls: By process, the function as ``module:name`` and the JSON data that it is called with.
        seconds: Time that each may take, from when it begins.
        limit: Bytes that an answer may have.
        came: Called with each outcome when it is in.
        enough: Called after that; returns seconds after which the others are given up, or None when all of the time is
            theirs.

    Returns:
        One outcome per process.
    """
    outcomes: dict[GuardedProcess, Outcome] = {}
    exchange = _Exchange(calls, seconds, limit)
    try:
        more = exchange.begin()
        while True:
            outcomes |= more
            for process, outcome in more.items():
                came(process, outcome)
            if not exchange.waiting:
                break
            if (patience := enough()) is not None:
                exchange.give_up_after(patience)
            while not (more := exchange.step()):
                pass
    except BaseException:
        for process in calls:  # an answer that comes yet must not be taken for that of the next call
            if process not in outcomes:
                process.close()
        raise
    return outcomes


class _Exchange:
    """Calls under way: what each process has answered so far, and when its time is up."""

    def __init__(self, calls: Mapping[GuardedProcess, tuple[str, Any]], seconds: float, limit: int) -> None:
        self._calls = calls
        self._seconds = seconds
        self._limit = limit
        self._began = time.monotonic()
        self._patience = float("inf")
        self.waiting: dict[int, GuardedProcess] = {}
        self._data: dict[int, bytearray] = {}
        self._deadlines: dict[int, float] = {}

    def begin(self) -> dict[GuardedProcess, Outcome]:
        """Start the processes, and send each its call; the outcomes of those that are gone already."""
        outcomes = {}
        for process in self._calls:
            process.start()
        for process, (function, payload) in self._calls.items():
            call = {"function": function, "payload": payload, "begun": process.fresh}
            data = json.dumps(call).encode()
            descriptor = process.running.calls.fileno()
            until = self._began + (START_SECONDS if process.fresh else self._seconds)
            try:
                process.send(data, max(0.1, until - time.monotonic()))
            except OSError:
                outcomes[process] = _died(process)
                continue
            self.waiting[descriptor] = process
            self._data[descriptor] = bytearray()
            self._deadlines[descriptor] = until
        return outcomes

    def give_up_after(self, seconds: float) -> None:
        """Wait at most so long from now for those that have not answered."""
        self._patience = min(self._patience, time.monotonic() + seconds)

    def step(self) -> dict[GuardedProcess, Outcome]:
        """Wait for something to come, or for the time of a call to be up; what came of it, which may be nothing yet."""
        poll = select.poll()
        outputs = {process.running.output: process for process in self.waiting.values()}
        outputs.pop(-1, None)
        for descriptor in (*self.waiting, *outputs):
            poll.register(descriptor, select.POLLIN)
        until = min(self._patience, *self._deadlines.values())
        outcomes = {}
        for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
            if descriptor in outputs:
                outputs[descriptor].printed()
                continue
            process, outcome = self.waiting[descriptor], self._receive(descriptor)
            if outcome is not None:
                outcomes[process] = outcome
                del self.waiting[descriptor], self._deadlines[descriptor]
        now = time.monotonic()
        for descriptor in [each for each, until in self._deadlines.items() if min(until, self._patience) <= now]:
            del self._deadlines[descriptor]
            process = self.waiting.pop(descriptor)
            outcomes[process] = self._too_late(process)
        return outcomes

    def _receive(self, descriptor: int) -> Outcome | None:
        """Take some bytes; the outcome once all are there."""
        process, data = self.waiting[descriptor], self._data[descriptor]
        chunk = process.receive()
        if not chunk:
            return _died(process)
        data += chunk
        while len(data) >= HEADER.size:
            kind, size = HEADER.unpack_from(data)
            if kind == BEGUN and process.fresh:
                del data[: HEADER.size]
                process.fresh = False
                process.running.pid = size
                self._deadlines[descriptor] = time.monotonic() + self._seconds
            elif kind != ANSWER or size > self._limit:
                return self._refused(process, kind, size)
            elif len(data) < HEADER.size + size:
                return None
            else:
                return _understood(process, data[HEADER.size : HEADER.size + size])
        return None

    def _refused(self, process: GuardedProcess, kind: int, size: int) -> Outcome:
        if kind != ANSWER:
            return _nonsense(process)
        _, printed = process.end(kill=True)
        reason = f"it answered {size / 1e6:.1f} MB, and an answer may have {self._limit / 1e6:.1f} MB"
        return Outcome(fault="contract", reason=reason, details=printed)

    def _too_late(self, process: GuardedProcess) -> Outcome:
        _, printed = process.end(kill=True, trace=True)
        seconds = min(self._seconds, time.monotonic() - self._began)
        printed = printed.replace(ABORTED, "")
        where = _line(printed)
        reason = f"it did not answer within {seconds:.3g} s" + (f" (it was at {where})" if where else "")
        return Outcome(fault="timeout", reason=reason, details=printed)


def _understood(process: GuardedProcess, data: bytes | bytearray) -> Outcome:
    try:
        answer = json.loads(data)
        if "fault" not in answer:
            return Outcome(value=answer["value"])
        fault = answer["fault"]
        return Outcome(fault="raised", reason=str(fault["reason"]), details=fault["details"] + process.printed())
    except (ValueError, LookupError, TypeError, RecursionError):
        return _nonsense(process)


def _nonsense(process: GuardedProcess) -> Outcome:
    _, printed = process.end(kill=True)
    return Outcome(fault="contract", reason="its process sent what is no answer", details=printed)


def _died(process: GuardedProcess) -> Outcome:
    gone, printed = process.end(kill=False)
    from anyaccel.linux.process import describe_end

    where = _line(printed)
    if gone.forked:
        reason = f"its process {describe_end(gone.status)} before it answered"
    else:
        reason = f"its process could not be started: {gone.reason}"
    return Outcome(fault="died", reason=reason + (f" (it was at {where})" if where else ""), details=printed)


def _line(printed: str) -> str:
    """Where a process was, by the traceback that it printed last; empty when it printed none."""
    import re

    for thread in reversed(printed.split("most recent call first")):
        if "answering.py" in thread and (found := re.search(r'File "([^"\n]+)", line (\d+) in (\S+)', thread)):
            return f"{found[1]}:{found[2]} in {found[3]}"
    return ""


_processes: WeakSet[GuardedProcess] = WeakSet()


def close_processes() -> None:
    """End all guarded processes of this process, and what forks them. The next call starts them again."""
    for process in list(_processes):
        with process:
            process.forget()
    close_all(ForkServer)


@atexit.register  # before the fork server ends; without the lock, which a thread that is left behind may hold
def _close_sockets() -> None:
    for process in list(_processes):
        process.forget()


@tidy_in_child
def _forget_all() -> None:
    for process in list(_processes):
        process.unlock()
        process.forget()
