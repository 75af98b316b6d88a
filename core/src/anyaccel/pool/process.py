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
from typing import TYPE_CHECKING, NoReturn, Protocol

from anyaccel.errors import BrokenWorkerError, WorkerError, WorkerStartError
from anyaccel.launcher.usage import OpenLease, Usage
from anyaccel.ledger import mark as marks
from anyaccel.model import Allocation, Extent, Inventory
from anyaccel.pool.call import Call, Options, settle_call
from anyaccel.pool.channel import Kind, Message, Spin, receive, send
from anyaccel.pool.engine import Engine
from anyaccel.pool.forkserver import client
from anyaccel.pool.forkserver.client import Gone
from anyaccel.pool.launching import CPU, outputs
from anyaccel.pool.payload import Function, Pickled, arguments_of
from anyaccel.pool.proc import ending
from anyaccel.pool.reactor import Timer, reactor

if TYPE_CHECKING:
    from anyaccel.launcher.environment import Group
    from anyaccel.launcher.time_limit import EarlySignal
    from anyaccel.ledger import Lease

QUICK_SECONDS = 0.005
"""About so much work stands in line in a channel; a worker that does not answer for so long is looked after."""

MOST_QUEUED, MOST_QUEUED_BYTES = 32, 1 << 12
"""So many calls at most stand in line in a channel, and larger ones do not: together they find room in its buffer."""

MOST_KEPT_BYTES = 1 << 24
"""A process keeps functions of so many bytes at most; others go along with each of their calls."""

_ANSWERS = Kind.RESULT, Kind.ERROR

_GONE = {errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN}
"""The other end has been closed, or ours has since the end was noticed."""


class Held(OpenLease):
    """Devices that are held for a worker until they are given back.

    Args:
        allocation: What is held.
        lease: The lease; None where nothing is, since the request fell back to the CPU.
        on_release: Called with what the lease held, by name in the ledger, once it has been given back.
        private: Whether other processes are not to see the lease.
        usage: Its line of the journal; None where there is to be none.
    """

    def __init__(
        self,
        allocation: Allocation,
        lease: Lease | None,
        on_release: Callable[[Mapping[str, Extent]], object],
        *,
        private: bool = False,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(lease)
        self.allocation = allocation
        self._on_release = on_release
        self._private = private
        if usage is not None:
            self.begin_line(usage, at_exit=False)  # pools end their workers then

    @property
    def lease_id(self) -> str:
        """Identity of the lease, as other processes see it; empty when they do not."""
        return self.lease.id if self.lease and not self._private else ""

    @property
    def devices(self) -> Mapping[str, Extent]:
        """What is held, by name in the ledger."""
        return self.lease.devices if self.lease else {}

    @property
    def mark(self) -> marks.Mark:
        """Mark that the lease names; empty when there is none."""
        return self.lease.mark if self.lease else ()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that carry the lease."""
        return self.lease.fds if self.lease else ()

    def quarantine(self, reason: str) -> None:
        """Say to others why the devices are kept although nobody uses them."""
        if self.lease:
            self.lease.quarantine(reason)

    def release(self, *, carried: bool = False) -> None:
        """Give them back; does nothing the second time.

        Args:
            carried: Whether they are left to the processes that carry the mark of the lease, whoever started these.
        """
        if self.lease is not None and not self.lease.released:
            self.give_back(self.lease.mark if carried else None)
            self._on_release(self.lease.devices)


class Owner(Engine, Protocol):
    """The pool of a worker process: an engine of this machine.

    Attributes:
        members: Processes that live, or are about to.
        confined: Whether processes will be confined to their devices.
        feeds: Whether kept processes are given calls that wait.
    """

    members: set[WorkerProcess]
    confined: bool
    feeds: bool

    @property
    def inventory(self) -> Inventory:  # pyright: ignore[reportReturnType] - a protocol's methods have no body
        """The machine."""

    def join(self, call: Call, held: Held | None) -> WorkerProcess:  # pyright: ignore[reportReturnType]
        """Make the process that will run a call first; called with the lock held."""

    def use(self, server: client.ForkServer, *, ahead: bool) -> None:
        """Say that a process came from a fork server, and whether another one will be needed."""

    def feed(self, member: WorkerProcess, *, idle: bool) -> bool:  # pyright: ignore[reportReturnType]
        """Give a process the calls that it takes."""

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


class Source(Protocol):
    """Where the calls of a process come from, and where those go back to that it has not begun with."""

    def next_for(self, member: WorkerProcess, *, ahead: bool) -> Call | None:
        """Give a process the next call that waits for it, if it takes that."""

    def put_back(self, owner: Owner, calls: list[Call], /) -> None:
        """Let calls wait again, in front of their like."""

    def rest(self, member: WorkerProcess, /) -> None:
        """A process has nothing to do."""


class WorkerProcess:
    """A worker process of a pool, from the decision to fork it until its devices have gone back.

    Attributes:
        owner: The pool.
        source: Where its calls come from.
        options: How the calls that it runs are to be run.
        held: The devices that it holds, or None for the CPU alone.
        allocation: What it holds, with what enforces that once it is known.
        mark: What it and all that it starts carry; empty before it has been told.
        call: The call that it runs, or None.
        feeding: Held by whoever gives it calls, from the choice to the sending: calls arrive in the order of choice,
            and nobody is about to send once it has gone. No code of others runs meanwhile.
        queued: Calls that stand behind that one in its channel: it begins with them without asking.
        pace: Seconds that an answer has taken lately.
        heard: Time of ``time.monotonic()`` of its last answer, or of the first call since it had none.
        calls: Calls that it was given so far.
        ending: Whether it gets no more calls.
        stopped: Whether we have ended it, whatever it was doing.
        killed: Why the kernel has killed something of it, once it has gone; an empty string where it did not.
        proven: Whether it has answered at all.
        fault: Why nothing that it says is believed any more, or an empty string.
        last: Number of the call that it has answered last.
        notices: What it has to say before it answers, in order.
        ids: Ids of the devices that it holds.
        room: How many calls may stand behind the one that it runs: few that take long, none that take very long.
    """

    __slots__ = (
        "_ahead", "_channel", "_deliveries", "_end", "_gone", "_group", "_kept", "_kept_bytes", "_known", "_open",
        "_over", "_reading", "_spin", "_stop", "allocation", "call", "calls", "ending", "fault", "feeding", "heard",
        "held", "ids", "killed", "last", "mark", "notices", "options", "owner", "pace", "proven", "queued", "room",
        "source", "stopped", "stuck", "timer",
    )  # fmt: skip

    def __init__(self, owner: Owner, source: Source, options: Options, held: Held | None, call: Call | None) -> None:
        self.owner = owner
        self.source = source
        self.options = options
        self.held = held
        self.allocation = CPU if held is None else held.allocation
        self.ids = frozenset(device.id for device in self.allocation.devices)
        self.mark: marks.Mark = ()
        self.call = call
        self.queued: deque[Call] = deque()
        self.pace = float("inf")
        self.room = 0
        self.feeding = threading.Lock()
        self.heard = 0.0
        self.calls = 0
        self.ending = False
        self.stopped = False
        self.proven = False
        self.stuck = ""
        self.fault = ""
        self.last = 0
        self.notices: deque[Kind] = deque()
        self.killed = ""
        self.timer: Timer | None = None
        self._channel: socket.socket | None = None
        self._end: socket.socket | None = None
        self._stop: Callable[[float], None] = lambda _: None
        self._open = False
        self._over = False
        self._ahead = True
        self._spin = Spin()
        self._reading = threading.Lock()
        self._deliveries = 0
        self._kept: set[bytes] = set()  # names of functions that it is asked to keep
        self._known: set[bytes] = set()  # and of those that it has for sure
        self._kept_bytes = 0
        self._gone: Gone | None = None
        self._group: Group | None = None

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
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered, in order."""
        return [*([] if self.call is None else [self.call]), *self.queued]

    def launch(self, call: Call, *, ahead: bool = True) -> None:
        """Have it forked, make its environment, and send it its first call.

        Args:
            call: The call.
            ahead: Whether it may be a process that was forked before anybody needed one.
        """
        owner, setting, held = self.owner, self.owner.setting, self.held
        self._ahead = ahead
        call.future.allocation = self.allocation
        try:
            descriptors = () if held is None else held.descriptors
            server = client.spawn(self, setting.preload, grace=setting.grace, leases=descriptors, ahead=ahead)
            self.mark = (() if held is None else held.mark) or marks.draw_often()
            made, setup = setting.preparation.setup(
                self.allocation,
                owner.inventory,
                lease="" if held is None else held.lease_id,
                mark=self.mark,
                environ=server.environ,
                path=server.path,
                ready=call.options.timeout is not None,
            )
            self.allocation, self._group = made.allocation, made.group
            call.future.allocation = self.allocation
            if call.options.timeout is not None:
                self.notices.append(Kind.READY)
            if setting.preparation.staged:
                self.notices.append(Kind.PREPARED)
            with outputs() as pair:
                self._send(Kind.SETUP, setup, (*pair, *descriptors))
            with self.feeding:
                self.give(call, fresh=True)
            if self.stopped:  # when there was no process yet that could have been told
                self._stop(setting.grace)
            owner.use(server, ahead=self.options.max_calls == 1)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            call.fail(error)
            if self._channel is None:
                owner.on_gone(self, Gone(forked=False))
            else:
                self.stop(0)

    def run(self, call: Call) -> None:
        """Send it a call that it was given while it was idle."""
        with self.feeding:
            self.give(call)

    def give(self, call: Call, *, fresh: bool = False) -> None:
        """Send it a call that it was given: to run, or to stand in its channel; called with :attr:`feeding` held.

        Args:
            call: The call.
            fresh: Whether nothing says yet that the process is there.
        """
        body = call.body
        if self._over or body is None:  # whoever heard of its end has the call; or it was cancelled just now
            return
        call.future.allocation = self.allocation
        call.sent = True  # first: from then on, somebody may answer it or take it back
        self.calls += 1
        self.ending = self.ending or self.calls == self.options.max_calls
        kind = call.kind
        if self.runs(call):
            call.worker = self
            self.heard = time.monotonic()
            if self.ending and kind == Kind.CALL:
                kind = Kind.LAST_CALL
            if call.tries >= call.options.retries:
                call.body = None
            if call.options.timeout is not None and not fresh:  # the time of a fresh one begins when it is there
                self._start_timer(call)
        try:
            if not self._pass(kind, call, body):
                call.sent = False
                call.body = body
        except OSError as error:  # no memory or no descriptor is left
            reactor().call_soon(partial(call.fail, error))
            self.stop(0)

    def _pass(self, kind: Kind, call: Call, body: Pickled) -> bool:
        """Send it a call, with the file for its output where it has one; False when it has gone.

        Raises:
            OSError: When there is no memory or no descriptor left for that.
        """
        message = body if call.function is None else self._addressed(call.function, body)
        logs = self.owner.setting.logs
        log = call.log if logs is None else call.log or logs.path_for(call.name)
        if log is None:
            return self._send(kind, message, number=call.number)
        call.future.log = log
        with outputs(log) as pair:
            return self._send(kind, message, pair, number=call.number)

    def runs(self, call: Call) -> bool:
        """Whether it runs a call that it was given as soon as it gets it."""
        return call is self.call

    def answered(self, message: Message) -> Call | None:
        """The call that it has answered, which it does not run any more; called with the pool's lock held."""
        number = message.number
        now = time.monotonic()
        taken, self.heard = now - self.heard, now
        self.pace = self.pace + (taken - self.pace) / 4 if self.proven else taken
        self.room = min(MOST_QUEUED, int(QUICK_SECONDS / max(self.pace, 1e-6)))
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

    def settle(self, call: Call, message: Message) -> None:
        """Give a call the outcome that it sent."""
        settle_call(call, message, plain=self.owner.setting.preparation.plain)

    def takes(self, call: Call, *, ahead: bool) -> bool:
        """Whether a call may be run here now, or stand behind one that runs; called with the pool's lock held.

        Args:
            call: The call.
            ahead: Whether it may stand behind another one only: somebody else knows that the process is idle.
        """
        if self.call is None or self.ending:
            return not (ahead or self.ending)
        if len(self.queued) >= self.room or self.options.max_calls:
            return False
        body, function = call.body, call.function
        size = 0 if function is None or function.name in self._known else len(function.data)
        small = body is not None and not body.buffers and len(body.data) + size <= MOST_QUEUED_BYTES
        return small and call.options.timeout is None and call.log is None and self.owner.setting.logs is None

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
            if self.call is not None:
                self.call.worker = self
        else:
            self.queued.remove(call)

    def take_back(self) -> Call | None:
        """The first call that it has not begun with, which it never will now; called with the pool's lock held."""
        message = self._withdraw()
        call = next((call for call in self.outstanding if message and call.number == message.number), None)
        if message is None or call is None:
            return None
        if call.undecided():
            data = bytes(message.data) if call.function is None else arguments_of(message.data)
            call.body = Pickled(data, message.buffers)
        self.drop(call)
        call.withdraw()
        return call

    def _withdraw(self) -> Message | None:
        """The first message that it has not taken out, and never will: the kernel gives it to one of us alone."""
        try:
            message = None if self._end is None else receive(self._end, wait=False)
        except (OSError, ValueError):  # there is none, or it cannot be understood here, and the worker will say so
            return None
        if message is not None:
            _close(message)
        return message

    def not_begun(self, gone: Gone) -> list[Call]:
        """The calls that it never began with, now that it has gone; called with the pool's lock held.

        What was set up and did not become a worker began with all that it was sent: another one may not become one
        either. The same goes for what was forked when it was needed and took nothing out.
        """
        self.ending = True  # somebody may be about to give it a call still, or to let it rest
        found: list[Call] = []
        unused = False
        if gone.forked and self._ahead and not (self.proven or self.stopped):
            first = self._withdraw()
            unused = first is not None and first.kind == Kind.SETUP
        while (self.proven or unused) and (call := self.take_back()) is not None:
            found.append(call)
        for call in self.outstanding:
            if not call.sent:
                call.withdraw()
                found.append(call)
        return [call for call in found if not call.future.done()]

    def _addressed(self, function: Function, body: Pickled) -> Pickled:
        """A call as this process understands it: with the function, or the name of one that it surely has.

        It has one once it has answered a call that brought it: what it was sent before may be taken back.
        """
        kept = function.name in self._kept
        if not kept and self.options.max_calls != 1 and self._kept_bytes + len(function.data) <= MOST_KEPT_BYTES:
            self._kept_bytes += len(function.data)
            self._kept.add(function.name)
            kept = True
        return function.called(body, known=function.name in self._known, keep=kept)

    def _start_timer(self, call: Call | None) -> None:
        if call is None or call.options.timeout is None:
            return
        seconds, early = call.options.timeout, self.owner.setting.early
        if early is None or early.seconds >= seconds:
            call.timer = reactor().call_later(seconds, partial(self.owner.on_timeout, self, call))
        else:
            call.timer = reactor().call_later(seconds - early.seconds, partial(self._send_early, early, call))

    def _send_early(self, early: EarlySignal, call: Call) -> None:
        """Send the signal that comes before the time of a call is over, and wait for that."""
        call.timer = reactor().call_later(early.seconds, partial(self.owner.on_timeout, self, call))
        if self.call is call:
            early.send(self.mark)

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
        grace = self.owner.setting.grace
        self.timer = reactor().call_later(max(grace, 1.0), partial(self.stop, grace))

    def on_message(self, message: Message) -> None:
        """It has said something: an answer, a notice that is due, or what no worker that keeps to the rules says."""
        kind = message.kind
        if self.fault:
            return
        if kind in _ANSWERS and not self.notices:
            self.owner.on_answer(self, message)
        elif kind == Kind.BROKEN and (self.notices if self.owner.setting.preparation.staged else not self.proven):
            self.owner.on_broken(self, message)
        elif self.notices and kind == self.notices[0]:
            if self.notices.popleft() == Kind.READY:
                self._start_timer(self.call)
        else:
            self.refuse(f"it sent what is no answer (a message of the kind {kind})")

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
        if self._group is not None:
            from anyaccel.launcher.limits import remove

            self.killed = remove(self._group)
        self.owner.on_gone(self, gone)

    def death(self, gone: Gone, name: str) -> WorkerError:
        """Why its call has no result."""
        if not gone.forked:
            return WorkerStartError(f"no worker can be started for {name}: {gone.reason}")
        who = f"the worker (process {gone.pid}) that ran {name}" if gone.pid else f"the worker that ran {name}"
        if self.fault:
            return BrokenWorkerError(f"{who} was ended: {self.fault}", exit_status=gone.status)
        notes = "; ".join(filter(None, (gone.reason, self.stuck, self.killed)))
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
            descriptor, loop = channel.fileno(), reactor()
            loop.borrow(descriptor)
            try:
                message = self._receive(partial(self._spin.receive, channel, seconds))
            finally:
                if self._open:
                    loop.give_back(descriptor)
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
        with self.feeding:  # whoever was sending it something has done so, and nobody will any more
            self._over = True
        self.on_gone(gone)
        if self._end is not None:
            self._end.close()

    def _receive(self, take: Callable[[], Message | None] | None = None, *, last: bool = False) -> Message | None:
        if not self._open or self._channel is None:
            return None
        try:
            message = receive(self._channel, wait=False) if take is None else take()
            if message is not None and message.descriptors:
                _refuse(message)
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


def _refuse(message: Message) -> NoReturn:
    """Close the descriptors that a message of a worker passes along.

    Raises:
        ValueError: Since no worker that keeps to the rules does.
    """
    _close(message)
    raise ValueError("it passes descriptors along")


def _close(message: Message) -> None:
    """Close the descriptors that a message has passed along."""
    for descriptor in message.descriptors:
        os.close(descriptor)
