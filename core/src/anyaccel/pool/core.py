"""The engine of this machine: calls that wait, processes that run them, and the order between the two.

No lock is held while a future is set or a process is launched: that may run code of others, or come back to us.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from anyaccel.errors import AnyaccelError, TaskTimeoutError, UsageError
from anyaccel.launcher.sandbox import confines
from anyaccel.model import Allocation, Inventory, Request
from anyaccel.pool.actor import ActorProcess
from anyaccel.pool.broker import Broker, lock
from anyaccel.pool.call import (
    BrokenPoolError,
    Call,
    Options,
    UnreadableError,
    exception_in,
    settle_call,
)
from anyaccel.pool.channel import Kind, Message
from anyaccel.pool.engine import Engine
from anyaccel.pool.forkserver.client import ForkServer, Gone
from anyaccel.pool.launching import Preparation
from anyaccel.pool.logs import Logs
from anyaccel.pool.payload import Pickled, dumps, dumps_call
from anyaccel.pool.process import QUICK_SECONDS, Held, WorkerProcess, hands_over
from anyaccel.pool.quarantine import can_tell, release_when_free
from anyaccel.pool.reactor import reactor

if TYPE_CHECKING:
    from anyaccel.pool.gang import GangFuture

_FEEDING_SECONDS = 1.0
"""To send a worker some calls takes microseconds, unless a callback of the user's comes in between."""


class Core(Engine):
    """The calls of one pool on this machine; see :class:`~anyaccel.pool.engine.Engine`.

    Args:
        broker: Gives the machine and its devices; called once, when they are needed first.
        preparation: What all workers have in common.
        preload: Modules that the fork server imports.
        max_workers: Processes at the same time, or None: then the devices set the limit, and the processors do for
            calls that need none.
        grace: Seconds between asking a process to end and killing it.
        idle: Seconds after which an unused process gives its devices back.
        logs: Where the output of each call goes, or None for where ours goes.

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
        EnforcementError: When workers must be confined and the kernel cannot.
    """

    def __init__(
        self,
        broker: Callable[[], Broker],
        preparation: Preparation,
        *,
        preload: tuple[str, ...],
        max_workers: int | None,
        grace: float,
        idle: float,
        logs: Logs | None,
    ) -> None:
        self.confined = confines(preparation.enforce)
        self.preparation = preparation
        self.preload = preload
        self.max_workers = max_workers
        self.grace = grace
        self.idle = idle
        self.logs = logs
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

    def enter(self, call: Call, work: object) -> None:
        """Give a call to an idle process, or let it wait for one."""
        broker = self.broker  # it may not be there, which is told before anything else
        try:
            if isinstance(work, tuple) and not isinstance(work, Pickled) and call.kind == Kind.CALL:
                body, call.function = dumps_call(*work)
            else:
                body = work if isinstance(work, Pickled) else dumps(work)
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
        else:
            self.keep(call)

    def join(self, call: Call, held: Held | None) -> WorkerProcess:
        """Make the process that will run a call first; called with the lock held."""
        member = (WorkerProcess if call.actor is None else ActorProcess)(self, call.options, held, call)
        self.members.add(member)
        return member

    # What processes do

    def on_answer(self, member: WorkerProcess, message: Message) -> None:
        """A worker has answered: give it the next call, then hand over what it said."""
        call = None
        try:
            with self.lock:
                call = member.answered(message.number)
                idle = member.call is None
            if call is None:
                member.on_unasked(message.number)
                return
            if member.ending:
                if idle:
                    member.expect_end()
            elif not idle:
                self.feed(member)
            elif not self.go_on(member):
                self._rest(member)
            if call is not None:
                settle_call(call, message, plain=self.preparation.plain)
        except BaseException as error:
            # We may be in the thread of a user who has pressed Ctrl-C: leave nothing half done.
            member.stop(0)
            if call is not None:
                call.fail(error)
            raise

    def on_broken(self, member: WorkerProcess, message: Message) -> None:
        """A worker could not be set up."""
        member.fault = "it could not be set up"  # first: whatever else it says, another thread may be about to hear
        error = exception_in(message, plain=self.preparation.plain)
        if isinstance(error, UnreadableError):
            member.fault = f"it sent what is no answer ({error})"
            member.refuse(member.fault)
            return
        call = member.call
        if self.preparation.staged:
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
            again = member.not_begun()
            begun = [call for call in member.outstanding if call not in again]
            member.call = None
            member.queued.clear()
            held, member.held = member.held, None
            if held is not None and again and not begun:  # it was unused, or never there
                fresh = self.join(again[0], held)
                held = None
        if fresh is not None:
            fresh.launch(again.pop(0))
        for call in begun:
            if gone.forked and not member.stopped and call.may_be_retried:
                call.tries += 1
                call.worker = None
                again.insert(0, call)
            else:
                call.fail(member.death(gone, call.name))
        self.broker.put_back(self, again)  # first, or others that came later would be given the devices
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
        call.fail(TaskTimeoutError(f"{call.name} took longer than its timeout of {call.options.timeout:g} s"))
        member.stop(self.grace, answer=False)

    def on_cancel(self, call: Call) -> None:
        """A call was cancelled: if it runs, end its process."""
        with self.lock:
            ahead = next((member for member in self.members if call in member.queued), None)
        if ahead is not None and self.recall(ahead) and not self.go_on(ahead):
            self._rest(ahead)
        with self.lock:
            member = next((member for member in self.members if member.call is call), None)
            if member is not None:
                member.ending = True
            call.body = None
        if member is not None:
            member.stop(self.grace, answer=False)
        self.broker.forget(self, call)
        self.broker.serve()
        self.settle()

    # Which call a process runs next, and which ones stand behind it in its channel
    #
    # A process that answers quickly is given some calls before it asks: between two calls it need not wait for us
    # then, nor we for the kernel to wake it. Nothing is decided by that. What it has not taken out of its channel can
    # be taken back at the other end, and the kernel gives each message to one of the two alone.

    def go_on(self, member: WorkerProcess) -> bool:
        """Give an idle worker the next call of its kind, unless that would overtake somebody."""
        if not self.broker.busy and not any(peer.queued for peer in tuple(self.members)):
            return False
        with member.feeding:
            call = self._steal(member, silent=True) or self.broker.next_for(member) or self._steal(member)
            if call is not None:
                member.run(call)
        if call is not None:
            self.feed(member)
        return call is not None

    def feed(self, member: WorkerProcess) -> None:
        """Let calls stand behind the one that a worker runs, so that it need not wait for us between the two."""
        room = member.room
        if len(member.queued) >= -(-room // 2) or member.ending or self.logs is not None:
            return
        if not member.feeding.acquire(blocking=False):
            return  # somebody else does
        fed = False
        try:
            while len(member.queued) < room:
                call = self._steal(member, silent=True, ahead=True) or self.broker.next_for(member, ahead=True)
                if call is None:
                    break
                member.queue(call)
                fed = True
        finally:
            member.feeding.release()
        if fed and self.broker.idles:  # somebody has become idle meanwhile, and must not be while calls stand in line
            idle = self.broker.take_idle(self, member.options.reuse)
            if idle is not None and not self.go_on(idle):
                self._rest(idle)

    def _rest(self, member: WorkerProcess) -> None:
        """Keep an idle process for later calls, unless the pool is at its end."""
        self.broker.rest(member)
        self.settle()

    def _steal(self, member: WorkerProcess, *, silent: bool = False, ahead: bool = False) -> Call | None:
        """Give a worker a call that stands behind one that another worker runs.

        Args:
            member: The worker.
            silent: Whether only to do so where the other one takes long.
            ahead: Whether the call is to stand in line again.
        """
        now = time.monotonic()
        if silent and now - self._looked < QUICK_SECONDS:
            return None
        with self.lock:
            self._looked = now if silent else self._looked
            for peer in self.members if self.feeds else ():
                if not peer.queued or peer is member or peer.options.reuse != member.options.reuse:
                    continue
                if (silent and now - peer.heard < QUICK_SECONDS) or (ahead and member.call is None):
                    continue
                while peer.queued and (call := peer.take_back()) is not None:
                    if not call.future.done():
                        member.add(call)
                        return call
        return None

    def recall(self, member: WorkerProcess) -> bool:
        """Let calls wait again that a process was given and has not begun with; returns whether it is idle now."""
        taken: list[Call] = []
        with self.lock:
            while member.queued or taken:
                call = member.take_back()
                if call is None:
                    break
                taken.append(call)
            idle = member.call is None and bool(taken) and not member.ending
        self.broker.put_back(self, [call for call in taken if not call.future.done()])
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
            held.release()

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
            members = list(self.members)
        try:
            for member in members:
                if member.feeding.acquire(timeout=_FEEDING_SECONDS):  # whoever sends it something now has done so
                    member.feeding.release()
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
            if not waiting or isinstance(member, ActorProcess):
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
        self.stop(self.grace)
