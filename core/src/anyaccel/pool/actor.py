"""An object that lives in a worker, and the calls of its methods."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.pool.call import AwaitableFuture, Call, CallFuture, Options, name_of, settle_call
from anyaccel.pool.channel import Kind, Message
from anyaccel.pool.forkserver.client import Gone
from anyaccel.pool.payload import dumps
from anyaccel.pool.process import MOST_QUEUED_BYTES, QUICK_SECONDS, Held, Owner, WorkerProcess
from anyaccel.pool.reactor import reactor

if TYPE_CHECKING:
    from anyaccel.pool.engine import Engine

Method = str | Callable[..., Any]
"""What is called of an actor's object: a method by its name, or a function that is given the object first."""


class ActorWorker(Protocol):
    """Whatever runs the calls of an actor: a process of ours, or one of a cluster.

    Attributes:
        ending: Whether it gets no more calls.
    """

    ending: bool

    @property
    def idle(self) -> bool:
        """Whether it runs nothing."""
        raise NotImplementedError

    @property
    def free(self) -> bool:
        """Whether it takes one more call of a method; called with the lock held."""
        raise NotImplementedError

    @property
    def outstanding(self) -> list[Call]:
        """Calls that it was given and has not answered."""
        raise NotImplementedError

    def takes_ahead(self, call: Call) -> bool:
        """Whether a call may wait with it, behind one that runs; called with the lock held."""
        raise NotImplementedError

    def withdraw(self) -> Call | None:
        """Take back the first call that waits with it; called with the lock held."""
        raise NotImplementedError

    def on_cancel(self, call: Call) -> None:
        """A call was cancelled that may wait with it."""

    def add(self, call: Call) -> None:
        """Say that it has a call; called with the lock held."""

    def run(self, call: Call) -> None:
        """Send it a call that it has."""

    def finish(self) -> None:
        """Let it end by itself."""

    def stop(self, grace: float) -> None:
        """End it, with so many seconds between asking and killing."""


class Callee:
    """What has methods to be called: an actor, or several that are alike.

    Attributes:
        name: Name of its class.
        options: How its calls are to be run.
        queue: Calls of its methods that wait.
        closing: Whether it gets no more calls.
        death: Why it can run no call any more, or None.
    """

    def __init__(self, core: Engine, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self.queue: deque[Call] = deque()
        self.closing = False
        self.death: WorkerError | None = None
        self._core = core

    @property
    def ready(self) -> AwaitableFuture[Any]:
        """Future of its construction."""
        raise NotImplementedError

    @property
    def plain(self) -> bool:
        """Whether answers are read as plain data."""
        return self._core.preparation.plain

    def call(self, method: Method, args: Any, kwargs: Any) -> CallFuture:
        """Call a method once those that came before have begun, and there is room for it.

        Raises:
            RuntimeError: When it was closed.
        """
        call = self.prepare(method if isinstance(method, str) else name_of(method))
        try:
            body = dumps((method, args, kwargs))
            call.body = body.frozen() if self.options.retries else body
        except Exception as error:  # noqa: BLE001 - it belongs to the future
            call.fail(error)
        else:
            self.enter(call)
        return call.future

    def prepare(self, method: str) -> Call:
        """A call of a method, which has no arguments yet."""
        call = Call(f"{self.name}.{method}", self.options, self._on_cancel)
        call.kind = Kind.METHOD
        return call

    def enter(self, call: Call) -> None:
        """Let a call be run once those that came before have begun, and there is room for it.

        Raises:
            RuntimeError: When it was closed.
        """
        with self._core.lock:
            death = self.death
            if death is None and self.closing:
                raise RuntimeError(f"the actor {self.name} was closed and takes no more calls")
            member = None if death is not None or self.queue else self._vacancy()
            if member is not None:
                member.add(call)
            elif death is None:
                self.queue.append(call)
        if member is not None:
            member.run(call)
        elif death is not None:
            call.fail(self._obituary(death))
        else:
            self._core.keep(call)

    def _vacancy(self) -> ActorWorker | None:
        """A worker that has room for one more call; called with the lock held."""
        raise NotImplementedError

    def close(self) -> None:
        """Take no more calls; end when those that wait have been run."""
        raise NotImplementedError

    def stop(self, grace: float) -> None:
        """End now, whatever it is doing.

        Args:
            grace: Seconds between asking a process to end and killing it.
        """
        raise NotImplementedError

    def _obituary(self, death: WorkerError) -> BrokenWorkerError:
        """Why a call is not run; each call has its own, since an exception remembers who raised it."""
        error = BrokenWorkerError(
            f"the actor {self.name} has gone: {death}", exit_status=getattr(death, "exit_status", None)
        )
        error.__cause__ = death.__cause__
        return error

    def _fail_waiting(self, death: WorkerError) -> None:
        """Let calls that wait fail, since it is dead."""
        with self._core.lock:
            waiting = tuple(self.queue)
            self.queue.clear()
        for call in waiting:
            call.fail(self._obituary(death))

    def _on_cancel(self, call: Call) -> None:
        """A call was cancelled that had not begun: it is passed over."""


class ActorState(Callee):
    """An actor, from the wish for it to its end.

    Attributes:
        member: Its worker, once there is one.
        construction: The call that makes the object.
    """

    def __init__(self, core: Engine, name: str, options: Options) -> None:
        super().__init__(core, name, options)
        self.member: ActorWorker | None = None
        self.construction = Call(name, Options.of(needs=options.needs, max_calls=1), self._on_cancel)
        self.construction.kind = Kind.CONSTRUCT
        self.construction.actor = self
        self.construction.future.add_done_callback(self._on_constructed)

    @property
    def ready(self) -> CallFuture:
        """Future of its construction."""
        return self.construction.future

    def _vacancy(self) -> ActorWorker | None:
        return self.member if self.member is not None and self.member.free else None

    def close(self) -> None:
        """Take no more calls; end when those that wait have been run."""
        with self._core.lock:
            self.closing = True
            member = self.member
            idle = member is not None and member.idle and not self.queue and not member.ending
        if idle and member is not None:
            member.finish()

    def stop(self, grace: float) -> None:
        """End now, whatever it is doing.

        Args:
            grace: Seconds between asking its process to end and killing it.
        """
        with self._core.lock:
            self.closing = True
            member = self.member
        if member is None:
            self.bury(BrokenWorkerError("it was killed before it had been made"))
            self._core.on_cancel(self.construction)
        else:
            member.stop(grace)

    def following(self) -> list[Call]:
        """Give its worker the next calls, as many as it has room for; called with the lock held."""
        found: list[Call] = []
        member = self.member
        while self.queue and member is not None and (member.free or member.takes_ahead(self.queue[0])):
            call = self.queue.popleft()
            if not call.future.done():
                member.add(call)
                found.append(call)
        return found

    def regain(self, calls: list[Call]) -> list[Call]:  # noqa: ARG002
        """Take back calls that its worker has died of, where another one may run them; called with the lock held."""
        return []

    def die(self, death: WorkerError) -> None:
        """No call will be run any more."""
        with self._core.lock:
            self.death = self.death or death

    def bury(self, death: WorkerError) -> None:
        """It has gone: whatever waits for it fails."""
        self.die(death)
        self.construction.fail(death)
        self._fail_waiting(self.death or death)

    def _on_constructed(self, future: Future[Any]) -> None:
        """The object has been made, or never will be."""
        cause = None if future.cancelled() else future.exception()
        if cause is not None:
            death = BrokenWorkerError(f"it could not be made: {type(cause).__name__}: {cause}")
            death.__cause__ = cause
            self.bury(death)

    def _on_cancel(self, call: Call) -> None:
        if call is self.construction:
            self._core.on_cancel(call)
            self.bury(BrokenWorkerError("its construction was cancelled"))
        elif self.member is not None:
            self.member.on_cancel(call)


class ActorProcess(WorkerProcess):
    """The worker of an actor."""

    __slots__ = ("_state",)

    def __init__(self, owner: Owner, options: Options, held: Held | None, call: Call | None) -> None:
        super().__init__(owner, Options.of(needs=options.needs, max_calls=0), held, call)
        assert call is not None  # noqa: S101 - it makes the object
        assert call.actor is not None  # noqa: S101
        self._state: ActorState = call.actor
        self._state.member = self

    @property
    def idle(self) -> bool:
        """Whether it runs nothing."""
        return self.call is None

    @property
    def free(self) -> bool:
        """Whether it takes one more call of a method; called with the lock held."""
        if self.call is None:
            return not self.ending
        made = self.call.kind != Kind.CONSTRUCT
        return made and not self.ending and 1 + len(self.queued) < self._state.options.concurrency

    @property
    def busies_processor(self) -> bool:
        """Not: it may live for ever, and is idle for most of that."""
        return False

    def leave(self) -> None:
        """The pool takes no more calls."""
        self._state.close()

    def takes_ahead(self, call: Call) -> bool:
        """Whether a call may stand in its channel: where it answers quickly, that saves waking up for each.

        Nothing is decided by that: what it has not taken out can be taken back, to be cancelled or run by others.
        """
        if self.call is None or self.call.kind != Kind.METHOD or self.ending or self._state.options.concurrency > 1:
            return False
        body = call.body
        small = body is not None and not body.buffers and len(body.data) <= MOST_QUEUED_BYTES
        plain = call.options.timeout is None and call.log is None and self.owner.logs is None
        return small and plain and len(self.queued) < self.room

    def take_back(self) -> Call | None:
        """None: its calls are none of the pool's."""
        return None

    def withdraw(self) -> Call | None:
        """Take back the first call that it has not begun with, and leave it one; called with the lock held."""
        return super().take_back() if self.queued else None

    def on_cancel(self, call: Call) -> None:
        """A call was cancelled that may stand in its channel: take it back, and let the others stand there again."""
        with self.feeding:
            with self.owner.lock:
                taken: list[Call] = []
                while call in self.outstanding and (each := super().take_back()) is not None:
                    taken.append(each)
                self._put_back(taken)
                following = self._state.following()
            self._give(following)

    def _put_back(self, calls: list[Call]) -> None:
        """Let calls wait again, before others; called with the lock held."""
        self._state.queue.extendleft(reversed([call for call in calls if not call.future.done()]))

    def _give(self, calls: list[Call]) -> None:
        """Send calls that it was given."""
        for call in calls:
            if call is self.call or self._state.options.concurrency > 1:
                self.run(call)
            else:
                self.queue(call)

    def queue(self, call: Call) -> None:
        """Send it a call that is to stand in its channel, and can be cancelled until it is the next."""
        body = call.body
        if body is not None:
            call.future.allocation = self.allocation
            self.calls += 1
            if not self._send(call.kind, body, number=call.number):
                self.unsent.add(call.number)

    def drop(self, call: Call) -> None:
        """Forget a call that it was given, and say that it runs the next; called with the lock held."""
        super().drop(call)
        if self.call is not None:
            self.call.worker = self

    def on_message(self, message: Message) -> None:
        """It has answered: give it the next call, then hand over what it said."""
        if message.kind not in (Kind.RESULT, Kind.ERROR) or not self.expects(message):
            super().on_message(message)
            return
        made = True
        with self.feeding:
            with self.owner.lock:
                call = self.answered(message.number)
                if call is not None and call.kind == Kind.CONSTRUCT:
                    made = message.kind == Kind.RESULT
                    self.pace = 2 * QUICK_SECONDS  # nothing is known of its methods
                following = self._state.following() if made and call is not None else []
            self._give(following)
        if call is None:
            self.on_unasked(message.number)
            return
        settle_call(call, message, plain=self.owner.preparation.plain)
        if not made:
            self._state.bury(BrokenWorkerError("it could not be made"))  # where its future has not said why
            self.expect_end()
        elif self._state.closing:
            self._state.close()

    def on_gone(self, gone: Gone) -> None:
        """It has left the kernel, and its state with it."""
        call = self.call
        death = self.death(gone, call.name if call is not None else f"the actor {self._state.name}")
        if self._state.closing and gone.status == 0:
            death = BrokenWorkerError("it was closed", exit_status=0)
        self._state.die(death)  # before anybody hears of it and calls again
        if call is not None and call.kind == Kind.METHOD:
            with self.owner.lock:
                self._part_with_calls(died=gone.forked and not self.stopped)
        super().on_gone(gone)
        self._state.bury(death)

    def _part_with_calls(self, *, died: bool) -> None:
        """Let calls wait again that it has not begun with, and those that others may run; the lock is held.

        Args:
            died: Whether nobody has ended it.
        """
        unbegun = []
        while (call := super().take_back()) is not None:
            unbegun.append(call)
        for call in self.outstanding:
            if call.number in self.unsent:
                self.drop(call)
                unbegun.append(call)
        self._put_back(unbegun)
        for call in self._state.regain(self.outstanding) if died else ():
            self.drop(call)


class Actor:
    """An object in a process of its own, on devices of its own; made by :meth:`anyaccel.Pool.actor`.

    ``actor.method(...)`` calls a method there and returns a future. Calls begin in the order in which they were made,
    one after the other; so many run at the same time as the pool's ``max_concurrency`` says, in threads, those of
    ``async`` methods in one event loop. The devices are held until the process is gone; it ends with :meth:`close`,
    with :meth:`kill`, with its pool, and when nobody refers to the actor any more.

    Attributes:
        ready: Future of the construction; its result is the process id.

    Examples:
        >>> class Counter:
        ...     def __init__(self):
        ...         self.count = 0
        ...
        ...     def add(self, number):
        ...         self.count += number
        ...         return self.count
        >>> with anyaccel.Pool("GPU:1", machine="sim:H100:2") as pool:
        ...     counter = pool.actor(Counter)
        ...     [counter.add(number).result() for number in (1, 2, 3)]
        [1, 3, 6]
    """

    def __init__(self, state: Callee) -> None:
        self._state = state
        self.ready = state.ready
        # A finalizer runs wherever garbage is collected, perhaps under one of our locks: it only leaves a note.
        weakref.finalize(self, reactor().call_soon, state.close).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> partial[CallFuture]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self.call, name)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> CallFuture:
        """Call a method by name, such as one that is called like a method of this class.

        Raises:
            RuntimeError: When the actor was closed.
        """
        return self._state.call(method, args, kwargs)

    def close(self) -> None:
        """Take no more calls, and end once those that there are have been run."""
        self._state.close()

    def kill(self) -> None:
        """End the process now. Calls that have not been answered fail."""
        self._state.stop(0)

    def __reduce__(self) -> str:
        raise TypeError(
            f"the actor {self._state.name} belongs to the process that made it and cannot be sent to another"
        )

    def __repr__(self) -> str:
        state = "gone" if self._state.death else "closing" if self._state.closing else "alive"
        return f"<{type(self).__name__} {self._state.name}: {state}>"
