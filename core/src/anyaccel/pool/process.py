"""One worker process of a pool: what it runs, what it holds, its channel, and when it is to end."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from anyaccel.errors import BrokenWorkerError, WorkerError, WorkerStartError
from anyaccel.launcher.usage import Usage
from anyaccel.ledger import mark as marks
from anyaccel.model import Allocation, Extent, Inventory
from anyaccel.pool.call import Call, Options
from anyaccel.pool.channel import Kind, Message, Spin, receive, send
from anyaccel.pool.forkserver import client
from anyaccel.pool.forkserver.client import Gone
from anyaccel.pool.launching import CPU, Preparation, outputs
from anyaccel.pool.payload import Pickled, arguments_of
from anyaccel.pool.proc import ending
from anyaccel.pool.reactor import Timer, reactor

if TYPE_CHECKING:
    from anyaccel.ledger import Lease
    from anyaccel.pool.logs import Logs

QUICK_SECONDS = 0.005
"""About so much work stands in line in a channel; a worker that does not answer for so long is looked after."""

MOST_QUEUED, MOST_QUEUED_BYTES = 32, 1 << 12
"""So many calls at most stand in line in a channel, and larger ones do not: together they find room in its buffer."""

MOST_KEPT_BYTES = 1 << 24
"""A process keeps functions of so many bytes at most; others go along with each of their calls."""

_GONE = {errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN}
"""The other end has been closed, or ours has since the end was noticed."""


class Held:
    """Devices that are held until they are given back.

    Args:
        allocation: What is held.
        lease: The lease; None where nothing is, since the request fell back to the CPU.
        on_release: Called with what the lease held, by name in the ledger, once it has been given back.
        private: Whether other processes are not to see the lease.
        usage: Its line of the journal; None where there is to be none.
    """

    __slots__ = ("_lease", "_on_release", "_private", "_usage", "allocation")

    def __init__(
        self,
        allocation: Allocation,
        lease: Lease | None,
        on_release: Callable[[Mapping[str, Extent]], object],
        *,
        private: bool = False,
        usage: Usage | None = None,
    ) -> None:
        self.allocation = allocation
        self._usage = usage
        self._lease = lease
        self._on_release = on_release
        self._private = private

    @property
    def lease(self) -> str:
        """Identity of the lease, as other processes see it; empty when they do not."""
        return self._lease.id if self._lease and not self._private else ""

    @property
    def devices(self) -> Mapping[str, Extent]:
        """What is held, by name in the ledger."""
        return self._lease.devices if self._lease else {}

    @property
    def mark(self) -> marks.Mark:
        """Mark that the lease names; empty when there is none."""
        return self._lease.mark if self._lease else ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that carry the lease."""
        return self._lease.fds if self._lease else ()

    def quarantine(self, reason: str) -> None:
        """Say to others why the devices are kept although nobody uses them."""
        if self._lease:
            self._lease.quarantine(reason)

    def release(self) -> None:
        """Give them back; does nothing the second time."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
            self._on_release(lease.devices)
            if self._usage is not None:
                self._usage.ended(added_up=True)


class Owner(Protocol):
    """The pool of a worker process.

    Attributes:
        lock: Held over every look at who waits and who runs.
        preparation: What all its workers have in common.
        preload: Modules that the fork server imports.
        max_workers: Processes at the same time, or None.
        members: Its processes.
        grace: Seconds between asking a process to end and killing it.
        idle: Seconds after which an unused process gives its devices back.
        confined: Whether processes will be confined to their devices.
        feeds: Whether kept processes are given calls that wait.
        logs: Where the output of each call goes, or None for where ours goes.
    """

    lock: threading.Lock
    preparation: Preparation
    preload: tuple[str, ...]
    max_workers: int | None
    members: set[WorkerProcess]
    grace: float
    idle: float
    confined: bool
    feeds: bool
    logs: Logs | None

    @property
    def inventory(self) -> Inventory:  # pyright: ignore[reportReturnType] - a protocol's methods have no body
        """The machine."""

    def check_open(self) -> None:
        """Raise what keeps a call from being taken."""

    def join(self, call: Call, held: Held | None) -> WorkerProcess:  # pyright: ignore[reportReturnType]
        """Make the process that will run a call first; called with the lock held."""

    def use(self, server: client.ForkServer, *, ahead: bool) -> None:
        """Say that a process came from a fork server, and whether another one will be needed."""

    def settle(self) -> None:
        """Once closed and out of work, let the processes go."""

    def on_answer(self, member: WorkerProcess, message: Message) -> None:
        """A process has answered."""

    def on_broken(self, member: WorkerProcess, message: Message) -> None:
        """A process could not be set up."""

    def on_timeout(self, member: WorkerProcess, call: Call) -> None:
        """The time of a call is up."""

    def on_stuck(self, member: WorkerProcess, reason: str) -> None:
        """Something of a process ignores SIGKILL."""

    def on_gone(self, member: WorkerProcess, gone: Gone) -> None:
        """A process and all that it started have left the kernel."""


class WorkerProcess:
    """A worker process of a pool, from the decision to fork it until its devices have gone back.

    Attributes:
        owner: The pool.
        options: How the calls that it runs are to be run.
        held: The devices that it holds, or None for the CPU alone.
        ids: Ids of these devices.
        allocation: What it holds, with what enforces that once it is known.
        mark: What it and all that it starts carry; empty before it has been told.
        call: The call that it runs, or None.
        feeding: Held by whoever gives it a call, from the choice to the sending: calls arrive in the order of choice.
        queued: Calls that stand behind that one in its channel: it begins with them without asking.
        pace: Seconds that an answer has taken lately.
        heard: Time of ``time.monotonic()`` of its last answer, or of the first call since it had none.
        calls: Calls that it was given so far.
        ending: Whether it gets no more calls.
        stopped: Whether we have ended it, whatever it was doing.
        proven: Whether it has answered at all.
        unsent: Numbers of calls that could not even be sent, since it had gone.
        fault: Why nothing that it says is believed any more, or an empty string.
        last: Number of the call that it has answered last.
        notices: What it has to say before it answers, in order.
        rested: Time of ``time.monotonic()`` since which it has no call.
    """

    __slots__ = (
        "_channel", "_deliveries", "_end", "_gone", "_kept", "_kept_bytes", "_known", "_open", "_reading", "_spin",
        "_stop", "allocation", "call", "calls", "ending", "fault", "feeding", "heard", "held", "ids", "last", "mark",
        "notices", "options", "owner", "pace", "proven", "queued", "rested", "stopped", "stuck", "timer", "unsent",
    )  # fmt: skip

    def __init__(self, owner: Owner, options: Options, held: Held | None, call: Call | None) -> None:
        self.owner = owner
        self.options = options
        self.held = held
        self.allocation = CPU if held is None else held.allocation
        self.ids = frozenset(device.id for device in self.allocation.devices)
        self.mark: marks.Mark = ()
        self.call = call
        self.queued: deque[Call] = deque()
        self.pace = float("inf")
        self.feeding = threading.Lock()
        self.heard = 0.0
        self.calls = 0
        self.ending = False
        self.stopped = False
        self.proven = False
        self.unsent: set[int] = set()
        self.stuck = ""
        self.fault = ""
        self.last = 0
        self.notices: deque[Kind] = deque()
        self.rested = 0.0
        self.timer: Timer | None = None
        self._channel: socket.socket | None = None
        self._end: socket.socket | None = None
        self._stop: Callable[[float], None] = lambda _: None
        self._open = False
        self._spin = Spin()
        self._reading = threading.Lock()
        self._deliveries = 0
        self._kept: set[bytes] = set()  # names of functions that it is asked to keep
        self._known: set[bytes] = set()  # and of those that it has for sure
        self._kept_bytes = 0
        self._gone: Gone | None = None

    def attach(self, channel: socket.socket, end: socket.socket, stop: Callable[[float], None]) -> None:
        """Say that there is a process, or is about to be.

        Args:
            channel: Our end of its channel.
            end: Its end: whatever it has not taken out can be taken back there.
            stop: Asks the fork server to end it, given the seconds between asking and killing.
        """
        self._channel, self._end, self._stop = channel, end, stop
        self._open = True

    def detach(self) -> None:
        """There was none."""
        with self._reading:
            self._turn_deaf()
            for each in (self._channel, self._end):
                if each is not None:
                    each.close()
            self._channel = self._end = None

    @property
    def begun(self) -> bool:
        """Whether it runs what it was sent: it does so at once."""
        return True

    @property
    def busies_processor(self) -> bool:
        """Whether it counts among those that may run at once without devices."""
        return self.held is None

    @property
    def room(self) -> int:
        """How many calls may stand behind the one that it runs: few that take long, none that take very long."""
        return min(MOST_QUEUED, int(QUICK_SECONDS / max(self.pace, 1e-6)))

    @property
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered, in order."""
        return [*([] if self.call is None else [self.call]), *self.queued]

    def launch(self, call: Call) -> None:
        """Have it forked, make its environment, and send it its first call."""
        owner, held = self.owner, self.held
        call.future.allocation = self.allocation
        try:
            descriptors = () if held is None else held.descriptors
            server = client.spawn(self, owner.preload, grace=owner.grace, leases=descriptors)
            self.mark = (() if held is None else held.mark) or marks.draw()
            self.allocation, setup = owner.preparation.setup(
                self.allocation,
                owner.inventory,
                lease="" if held is None else held.lease,
                mark=self.mark,
                environ=server.environ,
                path=server.path,
                ready=call.options.timeout is not None,
            )
            call.future.allocation = self.allocation
            if call.options.timeout is not None:
                self.notices.append(Kind.READY)
            if owner.preparation.staged:
                self.notices.append(Kind.PREPARED)
            with outputs() as pair:
                self._send(Kind.SETUP, setup, (*pair, *descriptors))
            self._assign(call, fresh=True)
            if self.stopped:  # when there was no process yet that could have been told
                self._stop(owner.grace)
            owner.use(server, ahead=self.options.max_calls == 1)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
            if self._channel is None:
                owner.on_gone(self, Gone(forked=False))
            else:
                self.stop(0)

    def run(self, call: Call) -> None:
        """Send it another call."""
        call.future.allocation = self.allocation
        self.heard = time.monotonic()
        try:
            self._assign(call)
        except OSError as error:
            call.fail(error)
            self.stop(0)

    def queue(self, call: Call) -> None:
        """Send it a call that is to wait in its channel. What does not reach it is found there when it has gone."""
        body = call.body
        if body is None:  # cancelled just now, and on its way back
            return
        call.future.allocation = self.allocation
        call.worker = self
        self.calls += 1
        if not self._send(Kind.CALL, self._addressed(call, body), number=call.number):
            self.unsent.add(call.number)

    def answered(self, number: int) -> Call | None:
        """The call that it has answered, which it does not run any more; called with the pool's lock held."""
        now = time.monotonic()
        taken, self.heard = now - self.heard, now
        self.pace = self.pace + (taken - self.pace) / 4 if self.proven else taken
        self.proven = True
        call = self.call
        if call is None or call.number != number:
            call = next((call for call in self.queued if call.number == number), None)
        if call is not None:
            self.drop(call)
            call.body = None
            self.last = number
            if call.function is not None and call.function.name in self._kept:
                self._known.add(call.function.name)
        return call

    def takes(self, call: Call, *, ahead: bool) -> bool:
        """Whether a call may be run here, or stand behind one that runs; called with the pool's lock held."""
        if call.options.reuse != self.options.reuse or not self.owner.feeds:
            return False
        if not ahead:
            return True
        body = call.body
        function = call.function
        size = 0 if function is None or function.name in self._known else len(function.data)
        small = body is not None and not body.buffers and len(body.data) + size <= MOST_QUEUED_BYTES
        plain = call.options.timeout is None and call.log is None
        return small and plain and self.call is not None and self.options.max_calls == 0

    def add(self, call: Call) -> None:
        """Say that it has a call; called with the pool's lock held."""
        if self.call is None:
            self.call = call
        else:
            self.queued.append(call)

    def drop(self, call: Call) -> None:
        """Forget a call that it was given; called with the pool's lock held."""
        if self.call is call:
            self.call = self.queued.popleft() if self.queued else None
        else:
            self.queued.remove(call)

    def take_back(self) -> Call | None:
        """The first call that it has not begun with, which it never will now; called with the pool's lock held."""
        message = self._take_back()
        call = next((call for call in self.outstanding if message and call.number == message.number), None)
        if message is not None and call is not None:
            self._regain(call, message)
            self.drop(call)
        return call

    def not_begun(self) -> list[Call]:
        """The calls that it never began with, now that it has gone; called with the pool's lock held."""
        messages: dict[int, Message] = {}
        while (message := self._take_back()) is not None:
            for descriptor in message.descriptors:
                os.close(descriptor)
            messages[message.number] = message
        if not self.proven:
            messages = {}  # it never became a worker, and another one may not either
        found = []
        for call in self.outstanding:
            if call.number in messages:
                self._regain(call, messages[call.number])
            elif call.number not in self.unsent:
                continue
            call.worker = None
            found.append(call)
        return [call for call in found if call.kind != Kind.METHOD and not call.future.done()]

    @staticmethod
    def _regain(call: Call, message: Message) -> None:
        call.worker = None
        if call.undecided():
            data = bytes(message.data) if call.function is None else arguments_of(message.data)
            call.body = Pickled(data, message.buffers)

    def _assign(self, call: Call, *, fresh: bool = False) -> None:
        self.calls += 1
        self.ending = self.ending or self.calls == self.options.max_calls
        body = call.body
        if call.tries >= call.options.retries:
            call.body = None
        if body is None:  # cancelled just now, and its worker is being ended
            return
        call.worker = self
        kind = call.kind if not self.ending or call.kind != Kind.CALL else Kind.LAST_CALL
        if not fresh:  # the time of a fresh one begins when it is there
            self._start_timer(call)
        logs = self.owner.logs
        call.future.log = call.log or (None if logs is None else logs.path_for(call.name))
        if call.future.log is None:
            sent = self._send(kind, self._addressed(call, body), number=call.number)
        else:
            with outputs(call.future.log) as pair:
                sent = self._send(kind, self._addressed(call, body), pair, number=call.number)
        if not sent:
            self.unsent.add(call.number)
            call.body = body

    def _addressed(self, call: Call, body: Pickled) -> Pickled:
        """A call as this process understands it: with the function, or the name of one that it surely has.

        It has one once it has answered a call that brought it: what it was sent before may be taken back.
        """
        function = call.function
        if function is None:
            return body
        kept = function.name in self._kept
        if not kept and self.options.max_calls != 1 and self._kept_bytes + len(function.data) <= MOST_KEPT_BYTES:
            self._kept_bytes += len(function.data)
            self._kept.add(function.name)
            kept = True
        return function.called(body, known=function.name in self._known, keep=kept)

    def _start_timer(self, call: Call | None) -> None:
        if call is not None and call.options.timeout is not None:
            call.timer = reactor().call_later(call.options.timeout, partial(self.owner.on_timeout, self, call))

    def stop(self, grace: float, *, answer: bool = True) -> None:
        """End it, and everything that it started.

        Args:
            grace: Seconds between asking and killing.
            answer: Whether anybody still wants what it may say.
        """
        self.ending = self.stopped = True
        self._stop(grace)
        if not answer:
            self._interrupt()

    def finish(self) -> None:
        """Let it end by itself; if it takes too long, end it."""
        self.ending = True
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_WR)
        self.expect_end()

    def leave(self) -> None:
        """The pool takes no more calls: end once there is nothing to do."""
        if self.call is None and not self.ending:
            self.finish()

    def expect_end(self) -> None:
        """Give it so long to end by itself."""
        grace = self.owner.grace
        self.timer = reactor().call_later(max(grace, 1.0), partial(self.stop, grace))

    def on_message(self, message: Message) -> None:
        """It has answered, or is ready to begin."""
        if not self.expects(message):
            if not self.fault:
                self.refuse(f"it sent what is no answer (a message of the kind {message.kind})")
        elif message.kind == Kind.BROKEN:
            self.owner.on_broken(self, message)
        elif message.kind in (Kind.READY, Kind.PREPARED):
            if self.notices.popleft() == Kind.READY:
                self._start_timer(self.call)
        else:
            self.owner.on_answer(self, message)

    def expects(self, message: Message) -> bool:
        """Whether a worker that keeps to the rules may say this now."""
        if self.fault:
            return False
        if message.kind in (Kind.RESULT, Kind.ERROR):
            return not self.notices
        if message.kind == Kind.BROKEN:
            return bool(self.notices) if self.owner.preparation.staged else not self.proven
        return bool(self.notices) and self.notices[0] == message.kind

    def on_unasked(self, number: int) -> None:
        """It has answered a call that it does not run. The last one a second time costs nothing: others may run."""
        if number != self.last:
            self.refuse("it answered a call that it was not given")

    def refuse(self, fault: str) -> None:
        """Believe it nothing any more, and end it."""
        self.fault, self.ending = self.fault or fault, True
        self._stop(0)
        self._interrupt()

    def on_stuck(self, reason: str) -> None:
        """It ignores SIGKILL, or cannot be understood."""
        self.stuck = reason
        self.owner.on_stuck(self, reason)

    def on_gone(self, gone: Gone) -> None:
        """It has left the kernel."""
        if self.timer is not None:
            self.timer.cancel()
        self.owner.on_gone(self, gone)

    def death(self, gone: Gone, name: str) -> WorkerError:
        """Why its call has no result."""
        if not gone.forked:
            return WorkerStartError(f"no worker can be started for {name}: {gone.reason}")
        who = f"the worker (process {gone.pid}) that ran {name}" if gone.pid else f"the worker that ran {name}"
        if self.fault:
            return BrokenWorkerError(f"{who} was ended: {self.fault}", exit_status=gone.status)
        notes = "; ".join(filter(None, (gone.reason, self.stuck)))
        text = f"{who} {ending(gone.status)} before it answered" + (f": {notes}" if notes else "")
        return BrokenWorkerError(text, exit_status=gone.status)

    # Its channel

    def listen(self) -> None:
        """Hand over what it sends from now on."""
        if self._channel is not None:
            reactor().watch(self._channel.fileno(), self.read)

    def read(self) -> None:
        """Take what answers there are from the channel, and hand them over."""
        # Who attends holds the lock until an answer comes. The reactor must not wait for that: it hears of the end of
        # a worker that never answers. What is left then is heard of again.
        if not self._reading.acquire(blocking=False):
            return
        messages = []
        try:
            for _ in range(1 + len(self.queued)):
                message = self._receive()
                if message is None:
                    break
                messages.append(message)
            self._deliveries += len(messages)
        finally:
            self._reading.release()
        if messages:
            self._deliver(messages)

    def attend(self, pending: Callable[[], bool], seconds: float | None = None) -> None:
        """Take the next message in this thread, which saves the way through the reactor's, and hand it over.

        Args:
            pending: Whether the calling thread still waits for that message; if not, nothing is done.
            seconds: How long to wait for it; None for as long as it takes.
        """
        # Of several answers, the reactor takes all that are there at once, and it serves those who wait for the others.
        if self.queued or not self._reading.acquire(blocking=False):
            return  # somebody else is about to take it
        message = None
        try:
            # What is being handed over may be the message: then no other one may ever come.
            channel = self._channel
            if channel is None or not self._open or self._deliveries or not pending():
                return
            descriptor = channel.fileno()
            reactor().borrow(descriptor)
            try:
                message = self._receive(partial(self._spin.receive, channel, seconds))
            finally:
                if self._open:
                    reactor().give_back(descriptor)
            self._deliveries += message is not None
        finally:
            self._reading.release()
        if message is not None:
            self._deliver([message])

    def ended(self, gone: Gone) -> None:
        """Hand over what it said last, and that it has gone."""
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)  # nothing is sent any more, since nobody would take it out
            while self._open:
                with self._reading:
                    message = self._receive(last=True)
                if message is not None:
                    self.on_message(message)
            channel.close()
        with self._reading:
            self._gone = gone
            if self._deliveries:
                return  # whoever hands over its last message says so afterwards
        self._hand_over_end(gone)

    def _send(
        self, kind: Kind, body: Pickled | bytes = b"", descriptors: Sequence[int] = (), *, number: int = 0
    ) -> bool:
        """Send it a message; False when it has gone.

        Raises:
            OSError: When there is no memory or no descriptor left for the message.
        """
        assert self._channel is not None  # noqa: S101 - it was launched
        try:
            send(self._channel, kind, body, descriptors, number=number)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        return True

    def _take_back(self) -> Message | None:
        """Take back the first message that it has not taken out, or None: the kernel gives it to one of us alone."""
        if self._end is None:
            return None
        try:
            return receive(self._end, wait=False)
        except (OSError, ValueError):  # there is none, or it cannot be understood here, and the worker will say so
            return None

    def _interrupt(self) -> None:
        """Let nobody wait for its answer any more."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RD)

    def _deliver(self, messages: Sequence[Message]) -> None:
        """Hand over messages, and the end of the worker where that was heard of meanwhile."""
        outer = hands_over()
        _thread.hands_over = True
        try:
            for message in messages:
                self.on_message(message)
        finally:
            _thread.hands_over = outer
            with self._reading:
                self._deliveries -= len(messages)
                gone = None if self._deliveries else self._gone
            if gone is not None:
                self._hand_over_end(gone)

    def _hand_over_end(self, gone: Gone) -> None:
        self.on_gone(gone)
        if self._end is not None:
            self._end.close()

    def _receive(self, take: Callable[[], Message | None] | None = None, *, last: bool = False) -> Message | None:
        if not self._open or self._channel is None:
            return None
        try:
            message = _checked(receive(self._channel, wait=False) if take is None else take())
        except BlockingIOError:
            if not last:
                return None
            message = None
        except (OSError, ValueError) as error:  # it is none of ours, or no descriptors or memory are left for it
            self.fault, self.ending = self.fault or f"its answer could not be read: {error}", True
            self._stop(0)
            message = None
        if message is None:
            self._turn_deaf()
        return message

    def _turn_deaf(self) -> None:
        if self._open and self._channel is not None:
            self._open = False
            reactor().unwatch(self._channel.fileno())


_thread = threading.local()


def hands_over() -> bool:
    """Whether the calling thread hands over an answer: what waits there for a process to end waits for ever."""
    return getattr(_thread, "hands_over", False)


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
