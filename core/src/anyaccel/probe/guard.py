"""The calling side of guarded calls: functions that may hang, crash or exit, run where that costs nothing.

The caller never forks: it may have threads, or a device open. It starts one fresh interpreter, which forks a process
for each :class:`GuardedProcess` and kills what that leaves behind.
"""

from __future__ import annotations

import _socket
import atexit
import contextlib
import json
import select
import time
from _thread import RLock, allocate_lock
from _weakrefset import WeakSet
from collections.abc import Callable, Mapping
from itertools import count

from anyaccel.linux.fork import renew_in_child, tidy_in_child
from anyaccel.model import Value
from anyaccel.probe import ahead
from anyaccel.probe.protocol import ANSWER, BEGUN, CALL, CHUNK, DESCRIPTOR, HEADER, IDLE_SECONDS, PACKET_LIMIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

START_SECONDS = 20.0
"""Time that processes may take to start beside their calls, on a machine under load."""
ANSWER_LIMIT = 8 << 20
"""Bytes that an answer may have."""
END_SECONDS = 1.0
"""How long a process may live on that has closed its socket, and an interpreter that is to end."""
HEAR_SECONDS = 10.0
"""How long the interpreter may take to answer, on a machine under load."""


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


class Guard:
    """An interpreter that forks guarded processes. Every method may be called by any thread.

    Args:
        preload: Names of modules that the processes need, imported once for all of them.

    Raises:
        OSError: When no interpreter can be started.
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._lock = RLock()
        self._numbers = count(1)
        self._said: dict[int, dict[str, Any]] = {}
        self._told: dict[int, str] = {}
        self._interpreter = ahead.take(*preload)
        self._control = _socket.socket(fileno=self._interpreter.control)

    def fork(self) -> tuple[int, _socket.socket]:
        """Have a process forked; its number, and the socket on which it answers calls.

        Raises:
            OSError: When the interpreter has ended.
        """
        ours, theirs = _socket.socketpair()
        with contextlib.closing(theirs), self._lock:
            number = next(self._numbers)
            try:
                self._send({"start": number}, theirs.fileno())
            except OSError:
                ours.close()
                raise
        return number, ours

    def end(self, number: int, *, kill: bool, trace: bool = False) -> tuple[int | None, str]:
        """Take leave of a process.

        Args:
            number: The process, of which nothing is known afterwards.
            kill: Whether it may live; otherwise it has closed its socket.
            trace: Whether it prints where it is before it is killed.

        Returns:
            Its exit status, None where that cannot be told in time, and the end of what it has printed.
        """
        with self._lock:
            if kill:
                self._say({"end": number, "trace": trace})
            self._hear(lambda: number in self._said, HEAR_SECONDS if kill else END_SECONDS)
            if number not in self._said and not kill:  # it has closed its socket, and lives
                return self.end(number, kill=True)
            said = self._said.pop(number, {})
        return said.get("status"), said.get("printed", "")

    def printed(self, number: int) -> str:
        """The end of what a process has printed so far."""
        with self._lock:
            self._told.pop(number, None)
            self._say({"tell": number})
            self._hear(lambda: number in self._told or number in self._said, HEAR_SECONDS)
            return self._told.pop(number, "") or self._said.get(number, {}).get("printed", "")

    def close(self, *, wait: bool = True) -> None:
        """End the interpreter and every process that it forked."""
        with self._lock:
            self._control.close()
        if wait:
            self._interpreter.wait(END_SECONDS)  # not for what is stuck in the kernel

    def forget(self) -> None:
        """Leave it alone: we are a fork of the process that it belongs to."""
        self._lock = RLock()
        self._control.close()

    def _send(self, message: Mapping[str, int], descriptor: int | None = None) -> None:
        carried = [] if descriptor is None else [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, DESCRIPTOR.pack(descriptor))]
        self._control.sendmsg([json.dumps(message).encode()], carried)

    def _say(self, message: Mapping[str, int]) -> None:
        with contextlib.suppress(OSError):  # it has ended, and all that it forked with it
            self._send(message)

    def _hear(self, enough: Callable[[], bool], seconds: float) -> None:
        """Take what the interpreter says until that is enough, or the time is over."""
        deadline = time.monotonic() + seconds
        while not enough():
            try:
                if not _readable(self._control, deadline - time.monotonic()):
                    return
                data = self._control.recv(PACKET_LIMIT)
            except (OSError, ValueError):  # it has ended, or we have given it up
                return
            if not data:
                return
            message = json.loads(data)
            if "ended" in message:
                self._said[message["ended"]] = message
            else:
                self._told[message["told"]] = message["printed"]


class GuardedProcess:
    """A process for guarded calls, which keeps its state from one call to the next.

    The first call starts it, and so does the next one after its end. One call runs at a time: whoever calls enters the
    process before, and other threads wait.

    Args:
        preload: Names of modules that its interpreter imports.

    Attributes:
        starts: How often it was started.
    """

    def __init__(self, *preload: str) -> None:
        self.starts = 0
        self.fresh = False
        self._preload = preload
        self._guard: Guard | None = None
        self._lock = RLock()
        self._number = 0
        self._calls: _socket.socket | None = None
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
        return self._calls is not None and time.monotonic() - self._used < IDLE_SECONDS - 10

    def start(self) -> None:
        """Start it unless it lives. Called, like the next five, by who has entered it, or alone has it.

        Raises:
            OSError: When no process can be started.
        """
        if self.lives:
            return
        self.close()
        self._guard = guard(*self._preload)
        try:
            self._number, self._calls = self._guard.fork()
        except OSError:  # the interpreter was idle for long, or somebody has killed it
            drop(self._guard)
            self._guard = guard(*self._preload)
            self._number, self._calls = self._guard.fork()
        self._used = time.monotonic()
        self.starts += 1
        self.fresh = True

    def send(self, data: bytes, seconds: float) -> None:
        """Send a call.

        Raises:
            OSError: When the process has gone, or does not take it in time.
        """
        assert self._calls is not None  # noqa: S101
        self._used = time.monotonic()
        data = HEADER.pack(CALL, len(data)) + data
        try:  # nearly always there is room for all of it, and nothing to wait for
            sent = self._calls.send(data, _socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._calls.settimeout(seconds)
            self._calls.sendall(data[sent:])

    def fileno(self) -> int:
        """Descriptor of the socket on which it answers."""
        assert self._calls is not None  # noqa: S101
        return self._calls.fileno()

    def receive(self) -> bytes:
        """Some bytes of its answer, at least one; nothing when it has gone."""
        assert self._calls is not None  # noqa: S101
        self._used = time.monotonic()
        try:
            return self._calls.recv(CHUNK)
        except OSError:
            return b""

    def ended(self, *, kill: bool, trace: bool = False) -> tuple[int | None, str]:
        """Take leave of it: its exit status where that is known, and the end of what it has printed."""
        calls, self._calls = self._calls, None
        if calls is None or self._guard is None:
            return None, ""
        calls.close()
        return self._guard.end(self._number, kill=kill, trace=trace)

    def printed(self) -> str:
        """The end of what it has printed since it was started."""
        with self._lock:
            return self._guard.printed(self._number) if self._guard and self._calls is not None else ""

    def close(self) -> None:
        """End it."""
        with self._lock:
            self.ended(kill=True)

    def forget(self) -> None:
        """Take no further notice of it: its interpreter has ended, or belongs to the process that we are a fork of."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()

    def unlock(self) -> None:
        """Make the lock anew: we are a fork, and another thread of the parent may have held it."""
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
            more = exchange.step()
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
            descriptor = process.fileno()
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
        """Wait for something to come, or for somebody's time to be up; what came of it."""
        poll = select.poll()
        for descriptor in self.waiting:
            poll.register(descriptor, select.POLLIN)
        until = min(self._patience, *self._deadlines.values())
        outcomes = {}
        for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
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
            if (kind, size) == (BEGUN, 0) and process.fresh:
                del data[: HEADER.size]
                process.fresh = False
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
        _, printed = process.ended(kill=True)
        reason = f"it answered {size / 1e6:.1f} MB, and an answer may have {self._limit / 1e6:.1f} MB"
        return Outcome(fault="contract", reason=reason, details=printed)

    def _too_late(self, process: GuardedProcess) -> Outcome:
        _, printed = process.ended(kill=True, trace=True)
        seconds = min(self._seconds, time.monotonic() - self._began)
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
    _, printed = process.ended(kill=True)
    return Outcome(fault="contract", reason="its process sent what is no answer", details=printed)


def _died(process: GuardedProcess) -> Outcome:
    status, printed = process.ended(kill=False)
    from anyaccel.linux.process import describe_end

    where = _line(printed)
    reason = f"its process {describe_end(status)} before it answered" + (f" (it was at {where})" if where else "")
    return Outcome(fault="died", reason=reason, details=printed)


def _line(printed: str) -> str:
    """Where a process was, by the traceback that it printed last; empty when it printed none."""
    import re

    for thread in reversed(printed.split("most recent call first")):
        if "forkserver.py" in thread and (found := re.search(r'File "([^"\n]+)", line (\d+) in (\S+)', thread)):
            return f"{found[1]}:{found[2]} in {found[3]}"
    return ""


def _readable(control: _socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


_guards: dict[tuple[str, ...], Guard] = {}
at_exit: list[object] = []
"""What this module has registered to be called at exit: at most one function."""
_processes: WeakSet[GuardedProcess] = WeakSet()
_lock = renew_in_child(allocate_lock())


def guard(*preload: str) -> Guard:
    """The interpreter of this process that has imported these modules; started when there is none.

    Ask for it early: it takes as long to start as what the caller may do meanwhile.

    Raises:
        OSError: When it cannot be started.
    """
    with _lock:
        if preload not in _guards:
            _guards[preload] = Guard(preload)
            if not at_exit:
                at_exit.append(_end)
                atexit.register(_end)
        return _guards[preload]


def drop(used: Guard) -> None:
    """End an interpreter, and use it no more."""
    with _lock:
        for preload in [preload for preload, each in _guards.items() if each is used]:
            del _guards[preload]
    used.close()


def close_all(*, wait: bool = True) -> None:
    """End all interpreters of this process and all that they forked. The next call starts them again.

    Args:
        wait: Whether to wait until they have ended.
    """
    for process in list(_processes):
        with process:
            process.forget()
    with _lock:
        guards = list(_guards.values())
        _guards.clear()
    for each in guards:
        each.close(wait=wait)


def _end() -> None:
    """End everything at exit, without waiting for the calls of other threads."""
    for process in list(_processes):
        process.forget()
    for each in list(_guards.values()):
        each.close()


@tidy_in_child
def _forget_all() -> None:
    for process in list(_processes):
        process.unlock()
        process.forget()
    while _guards:
        _guards.popitem()[1].forget()
