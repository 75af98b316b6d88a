"""An object that lives in a worker, and the calls of its methods, one after the other."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.pool.call import Call, CallFuture, Options, settle_call
from anyaccel.pool.channel import Kind, Message
from anyaccel.pool.forkserver.client import Gone
from anyaccel.pool.payload import dumps
from anyaccel.pool.process import Held, Owner, WorkerProcess

if TYPE_CHECKING:
    from anyaccel.pool.engine import Engine


class ActorState:
    """An actor, from the wish for it to its end.

    Attributes:
        name: Name of its class.
        queue: Calls of its methods that wait.
        member: Its worker, once there is one.
        closing: Whether it gets no more calls.
        death: Why it can run no call any more, or None.
        options: How its calls are to be run.
        construction: The call that makes the object.
    """

    def __init__(self, core: Engine, name: str, options: Options) -> None:
        self.name = name
        self.queue: deque[Call] = deque()
        self.member: ActorProcess | None = None
        self.closing = False
        self.death: WorkerError | None = None
        self._core = core
        self.options = options
        self.construction = Call(name, Options.of(needs=options.needs, max_calls=1), self._on_cancel)
        self.construction.kind = Kind.CONSTRUCT
        self.construction.actor = self

    def call(self, method: str, args: Any, kwargs: Any) -> CallFuture:
        """Call a method once those that came before have been.

        Raises:
            RuntimeError: When the actor was closed.
        """
        call = self.prepare(method)
        try:
            call.body = dumps((method, args, kwargs))
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
        """Let a call be run once those that came before have been.

        Raises:
            RuntimeError: When the actor was closed.
        """
        with self._core.lock:
            death = self.death
            if death is None and self.closing:
                raise RuntimeError(f"the actor {self.name} was closed and takes no more calls")
            member = self.member
            idle = death is None and member is not None and member.call is None and not self.queue
            if idle and member is not None:
                member.call = call
            elif death is None:
                self.queue.append(call)
        if idle and member is not None:
            member.run(call)
        elif death is not None:
            call.fail(self._obituary(death))
        else:
            self._core.keep(call)

    def close(self) -> None:
        """Take no more calls; end when those that wait have been run."""
        with self._core.lock:
            self.closing = True
            member = self.member
            idle = member is not None and member.call is None and not self.queue and not member.ending
        if idle and member is not None:
            member.finish()

    def kill(self) -> None:
        """End now, whatever it is doing."""
        with self._core.lock:
            self.closing = True
            member = self.member
        if member is None:
            self.bury(BrokenWorkerError("it was killed before it had been made"))
            self._core.on_cancel(self.construction)
        else:
            member.stop(0)

    def following(self) -> Call | None:
        """The next call, taken from the queue; called with the lock held."""
        while self.queue:
            call = self.queue.popleft()
            if not call.future.done():
                return call
        return None

    def die(self, death: WorkerError) -> None:
        """No call will be run any more."""
        with self._core.lock:
            self.death = self.death or death

    def bury(self, death: WorkerError) -> None:
        """It has gone: whatever waits for it fails."""
        self.die(death)
        with self._core.lock:
            death = self.death or death
            waiting, self.queue = self.queue, deque()
        self.construction.fail(death)
        for call in waiting:
            call.fail(self._obituary(death))

    def fail_to_be_made(self) -> None:
        """The call that makes the object has failed."""
        future = self.construction.future
        cause = None if future.cancelled() else future.exception()
        death = BrokenWorkerError(f"it could not be made: {type(cause).__name__}: {cause}")
        death.__cause__ = cause
        self.bury(death)

    def _obituary(self, death: WorkerError) -> BrokenWorkerError:
        """Why a call is not run; each call has its own, since an exception remembers who raised it."""
        error = BrokenWorkerError(
            f"the actor {self.name} has gone: {death}", exit_status=getattr(death, "exit_status", None)
        )
        error.__cause__ = death.__cause__
        return error

    def _on_cancel(self, call: Call) -> None:
        if call is self.construction:
            self._core.on_cancel(call)
            self.bury(BrokenWorkerError("its construction was cancelled"))


class ActorProcess(WorkerProcess):
    """The worker of an actor."""

    __slots__ = ("_state",)

    def __init__(self, owner: Owner, options: Options, held: Held | None, call: Call | None) -> None:
        super().__init__(owner, Options.of(needs=options.needs, max_calls=0), held, call)
        assert call is not None  # noqa: S101 - it makes the object
        assert call.actor is not None  # noqa: S101
        self._state = call.actor
        self._state.member = self

    @property
    def busies_processor(self) -> bool:
        """Not: it may live for ever, and is idle for most of that."""
        return False

    def leave(self) -> None:
        """The pool takes no more calls."""
        self._state.close()

    def on_message(self, message: Message) -> None:
        """It has answered: give it the next call, then hand over what it said."""
        if message.kind not in (Kind.RESULT, Kind.ERROR) or not self.expects(message):
            super().on_message(message)
            return
        with self.owner.lock:
            call = self.call
            unknown = call is not None and call.number != message.number
            if not unknown:
                self.call, self.last = None, message.number
        if unknown:
            self.on_unasked(message.number)
            return
        with self.owner.lock:
            made = call is None or call.kind != Kind.CONSTRUCT or message.kind == Kind.RESULT
            following = self._state.following() if made and not self.ending else None
            self.call = following
        if following is not None:
            self.run(following)
        if call is not None:
            settle_call(call, message, plain=self.owner.preparation.plain)
        if not made:
            self._state.fail_to_be_made()
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
        super().on_gone(gone)
        self._state.bury(death)


class Actor:
    """An object in a process of its own, on devices of its own; made by :meth:`anyaccel.Pool.actor`.

    ``actor.method(...)`` calls a method there and returns a future. Calls run one after the other, in the order in
    which they were made. The devices are held until the process is gone; it ends with :meth:`close`, with
    :meth:`kill`, with its pool, and when nobody refers to the actor any more.

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

    def __init__(self, state: ActorState) -> None:
        self._state = state
        self.ready = state.construction.future

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
        self._state.kill()

    def __reduce__(self) -> str:
        raise TypeError(
            f"the actor {self._state.name} belongs to the process that made it and cannot be sent to another"
        )

    def __repr__(self) -> str:
        state = "gone" if self._state.death else "closing" if self._state.closing else "alive"
        return f"<Actor {self._state.name}: {state}>"
