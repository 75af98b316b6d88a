"""An object that lives in a worker, and the calls of its methods."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.pool.call import AwaitableFuture, Call, CallFuture, Options, name_of
from anyaccel.pool.channel import MessageKind
from anyaccel.pool.payload import dumps
from anyaccel.pool.reactor import reactor

if TYPE_CHECKING:
    from anyaccel.pool.engine import Engine

Method = str | Callable[..., Any]
"""What is called of an actor's object: a method by its name, or a function that is given the object first."""


class Callee:
    """What has methods to be called: an actor, or several that are alike.

    What is private here is done in the thread of the reactor, as all that concerns a worker.

    Attributes:
        name: Name of its class.
        options: How its calls are to be run.
        kept: The same for its processes, which run calls of nobody else.
        queue: Calls of its methods that wait.
        closing: Whether it gets no more calls.
        death: Why it can run no call any more, or None.
    """

    def __init__(self, core: Engine, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self.kept = options.kept()
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
        return self._core.settings.preparation.plain

    def call(self, method: Method, args: Any, kwargs: Any) -> CallFuture:
        """Call a method once those that came before have begun, and there is room for it.

        Raises:
            RuntimeError: When it was closed.
        """
        call = self.prepare(name_of(method, args))
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
        call.kind = MessageKind.METHOD
        return call

    def enter(self, call: Call) -> None:
        """Let a call be run once those that came before have begun, and there is room for it.

        Raises:
            RuntimeError: When it was closed, or this is a fork of the process that it belongs to.
        """
        if self._core.foreign:
            self._core.check_open()
        if self.death is None and self.closing:
            raise RuntimeError(f"the actor {self.name} was closed and takes no more calls")
        self._core.keep(call)
        reactor().call_soon(partial(self._enter, call))

    def _enter(self, call: Call) -> None:
        if self.death is not None:
            call.fail(self._obituary(self.death))
            return
        with self._core.lock:
            self.queue.append(call)
        self._pull()

    def _pull(self) -> None:
        """Have a worker take the calls that wait, as many as it takes."""
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
        """A call was cancelled that had not begun: it is passed over, or taken back."""
        self._core.on_cancel(call)


class ActorState(Callee):
    """An actor, from the wish for it to its end.

    Attributes:
        member: Its worker, once there is one: the engine's, which has ``takes`` and ``pull``, ``finish`` and ``stop``.
        construction: The call that makes the object.
        pipelined: Whether its calls may be sent while others run: they are for no other worker.
    """

    pipelined = True

    def __init__(self, core: Engine, name: str, options: Options) -> None:
        super().__init__(core, name, options)
        self.member: Any = None
        self.construction = Call(name, Options.of(needs=options.needs, max_calls=1), self._on_cancel)
        self.construction.kind = MessageKind.CONSTRUCT
        self.construction.actor = self
        self.construction.future.add_done_callback(self._on_constructed)

    @property
    def ready(self) -> CallFuture:
        """Future of its construction."""
        return self.construction.future

    def _pull(self) -> None:
        if self.member is not None:
            self.member.pull()

    def close(self) -> None:
        """Take no more calls; end when those that wait have been run."""
        if not self._core.foreign:
            reactor().call_soon(self._close)  # first: an interrupt may come in between
            self.closing = True

    def _close(self) -> None:
        self.closing = True
        member = self.member
        if member is not None and not (member.outstanding or self.queue or member.ending):
            member.finish()

    def stop(self, grace: float) -> None:
        """End now, whatever it is doing.

        Args:
            grace: Seconds between asking its process to end and killing it.
        """
        if not self._core.foreign:
            reactor().call_soon(partial(self._stop, grace))
            self.closing = True

    def _stop(self, grace: float) -> None:
        self.closing = True
        if self.member is not None:
            self.member.stop(grace)
        else:
            self.bury(BrokenWorkerError("it was killed before it had been made"))
            self._core.on_cancel(self.construction)

    def next_for(self, member: Any) -> Call | None:
        """Give its worker the next call that waits, if it takes that."""
        with self._core.lock:
            while self.queue and not self.queue[0].undecided():  # cancelled
                self.queue.popleft()
            if not self.queue or not member.takes(self.queue[0]):
                return None
            return self.queue.popleft()

    def put_back(self, calls: list[Call]) -> None:
        """Let calls wait again, in front of the others."""
        with self._core.lock:
            self.queue.extendleft(reversed(calls))

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
        super()._on_cancel(call)
        if call is self.construction:
            if self.member is not None:  # which may have made it this moment
                self.member.stop(self._core.settings.grace)
            self.bury(BrokenWorkerError("its construction was cancelled"))


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
