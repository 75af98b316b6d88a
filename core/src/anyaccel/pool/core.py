"""The engine of this machine: calls that wait, processes that run them, and the order between the two.

No lock is held while a future is set or a process is launched: that may run code of others, or come back to us.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.errors import AnyaccelError, TaskTimeoutError, UsageError
from anyaccel.launcher.launch import check_start
from anyaccel.model import Allocation, Inventory, Request
from anyaccel.pool.actor import ActorProcess
from anyaccel.pool.broker import Broker, lock
from anyaccel.pool.call import (
    BrokenPoolError,
    Call,
    Options,
    UnreadableError,
    exception_in,
)
from anyaccel.pool.channel import Kind, Message
from anyaccel.pool.engine import Engine, Setting
from anyaccel.pool.forkserver.client import ForkServer, Gone
from anyaccel.pool.payload import Pickled, dumps, dumps_call
from anyaccel.pool.process import QUICK_SECONDS, Held, WorkerProcess, hands_over
from anyaccel.pool.quarantine import can_tell, release_when_free
from anyaccel.pool.reactor import reactor

if TYPE_CHECKING:
    from anyaccel.pool.gang import GangFuture


class Core(Engine):
    """The calls of one pool on this machine; see :class:`~anyaccel.pool.engine.Engine`.

    Args:
        broker: Gives the machine and its devices; called once, when they are needed first.
        setting: What all calls have in common. Where it sets no limit to the processes, the devices do, and the
            processors do for calls that need none.

    Attributes:
        lock: Held over every look at what follows, and over nothing that takes time or runs code of others.
        members: Processes that live, or are about to.
        confined: Whether processes will be confined to their devices.
        closed: Whether no more calls are taken.
        feeds: Whether kept processes are given calls that wait.
        foreign: Whether we are a fork of the process that the pool belongs to.
        broken: Why no call can be run, or None.
        drained: Set when it is closed and nothing is left.

    Raises:
        EnforcementError: When workers must be confined, or held to memory, and the kernel cannot.
    """

    def __init__(self, broker: Callable[[], Broker], setting: Setting) -> None:
        self.confined = check_start(setting.preparation.start, forked=True)
        self.setting = setting
        self.lock = lock()
        self.members: set[WorkerProcess] = set()
        self.closed = False
        self.feeds = True
        self.foreign = False
        self.broken: BrokenPoolError | None = None
        self.drained = threading.Event()
        self._open_broker = broker
        self._broker: Broker | None = None
        self._opening = threading.Lock()
        self._servers: set[ForkServer] = set()
        self._quarantined: dict[int, tuple[Allocation, str]] = {}
        self._looked = 0.0
        self._watches = False

    @property
    def broker(self) -> Broker:
        """The machine and its devices.

        Raises:
            MachineError: When the machine cannot be understood.
        """
        if self._broker is None:
            with self._opening:
                if self._broker is None:
                    self._broker = self._open_broker()
        return self._broker

    @property
    def inventory(self) -> Inventory:
        """The machine."""
        return self.broker.inventory

    def check(self, request: Request) -> None:
        """Raise the error of a request that can never be served."""
        self.broker.check(request)

    def gang(self, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Let a pickled call be run as a gang of one, on this machine."""
        from anyaccel.launcher.rendezvous import Rendezvous
        from anyaccel.pool.gang import GangFuture, ranked

        if hosts > 1:
            raise UsageError(
                f"hosts must be 1 with engine='local', which has this machine alone (got {hosts}); engine='ray' has"
                " those of a cluster"
            )
        rendezvous = Rendezvous()
        call = Call(name, options, self.on_cancel)
        future = GangFuture([call.future])
        future.add_done_callback(lambda _: rendezvous.close())
        try:
            self.enter(call, ranked(0, 1, rendezvous.variables, work))
        except BaseException:
            rendezvous.close()
            raise
        return future

    def enter(self, call: Call, work: Pickled | tuple[Any, ...]) -> None:
        """Give a call to an idle process, or let it wait for one."""
        if self.foreign:  # a thread of our parent may have held the lock
            self.check_open()
        broker = self.broker  # it may not be there, which is told before anything else
        try:
            if isinstance(work, Pickled):
                body = work
            elif call.kind == Kind.CALL:
                body, call.function = dumps_call(*work)
            else:
                body = dumps(work)
            call.body = body.frozen() if call.options.retries else body
        except Exception as error:  # noqa: BLE001 - it belongs to the future, as other executors do it
            self.check_open()
            call.fail(error)
            return
        try:
            member = broker.enter(self, call)
        except BrokenPoolError:
            raise
        except AnyaccelError as error:  # the request was served before; whatever has changed, it is told
            call.fail(error)
            return
        if member is not None:
            member.run(call)
        elif call.worker is None:
            self.keep(call)

    def join(self, call: Call, held: Held | None) -> WorkerProcess:
        """Make the process that will run a call first; called with the lock held."""
        if call.actor is None:
            member = WorkerProcess(self, self.broker, call.options, held, call)
        else:
            member = ActorProcess(self, call.actor, held, call)
        self.members.add(member)
        return member

    # What processes do

    def on_answer(self, member: WorkerProcess, message: Message) -> None:
        """A worker has answered: give it the next call, then hand over what it said."""
        call = None
        try:
            with self.lock:
                call = member.answered(message)
                idle = member.call is None
            if call is None:
                member.on_unasked(message.number)
                return
            if member.ending:
                if idle:
                    member.expect_end()
            elif not self.feed(member, idle=idle) and idle:
                self._rest(member)
            member.settle(call, message)
        except BaseException as error:
            # We may be in the thread of a user who has pressed Ctrl-C: leave nothing half done.
            member.stop(0)
            if call is not None:
                call.fail(error)
            raise

    def on_broken(self, member: WorkerProcess, message: Message) -> None:
        """A worker could not be set up."""
        member.fault = "it could not be set up"  # first: whatever else it says, another thread may be about to hear
        error = exception_in(message, plain=self.setting.preparation.plain)
        if isinstance(error, UnreadableError):
            member.fault = f"it sent what is no answer ({error})"
            member.refuse(member.fault)
            return
        call = member.call
        if self.setting.preparation.staged:
            self.break_off(error)
        elif call is not None:  # it has no environment or directory, which the next one may have
            call.fail(error)
            member.stop(0)

    def on_gone(self, member: WorkerProcess, gone: Gone) -> None:
        """A process and all that it started have left the kernel: its devices may go back."""
        fresh = None
        with self.lock:
            self.members.discard(member)
            self.broker.discard(member)
            again = member.not_begun(gone)
            begun = [call for call in member.outstanding if call not in again]
            member.call = None
            member.queued.clear()
            held, member.held = member.held, None
            if again and not begun and not member.proven:  # it was not used, and another one takes its place
                fresh, held = self.join(again[0], held), None
        if fresh is not None:
            fresh.launch(again.pop(0), ahead=False)
        retried = [call for call in begun if gone.forked and not member.stopped and call.may_be_retried]
        for call in begun:
            if call in retried:
                call.retry()
            else:
                call.fail(member.death(gone, call.name))
        # First, or others that came later would be given the devices.
        member.source.put_back(self, [*retried, *again])
        if held is not None:
            self.give_back(held, gone)
        self.broker.serve()
        self.settle()

    def on_stuck(self, member: WorkerProcess, reason: str) -> None:
        """Something of a worker ignores SIGKILL: its devices stay with it."""
        if member.held is not None:
            self.quarantine(member.held, reason)
        self.recall(member)
        for call in member.outstanding:
            call.fail(member.death(Gone(reason=reason), call.name))
        self.broker.serve()

    def on_timeout(self, member: WorkerProcess, call: Call) -> None:
        """The time of a call is up."""
        with self.lock:
            if call not in member.outstanding:
                return
            member.ending = True
            if member.held is not None:
                member.held.timed_out = True
        call.fail(TaskTimeoutError(f"{call.name} took longer than its timeout of {call.options.timeout:g} s"))
        member.stop(self.setting.grace, answer=False)

    def on_cancel(self, call: Call) -> None:
        """A call was cancelled: if it runs, end its process."""
        with self.lock:
            method = call.kind == Kind.METHOD
            ahead = next((each for each in self.members if call in (each.outstanding if method else each.queued)), None)
        if ahead is not None:
            self._take_back(ahead)
        with self.lock:
            member = next((member for member in self.members if member.call is call), None)
            if method:  # of an object that others use
                member = None
            if member is not None:
                member.ending = True
            call.body = None
        if member is not None:
            member.stop(self.setting.grace, answer=False)
        self.broker.forget(self, call)
        self.broker.serve()
        self.settle()

    # Which call a process runs next, and which ones stand behind it in its channel
    #
    # A process that answers quickly is given some calls before it asks: between two calls it need not wait for us
    # then, nor we for the kernel to wake it. Nothing is decided by that. What it has not taken out of its channel can
    # be taken back at the other end, and the kernel gives each message to one of the two alone. There is one rule:
    # calls wait again with all others when their worker takes long, or when somebody else has nothing to do.

    def feed(self, member: WorkerProcess, *, idle: bool) -> bool:
        """Give a process the calls that it takes: to run at once, and to stand behind one that it runs.

        Args:
            member: The process.
            idle: Whether it runs nothing, as the caller alone knows, who keeps it for later calls if it is given none.

        Returns:
            Whether it was given any.
        """
        urgent = idle or member.options.concurrency > 1  # else there is work in line, and more answers will come
        if (not urgent and 2 * len(member.queued) >= member.room) or not member.feeding.acquire(blocking=urgent):
            return False
        given = 0
        try:
            while (call := self._next_for(member, ahead=not idle or given > 0)) is not None:
                given += 1
                member.give(call)
        finally:
            member.feeding.release()
        if given > idle:
            self._watch_later()
            if self.broker.idles:  # nobody is to be idle while calls stand in line
                other = self.broker.take_idle(self, member.options.alike)
                if other is not None and not self.feed(other, idle=True):
                    self._rest(other)
        return given > 0

    def _watch(self) -> None:
        """Let calls wait again that stand behind one that takes long: there may be room for another process."""
        self._watches = False  # before the look: who sends calls ahead looks the other way round
        late = time.monotonic() - QUICK_SECONDS
        with self.lock:
            members = [member for member in self.members if member.queued and member.source is self._broker]
        for member in members:
            if member.heard < late:
                self._take_back(member)
        self.broker.serve()
        if members:
            self._watch_later()

    def _take_back(self, member: WorkerProcess) -> None:
        """Let all calls wait again, in their order, that a process was given and has not begun with."""
        with member.feeding:  # what was chosen has been sent by then, and nothing later is before these wait again
            idle = self.recall(member)
        if idle and not self.feed(member, idle=True):
            self._rest(member)

    def _watch_later(self) -> None:
        if not self._watches:
            self._watches = True
            reactor().call_later(2 * QUICK_SECONDS, self._watch)

    def _next_for(self, member: WorkerProcess, *, ahead: bool) -> Call | None:
        """The next call that a process takes; others give back to the line what they have not begun with."""
        now = member.heard
        if now - self._looked > QUICK_SECONDS:
            self._looked = now
            for peer in self._peers(member):
                if now - peer.heard > QUICK_SECONDS:
                    self.recall(peer, but_one=True)
        call = member.source.next_for(member, ahead=ahead)
        if call is None and not ahead and (peers := self._peers(member)):
            for peer in peers:
                self.recall(peer, but_one=True)
            call = member.source.next_for(member, ahead=ahead)
        return call

    def _peers(self, member: WorkerProcess) -> list[WorkerProcess]:
        """Other processes for the same calls, behind whose calls some stand in line."""
        alike = member.options.alike
        with self.lock:
            return [peer for peer in self.members if peer.queued and peer is not member and peer.options.alike == alike]

    def _rest(self, member: WorkerProcess) -> None:
        """Keep an idle process for later calls, unless the pool is at its end."""
        member.source.rest(member)
        if self.closed:
            self.settle()

    def recall(self, member: WorkerProcess, *, but_one: bool = False) -> bool:
        """Let calls wait again that a process was given and has not begun with.

        Args:
            member: The process.
            but_one: Whether to leave it at least one call.

        Returns:
            Whether it is idle now.
        """
        taken: list[Call] = []
        with self.lock:
            while (member.queued or (taken and not but_one)) and (call := member.take_back()) is not None:
                taken.append(call)
            idle = member.call is None and bool(taken) and not member.ending
        member.source.put_back(self, [call for call in taken if not call.future.done()])
        return idle

    # Devices that are given back

    def quarantined(self) -> tuple[tuple[Allocation, str], ...]:
        """Devices that nobody gets although their holder has been ended, and why."""
        with self.lock:
            return tuple(self._quarantined.values())

    def quarantine(self, held: Held, reason: str) -> None:
        """Say why devices are kept."""
        with self.lock:
            known = self._quarantined.get(id(held))
            self._quarantined[id(held)] = (held.allocation, reason)
        if known is None or known[1] != reason:
            held.quarantine(reason)

    def give_back(self, held: Held, gone: Gone) -> None:
        """Give devices back: at once when their holder has ended by itself, else when nothing of it is left."""
        inventory = self.inventory

        def release() -> None:
            with self.lock:
                self._quarantined.pop(id(held), None)
            held.release(carried=gone.carried)

        if gone.status == 0 or not gone.forked or not can_tell(inventory, held.allocation):
            release()
        else:
            release_when_free(
                inventory, held.allocation, gone.pid, keep=partial(self.quarantine, held), release=release
            )

    # Its end

    def shutdown(self, *, wait: bool, cancel_futures: bool = False) -> None:
        """Take no more calls; end when those that there are have been run. A done-callback does not wait for that."""
        if self.foreign:
            return
        with self.lock:
            self.closed = True
        if cancel_futures:
            self._cancel_waiting()
        self.settle()
        if wait and not reactor().inside and not hands_over():
            self.drained.wait()

    def _cancel_waiting(self) -> None:
        """Cancel what nobody has begun with."""
        with self.lock:
            self.feeds = False  # or what is taken back might be sent again
            members = [member for member in self.members if member.source is self._broker]
        try:
            for member in members:
                with member.feeding:  # whoever sends it something now has done so
                    pass
                self.recall(member)
            waiting: list[Call] = []
            if self._broker is not None:
                with self.lock:
                    waiting = self._broker.waiting(self)
            for call in waiting:
                call.future.cancel()
        finally:
            self.feeds = True

    def settle(self) -> None:
        """Once closed, let actors go that have no work, since others may wait for what they hold; then the workers."""
        if not self.closed:
            return
        with self.lock:
            waiting = [] if self._broker is None else self._broker.waiting(self)
            members = list(self.members)
            for member in members if not waiting else ():
                self.broker.discard(member)
        for call in waiting:
            if call.actor is not None:
                call.actor.close()
        for member in members:
            if not waiting or member.source is not self._broker:
                member.leave()
        if not members and not waiting:
            with self.lock:
                servers, self._servers = self._servers, set()
            for server in servers:
                server.leave()
            self.drained.set()

    def use(self, server: ForkServer, *, ahead: bool) -> None:
        """Say that a worker came from a fork server.

        Args:
            server: The fork server.
            ahead: Whether another fresh worker will be needed, and is better forked now.
        """
        with self.lock:
            new = server not in self._servers
            self._servers.add(server)
        if new:
            server.use()
        if ahead:
            server.fork_ahead()

    def break_off(self, cause: BaseException) -> None:
        """A worker could not be set up: no other will be."""
        error = BrokenPoolError(f"the pool is broken: setting up a worker failed with {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        with self.lock:
            self.broken = self.broken or error
            running = [call for member in self.members for call in member.outstanding]
            unfinished = [*self.broker.waiting(self), *running]
        for call in unfinished:
            call.fail(error)
        self.stop(self.setting.grace)
