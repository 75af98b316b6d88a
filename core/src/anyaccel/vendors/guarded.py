"""Guarded calls: functions that may hang, crash or exit run in another process, one after the other.

The caller never forks, since it may have threads or an open device. A fork server forks one process for each
:class:`GuardedProcess`, and kills whatever that process leaves behind. The process runs :func:`serve`, with a parent of
its own, since a vendor's code may signal its parent. Calls and answers are lines of JSON on a socket; before the first
answer, the process sends a line with its process id.
"""

from __future__ import annotations

import _socket
import contextlib
import json
import os
import select
import sys
import time
from _thread import RLock
from _weakrefset import WeakSet
from collections.abc import Callable, Mapping

from anyaccel.forkserver.client import ForkServer, Gone
from anyaccel.linux import tidy_in_child
from anyaccel.model import Value
from anyaccel.vendors import IDLE_SECONDS, find_server, work_meanwhile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self, TypeVar

    P = TypeVar("P", bound="GuardedProcess")

TARGET = "anyaccel.vendors.guarded:serve"
START_SECONDS = 20.0
"""Time for the start of a process, beside its call, on a machine under load."""
ANSWER_LIMIT = 8 << 20
"""Most bytes of an answer."""
PRINTED_LIMIT = 8192
"""How many of the last printed bytes of a process are kept."""
CHUNK = 1 << 16
"""Bytes that are received at once."""
END_SECONDS = 1.0
"""How long a process may live after it has closed its socket."""
HEAR_SECONDS = 10.0
"""How long the fork server may take to report the end of a process, on a machine under load."""
TRACE_SECONDS = 0.5
"""How long a process may take to print its traceback, and to end."""
BUSY_SECONDS = 5.0
"""The same for a process that only waits for a processor."""
ABORTED = "Fatal Python error: Aborted\n\n"
"""First lines of that output, which are no part of the traceback."""
NO_ANSWER = "its process sent an invalid answer"
INTERRUPTED = "a handler of a signal interrupts a call of its process in this thread; ask it after the handler"


class Outcome(Value):
    """The outcome of a guarded call.

    Attributes:
        value: Return value of the function as JSON data; None when the call failed.
        fault: ``raised``, ``timeout``, ``died`` or ``contract``; empty when the function returned.
        reason: Why the call failed.
        details: Traceback, and the end of the printed text.
    """

    value: Any = None
    fault: str = ""
    reason: str = ""
    details: str = ""


class _End:
    """What the fork server tells of a process. It does not keep the process: a lost one ends at once.

    Attributes:
        gone: The end of the process; None until known.
    """

    def __init__(self) -> None:
        self.gone: Gone | None = None

    def ended(self, gone: Gone) -> None:
        """Store the end of the process."""
        self.gone = gone

    def on_stuck(self, reason: str) -> None:
        """Store that the process ignores SIGKILL."""
        self.gone = Gone(reason=reason)


class _Running:
    """A process, from its request to its end, with the present call.

    The process ends once nothing refers to this object, so that no interrupt and no thread can lose it.

    Attributes:
        calls: The socket for calls and answers.
        output: The pipe with printed text; -1 once the pipe is closed.
        pid: Process id; 0 until the process begins its first call.
        used: Time of the last message, on the monotonic clock.
        answer: The answer of the present call, as far as received.
        seconds: Time limit of the present call, from its begin.
        until: Deadline of the present call, on the monotonic clock.

    Raises:
        OSError: When the fork server has ended, or no descriptor is left.
    """

    def __init__(self, server: ForkServer) -> None:
        self.pid = 0
        self.output = -1
        self.used = time.monotonic()
        self.answer = bytearray()
        self.seconds = self.until = 0.0
        self._server = server
        self._printed = bytearray()
        self._end = _End()
        self.calls, theirs = _socket.socketpair()
        with contextlib.closing(theirs):
            self.output, output = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                self._number = server.spawn(self._end, TARGET, (theirs.fileno(), output), alone=True)
            finally:
                os.close(output)

    def __del__(self) -> None:
        if hasattr(self, "calls"):  # unless no descriptor was left
            self.release()

    def send(self, function: str, payload: Any, seconds: float) -> None:
        """Send a call.

        Raises:
            OSError: When the process has gone, or does not take it in time.
        """
        self.used = time.monotonic()
        self.answer, self.seconds = bytearray(), seconds
        # The time limit of a new process begins when it says so: an import may take long on a busy machine.
        self.until = self.used + (seconds if self.pid else START_SECONDS)
        call = json.dumps({"function": function, "payload": payload, "fresh": not self.pid})
        self.calls.settimeout(max(0.1, self.until - self.used))  # at least one attempt
        self.calls.sendall(call.encode() + b"\n")

    def receive(self) -> bool:
        """Receive a part of the answer; return False when the process has gone."""
        self.used = time.monotonic()
        try:
            chunk = self.calls.recv(CHUNK)
        except OSError:
            return False
        self.answer += chunk
        if not self.pid and (end := self.answer.find(b"\n")) >= 0:
            self.pid = int(self.answer[:end])
            self.until = self.used + self.seconds
            del self.answer[: end + 1]
        return bool(chunk)

    def drain(self) -> None:
        """Read printed text from the pipe, at most 1 MiB at once."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16 if self.output >= 0 else 0):  # bounded: a plug-in may print faster than this reads
                chunk = os.read(self.output, CHUNK)
                if not chunk:
                    self._close_output()
                    break
                self._printed += chunk
                del self._printed[:-PRINTED_LIMIT]

    def printed(self) -> str:
        """Return the end of the printed text."""
        self.drain()
        return self._printed.decode(errors="replace")

    def end(self, *, kill: bool, trace: bool) -> tuple[Gone, str]:
        """End the process; return how it ended, and the end of the printed text.

        Args:
            kill: Whether to kill the process at once; False for a process that has closed its socket.
            trace: Whether to print the Python traceback of the process first.
        """
        self.calls.close()
        if trace:
            self._abort()
        self._server.stop(self._number, 0.0 if kill else END_SECONDS)
        self._wait(HEAR_SECONDS)
        printed = self.printed()
        self.release()
        return self._end.gone or Gone(), printed

    def release(self) -> None:
        """Close the descriptors of the process."""
        self.calls.close()
        if self.output >= 0:
            self._close_output()

    def _close_output(self, close: Callable[[int], None] = os.close) -> None:
        output, self.output = self.output, -1  # first: a fork in between would close the pipe a second time
        close(output)  # "os" may have gone when the interpreter ends

    def _abort(self) -> None:
        from anyaccel.linux.process import state

        self._server.stop(self._number, BUSY_SECONDS, by=6)  # at SIGABRT, faulthandler prints the traceback
        self._wait(TRACE_SECONDS)
        if self._end.gone is None and state(self.pid) == "R":
            self._wait(BUSY_SECONDS)

    def _wait(self, seconds: float) -> None:
        """Wait until the end is known, the fork server has gone, or the time is up."""
        deadline = time.monotonic() + seconds
        with self._server.hearing:
            while self._end.gone is None and (left := deadline - time.monotonic()) > 0:
                poll = select.poll()
                try:
                    for descriptor in (self._server.fileno(), *([self.output] if self.output >= 0 else ())):
                        poll.register(descriptor, select.POLLIN)
                    poll.poll(left * 1000 + 1)
                    if not self._server.hear():  # the fork server has ended, and its processes with it
                        self._server.close()
                        return
                except (OSError, ValueError):  # it was closed meanwhile
                    return
                self.drain()


class GuardedProcess:
    """A process for guarded calls that keeps its state between calls.

    A call starts the process if none runs. One call runs at a time: a caller enters the process first, and other
    threads wait. A handler of a signal that interrupts a call gets no answer: it would be that of the call.

    Args:
        preload: Names of modules that the fork server imports.

    Attributes:
        exchange: What calls the process now, or was interrupted while it did; None between calls.
    """

    def __init__(self, *preload: str) -> None:
        self.exchange: _Exchange | None = None
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
        """The running process."""
        assert self._running is not None  # noqa: S101
        return self._running

    def prepare(self, call: Any) -> tuple[str, Any] | Outcome:
        """Start the process if needed, and return the function and payload of a call.

        Args:
            call: The value for this process in the argument of :func:`call_all`.

        Returns:
            The function as ``module:name`` and its payload as JSON data; or an outcome where the call cannot be made.
        """
        # Ten seconds early: the process could end by itself between this check and the call.
        if self._running is None or time.monotonic() - self._running.used > IDLE_SECONDS - 10:
            self.close()
            try:
                self._start()
            except OSError as error:  # no descriptor or no process is left
                return Outcome(fault="died", reason=f"its process cannot be started: {error}")
        function, payload = call
        return function, payload

    def note_outcome(self, call: Any, outcome: Outcome) -> bool:  # noqa: ARG002 - for subclasses
        """Handle the outcome of a call; return whether to repeat the call."""
        return False

    def end(self, *, kill: bool, trace: bool = False) -> tuple[Gone, str]:
        """End the process; see :meth:`_Running.end`."""
        running = self._running
        if running is None:
            return Gone(), ""
        told = running.end(kill=kill, trace=trace)
        if self._running is running:  # last: after an interrupt, the next call ends the process once more
            self._running = None
        return told

    def printed(self) -> str:
        """Return the end of the text that the process has printed."""
        with self._lock:
            return self._running.printed() if self._running else ""

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self.end(kill=True)

    def release(self) -> None:
        """Close the descriptors: the fork server has ended, or this process is a fork of its owner."""
        running, self._running = self._running, None
        if running is not None:
            running.release()

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the lock is a new one, as another thread may have held the old."""
        self._lock = RLock()
        self.exchange = None
        self.release()

    def _start(self) -> None:
        server = find_server(*self._preload)
        try:
            self._running = _Running(server)
        except (BrokenPipeError, ConnectionResetError):  # the fork server ended after a minute, or was killed
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
        calls: By process, the function as ``module:name`` and its payload as JSON data, or another value that
            :meth:`GuardedProcess.prepare` of the process turns into these.
        seconds: Time limit of each call, from its begin.
        limit: Most bytes of an answer.
        enough: Gets the outcomes so far; returns seconds after which the remaining calls are given up, or None for the
            whole time limit.

    Returns:
        One outcome per process.
    """
    with contextlib.ExitStack() as rest:
        entered = {process: rest.enter_context(contextlib.ExitStack()) for process in sorted(calls, key=id)}
        for process, stack in entered.items():  # in the same order in every thread: no deadlock
            stack.enter_context(process)
        exchange = _Exchange(calls, seconds, limit, entered)
        try:
            exchange.run(enough)
        except BaseException:
            exchange.over = True  # first: a second interrupt may come while processes are closed
            for process in calls:
                if process.exchange is exchange:
                    process.close()
            raise
        return exchange.outcomes


class _Exchange:
    """Calls to several processes, with the outcomes so far.

    Attributes:
        outcomes: The outcomes so far.
        over: Whether the calls were given up; their answers may still come.

    Args:
        calls: See :func:`call_all`.
        seconds: See :func:`call_all`.
        limit: See :func:`call_all`.
        entered: Leaves each process after its last call, so that other threads need not wait for slow processes.
    """

    def __init__(
        self, calls: Mapping[P, Any], seconds: float, limit: int, entered: Mapping[P, contextlib.ExitStack]
    ) -> None:
        self.outcomes: dict[Any, Outcome] = {}
        self.over = False
        self._calls: Mapping[Any, Any] = calls
        self._seconds = seconds
        self._limit = limit
        self._entered: Mapping[Any, contextlib.ExitStack] = entered
        self._began = time.monotonic()
        self._patience = float("inf")
        self._waiting: dict[int, Any] = {}  # processes by the descriptor of their calls

    def run(self, enough: Callable[[Mapping[Any, Outcome]], float | None] | None) -> None:
        """Make the calls, and wait until each is answered or given up."""
        for process in self._calls:
            self._begin(process)
        work_meanwhile()
        while self._waiting:
            if enough and (patience := enough(self.outcomes)) is not None:
                self._patience = min(self._patience, time.monotonic() + patience)
            self._step()

    def _begin(self, process: GuardedProcess) -> None:
        """Start a process if it does not run, and send its call."""
        if process.exchange and process.exchange is not self:
            if not process.exchange.over:
                self._finish(process, Outcome(fault="raised", reason=INTERRUPTED))
                return
            process.close()  # its late answer must not be taken for the answer of this call
        process.exchange = self
        made = process.prepare(self._calls[process])
        if isinstance(made, Outcome):
            self._finish(process, made)
            return
        try:
            process.running.send(*made, self._began + self._seconds - time.monotonic())
        except OSError:
            self._take_outcome(process, _died(process))
        else:
            self._waiting[process.running.calls.fileno()] = process

    def _take_outcome(self, process: GuardedProcess, outcome: Outcome) -> None:
        """Store the outcome of a call, or repeat the call if time is left."""
        again = process.note_outcome(self._calls[process], outcome)
        if again and time.monotonic() < self._began + self._seconds:  # a repeated call has no time of its own
            self._begin(process)
        else:
            self._finish(process, outcome)

    def _finish(self, process: GuardedProcess, outcome: Outcome) -> None:
        self.outcomes[process] = outcome
        if process.exchange is self:
            process.exchange = None
        self._entered[process].close()

    def _step(self) -> None:
        """Wait for a message or a deadline, and handle it."""
        poll = select.poll()
        running = [process.running for process in self._waiting.values()]
        outputs = {each.output: each for each in running if each.output >= 0}
        for descriptor in (*self._waiting, *outputs):
            poll.register(descriptor, select.POLLIN)  # printed text too: a full pipe would stop the process
        until = min(self._patience, *(each.until for each in running))
        for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
            if descriptor in outputs:
                outputs[descriptor].drain()
            elif (outcome := self._receive(self._waiting[descriptor])) is not None:
                self._take_outcome(self._waiting.pop(descriptor), outcome)
        now = time.monotonic()
        for descriptor, process in tuple(self._waiting.items()):
            if min(process.running.until, self._patience) <= now:
                del self._waiting[descriptor]
                self._take_outcome(process, self._too_late(process))

    def _receive(self, process: GuardedProcess) -> Outcome | None:
        """Receive a part of an answer; return the outcome once the answer is complete."""
        running = process.running
        if not running.receive():
            return _died(process)
        if len(running.answer) > self._limit:
            return _refuse(process, f"its answer has more than {self._limit / 1e6:.1f} MB")
        return _understand(process, running.answer) if running.answer.endswith(b"\n") else None

    def _too_late(self, process: GuardedProcess) -> Outcome:
        _, printed = process.end(kill=True, trace=True)
        seconds = min(self._seconds, time.monotonic() - self._began)
        printed = printed.replace(ABORTED, "")
        where = _find_place(printed)
        reason = f"it did not answer within {seconds:.3g} s" + (f" (it was at {where})" if where else "")
        return Outcome(fault="timeout", reason=reason, details=printed)


def _understand(process: GuardedProcess, data: bytearray) -> Outcome:
    try:
        answer = json.loads(data)
        if "fault" not in answer:
            return Outcome(value=answer["value"])
        fault = answer["fault"]
        return Outcome(
            fault="raised", reason=str(fault["reason"]), details=fault["details"] + process.running.printed()
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        return _refuse(process, NO_ANSWER)


def _refuse(process: GuardedProcess, reason: str) -> Outcome:
    _, printed = process.end(kill=True)
    return Outcome(fault="contract", reason=reason, details=printed)


def _died(process: GuardedProcess) -> Outcome:
    gone, printed = process.end(kill=False)
    from anyaccel.linux.process import describe_end

    where = _find_place(printed)
    if gone.forked:
        reason = f"its process {describe_end(gone.status)} before it answered"
    else:
        reason = f"its process could not be started: {gone.reason}"
    return Outcome(fault="died", reason=reason + (f" (it was at {where})" if where else ""), details=printed)


def _find_place(printed: str) -> str:
    """Return the place in the last traceback that a process printed; empty without a traceback."""
    import re

    # faulthandler prints all threads; the main thread, which runs the hook, comes last.
    for thread in reversed(printed.split("most recent call first")):
        if "guarded.py" in thread and (found := re.search(r'File "([^"\n]+)", line (\d+) in (\S+)', thread)):
            return f"{found[1]}:{found[2]} in {found[3]}"
    return ""


_processes: WeakSet[GuardedProcess] = WeakSet()


@tidy_in_child
def _release_all() -> None:
    for process in list(_processes):
        process.abandon()


def serve(descriptors: list[int], _: object) -> None:
    """Answer calls until the caller has gone, or makes no call for a minute; the target of the fork server.

    Args:
        descriptors: The socket of the calls, and the pipe for printed text.
    """
    import faulthandler  # late: the calling side, which shares this module, needs neither

    from anyaccel.linux.descriptors import list_descriptors
    from anyaccel.linux.process import set_name

    calls, output = descriptors
    os.set_blocking(output, True)
    for stream, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(descriptor, stream)
    # A device's words need not be text; printing them never fails, as on standard error.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    # Descriptors of other processes of the fork server are no business of a vendor's code.
    os.closerange(3, calls)
    os.closerange(calls + 1, max(list_descriptors()) + 1)
    set_name("accel-vendor")
    faulthandler.enable(2)  # the caller sends SIGABRT to a process that hangs, for the traceback
    _answer_calls(_socket.socket(fileno=calls))


def _answer_calls(calls: _socket.socket) -> None:
    import struct

    # A timeout of the kernel: Python's own would make the socket non-blocking, and sendall() with it.
    calls.setsockopt(_socket.SOL_SOCKET, _socket.SO_RCVTIMEO, struct.pack("ll", int(IDLE_SECONDS), 0))
    lines = open(calls.fileno(), "rb", closefd=False)  # noqa: SIM115 - open until the process ends
    while (line := lines.readline()).endswith(b"\n"):  # else the caller has gone, or sends nothing for a minute
        call = json.loads(line)
        me = os.getpid()
        if call["fresh"]:  # the start of the process took a while; the time limit of the call begins now
            calls.sendall(b"%d\n" % me)
        answer = _answer(call)
        if os.getpid() != me:  # the import of a plug-in forked and returned twice
            os._exit(0)
        with contextlib.suppress(Exception):  # a plug-in may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        calls.sendall(answer + b"\n")


def _answer(call: dict[str, Any]) -> bytes:
    try:
        module, _, name = call["function"].partition(":")
        __import__(module)  # a method of importlib would have to be imported first
        value = getattr(sys.modules[module], name)(call["payload"])
        return json.dumps({"value": value}).encode()
    except BaseException as error:  # noqa: BLE001 - SystemExit of a vendor's tool is no reason to vanish
        import traceback

        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        fault = {"kind": "raised", "reason": reason, "details": traceback.format_exc()}
        return json.dumps({"fault": fault}).encode()
