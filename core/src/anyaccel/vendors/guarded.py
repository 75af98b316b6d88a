"""The calling side of guarded calls: functions that may hang, crash or exit, run where that costs nothing.

The caller never forks: it may have threads, or a device open. A fork server does, one process for each
:class:`GuardedProcess`, and kills what that leaves behind.
"""

from __future__ import annotations

import _socket
import contextlib
import json
import os
import select
import time
from _thread import RLock
from _weakrefset import WeakSet
from collections.abc import Callable, Iterable, Mapping

from anyaccel.forkserver.client import ForkServer, Gone, close_all, tidy_at_exit
from anyaccel.linux.fork import tidy_in_child
from anyaccel.model import Value
from anyaccel.vendors import import_wanted
from anyaccel.vendors.protocol import ANSWER, BEGUN, CALL, CHUNK, HEADER, PRINTED_LIMIT
from anyaccel.vendors.server import IDLE_SECONDS, find_server

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self, TypeVar

    P = TypeVar("P", bound="GuardedProcess")

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
NO_ANSWER = "its process sent what is no answer"


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
        fresh: Whether it has not begun to answer.
        pid: Its process id; 0 until it has begun to answer.
        used: When it was called or heard last, on the monotonic clock.
        gone: How it ended; None until that is known.

    Raises:
        OSError: When the server has ended, or no descriptor is left.
    """

    def __init__(self, server: ForkServer) -> None:
        self.fresh = True
        self.pid = 0
        self.used = time.monotonic()
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

    def send(self, data: bytes, seconds: float) -> None:
        """Send a call.

        Raises:
            OSError: When the process has gone, or does not take it in time.
        """
        self.used = time.monotonic()
        data = HEADER.pack(CALL, len(data)) + data
        try:  # nearly always there is room for all of it, and nothing to wait for
            sent = self.calls.send(data, _socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self.calls.settimeout(seconds)
            self.calls.sendall(data[sent:])

    def receive(self) -> bytes:
        """Receive some bytes of its answer, at least one; nothing when it has gone."""
        self.used = time.monotonic()
        try:
            return self.calls.recv(CHUNK)
        except OSError:
            return b""

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

    The first call starts it, and so does the next one after its end. One call runs at a time: a caller enters the
    process before, and other threads wait.

    Args:
        preload: Names of modules that its fork server imports.
    """

    def __init__(self, *preload: str) -> None:
        self._preload = preload
        self._lock = RLock()
        self._running: _Running | None = None
        _processes.add(self)

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def running(self) -> _Running:
        """The process, which was started."""
        assert self._running is not None  # noqa: S101
        return self._running

    def prepare(self, call: Any) -> tuple[str, Any] | Outcome:
        """Get ready for a call: start the process unless it lives, and has not been idle so long that it may end.

        Args:
            call: What :func:`call_all` was told for this process.

        Returns:
            The function as ``module:name`` and the JSON data that it is called with, or what came of the call where it
            cannot be made.
        """
        if self._running is None or time.monotonic() - self._running.used > IDLE_SECONDS - 10:
            self.close()
            try:
                self._start()
            except OSError as error:  # no descriptor or no process is left
                return Outcome(fault="died", reason=f"its process cannot be started: {error}")
        function, payload = call
        return function, payload

    def heard(self, call: Any, outcome: Outcome) -> bool:  # noqa: ARG002 - for those that keep what they hear
        """Take notice of what came of a call; return whether it is to be made once more."""
        return False

    def end(self, *, kill: bool, trace: bool = False) -> tuple[Gone, str]:
        """End it, as :meth:`_Running.end`."""
        running, self._running = self._running, None
        return running.end(kill=kill, trace=trace) if running else (Gone(), "")

    def printed(self) -> str:
        """Return the end of what it has printed since it was started."""
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

    def _start(self) -> None:
        server = find_server(*self._preload)
        try:
            self._running = _Running(server)
        except (BrokenPipeError, ConnectionResetError):  # the server was idle for long, or was killed
            server.close()
            self._running = _Running(find_server(*self._preload))


def call_all(
    calls: Mapping[P, Any],
    seconds: float,
    *,
    limit: int = ANSWER_LIMIT,
    enough: Callable[[Mapping[P, Outcome]], float | None] | None = None,
) -> dict[P, Outcome]:
    """Call functions in several processes at once.

    Args:
        calls: By process, the function as ``module:name`` and the JSON data that it is called with, or what else
            :meth:`GuardedProcess.prepare` of the process makes these of.
        seconds: Time that each may take, from when it begins.
        limit: Bytes that an answer may have.
        enough: Told what has come of the calls so far; returns seconds after which the others are given up, or None
            when all of the time is theirs.

    Returns:
        One outcome per process.
    """
    with contextlib.ExitStack() as rest:
        entered = {process: rest.enter_context(contextlib.ExitStack()) for process in sorted(calls, key=id)}
        for process, stack in entered.items():  # in one order for all threads
            stack.enter_context(process)
        exchange = _Exchange(calls, seconds, limit, lambda process: entered[process].close())
        try:
            exchange.run(enough)
        except BaseException:
            for process in calls:  # an answer that comes yet must not be taken for that of the next call
                if process not in exchange.outcomes:
                    process.close()
            raise
        return exchange.outcomes


class _Call:
    """A call under way.

    Attributes:
        process: The process.
        data: What it has answered so far.
        seconds: Time that it may take from when it begins.
        until: When its time is up, on the monotonic clock.
    """

    def __init__(self, process: Any, seconds: float, until: float) -> None:
        self.process = process
        self.data = bytearray()
        self.seconds = seconds
        self.until = until


class _Exchange:
    """Calls to several processes: those under way by the descriptors on which they are answered, and the outcomes.

    Args:
        calls: As of :func:`call_all`, like the next two.
        seconds: Likewise.
        limit: Likewise.
        done: Called with each process that is called no more; others need not wait for those that are slow.
    """

    def __init__(self, calls: Mapping[P, Any], seconds: float, limit: int, done: Callable[[P], object]) -> None:
        self.outcomes: dict[Any, Outcome] = {}
        self._calls: Mapping[Any, Any] = calls
        self._seconds = seconds
        self._limit = limit
        self._done: Callable[[Any], object] = done
        self._began = time.monotonic()
        self._patience = float("inf")
        self._waiting: dict[int, _Call] = {}

    def run(self, enough: Callable[[Mapping[Any, Outcome]], float | None] | None) -> None:
        """Make the calls, and wait until all have been answered or given up."""
        self._begin(self._calls)
        import_wanted()
        while self._waiting:
            if enough and (patience := enough(self.outcomes)) is not None:
                self._patience = min(self._patience, time.monotonic() + patience)
            self._step()

    def _begin(self, processes: Iterable[GuardedProcess]) -> None:
        """Start the processes, and send each its call."""
        prepared = {process: process.prepare(self._calls[process]) for process in processes}
        for process, made in prepared.items():
            if isinstance(made, Outcome):
                self._finish(process, made)
            else:
                self._send(process, *made)

    def _send(self, process: GuardedProcess, function: str, payload: Any) -> None:
        running, now = process.running, time.monotonic()
        seconds = self._began + self._seconds - now
        call = _Call(process, seconds, now + (START_SECONDS if running.fresh else seconds))
        data = json.dumps({"function": function, "payload": payload, "begun": running.fresh}).encode()
        try:
            running.send(data, max(0.1, call.until - now))
        except OSError:
            self._hear(process, _died(process))
        else:
            self._waiting[running.calls.fileno()] = call

    def _hear(self, process: GuardedProcess, outcome: Outcome) -> None:
        """Take what came of a call: that is all, unless it is made once more in the time that is left."""
        again = process.heard(self._calls[process], outcome)
        if again and time.monotonic() < self._began + self._seconds:
            self._begin([process])
        else:
            self._finish(process, outcome)

    def _finish(self, process: GuardedProcess, outcome: Outcome) -> None:
        self.outcomes[process] = outcome
        self._done(process)

    def _step(self) -> None:
        """Wait for something to come, or for the time of a call to be up, and take it."""
        poll = select.poll()
        outputs = {call.process.running.output: call.process.running for call in self._waiting.values()}
        outputs.pop(-1, None)
        for descriptor in (*self._waiting, *outputs):
            poll.register(descriptor, select.POLLIN)
        until = min(self._patience, *(call.until for call in self._waiting.values()))
        for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
            if descriptor in outputs:
                outputs[descriptor].drain()
                continue
            call = self._waiting[descriptor]
            if (outcome := self._receive(call)) is not None:
                del self._waiting[descriptor]
                self._hear(call.process, outcome)
        now = time.monotonic()
        for descriptor, call in tuple(self._waiting.items()):
            if min(call.until, self._patience) <= now:
                del self._waiting[descriptor]
                self._hear(call.process, self._too_late(call.process))

    def _receive(self, call: _Call) -> Outcome | None:
        """Take some bytes; the outcome once all are there."""
        process, data = call.process, call.data
        chunk = process.running.receive()
        if not chunk:
            return _died(process)
        data += chunk
        while len(data) >= HEADER.size:
            kind, size = HEADER.unpack_from(data)
            if kind == BEGUN and process.running.fresh:
                del data[: HEADER.size]
                process.running.fresh, process.running.pid = False, size
                call.until = time.monotonic() + call.seconds
            elif kind != ANSWER:
                return _refuse(process, NO_ANSWER)
            elif size > self._limit:
                largest = f"an answer may have {self._limit / 1e6:.1f} MB"
                return _refuse(process, f"it answered {size / 1e6:.1f} MB, and {largest}")
            elif len(data) < HEADER.size + size:
                return None
            else:
                return _understood(process, data[HEADER.size : HEADER.size + size])
        return None

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
        return _refuse(process, NO_ANSWER)


def _refuse(process: GuardedProcess, reason: str) -> Outcome:
    _, printed = process.end(kill=True)
    return Outcome(fault="contract", reason=reason, details=printed)


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


@tidy_at_exit  # without the lock, which a thread that is left behind may hold
def _close_sockets() -> None:
    for process in list(_processes):
        process.forget()


@tidy_in_child
def _forget_all() -> None:
    for process in list(_processes):
        process.unlock()
        process.forget()
