"""Actors: an object in a worker, and calls of the object's methods."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.pool.call import AwaitableFuture, Call, CallFuture, Options, get_call_name
from anyaccel.pool.messages import MessageKind, dumps
from anyaccel.pool.reactor import reactor

if TYPE_CHECKING:
    from anyaccel.pool.engine import Engine

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
Method = str | Callable[..., Any]
"""A method by its name, or a function that takes the object as its first argument."""


def get_method_name(method: Method) -> str:
    """Return the name of a method: a text is the name itself, a function has it as ``__name__``.

    Raises:
        AttributeError: When a callable has no name, such as a partial.
    """
    return method if isinstance(method, str) else method.__name__


class Callee:
    """The receiver of method calls: one actor, or a group of equal ones.

    Private methods run in the thread of the reactor, like everything that concerns a worker.

    Attributes:
        name: Name of the class in messages.
        options: Options of the calls.
        queue: Method calls that wait.
        closed: Whether no more calls are taken; set by :meth:`close` and :meth:`stop` at once.
        closing: Whether the processes exit after the queued calls; set in the reactor's thread, behind the notes of the
            calls that were made before: a worker without calls may be about to get these.
        death: Why no call can be run any more, or None.
        ready: Future of the construction.
    """

    ready: AwaitableFuture[Any]

    def __init__(self, core: Engine, name: str, options: Options) -> None:
        self.name = name
        self.options = options
        self.queue: deque[Call] = deque()
        self.closed = False
        self.closing = False
        self.death: WorkerError | None = None
        self._core = core

    @property
    def plain(self) -> bool:
        """Whether answers are read as plain data."""
        return self._core.settings.preparation.plain

    def call(self, method: Method, args: Any, kwargs: Any) -> CallFuture[Any]:
        """Pickle a call of a method, copy the buffers, and queue the call behind earlier calls.

        Returns:
            The future of its result. An exception of pickling fails it, also for a closed actor or in a forked child,
            and so does the death of the actor.

        Raises:
            RuntimeError: When the actor was closed and is not dead, or belongs to the parent of this process.
        """
        call = self.prepare(get_call_name(method, args))
        try:
            call.body = dumps((method, args, kwargs))
        except Exception as error:  # noqa: BLE001 - the future reports it
            call.fail(error)
        else:
            self.enter(call)
        return call.future

    def prepare(self, method: str) -> Call:
        """Make a call of the kind METHOD, named ``class.method``, without a body.

        The caller sets ``body``, and queues the call with :meth:`enter`.
        """
        call = Call(f"{self.name}.{method}", self.options, self._on_cancel)
        call.kind = MessageKind.METHOD
        return call

    def enter(self, call: Call) -> None:
        """Copy the arguments' buffers, and queue a call by a note to the reactor; any thread may.

        If the actor is dead, also after :meth:`close`, the reactor fails the call.

        Raises:
            RuntimeError: When the actor was closed and is not dead, or belongs to the parent of this process.
        """
        if self._core.foreign:
            self._core.check_open()
        if self.death is None and self.closed:
            raise RuntimeError(f"the actor {self.name} was closed and takes no more calls")
        self._core.copy_arguments(call)
        reactor().call_soon(partial(self._enter, call))

    def _enter(self, call: Call) -> None:
        """Queue a call, even a cancelled one, and have a worker take calls; fail the call if the actor is dead."""
        if self.death is not None:
            call.fail(self._make_gone_error(self.death))
            return
        self.queue.append(call)
        self._pull()

    def _pull(self) -> None:
        """Have a worker take calls from the queue; each subclass defines how."""
        raise NotImplementedError

    def close(self) -> None:
        """Take no more calls; the processes exit after the queued calls. Returns at once; any thread may call it.

        No effect in a forked child.
        """
        if not self._core.foreign:
            reactor().call_soon(self._close)  # before the flag: an interrupt may come in between
            self.closed = True

    def _close(self) -> None:
        """Take no more calls, and shut down workers without work; each subclass defines how.

        A worker with work is shut down by the engine after the last call.
        """
        raise NotImplementedError

    def stop(self, grace: float) -> None:
        """Take no more calls, and have the reactor stop the workers; return before they end. Any thread may call it.

        Calls without an answer fail. No effect in a forked child.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
        """
        if not self._core.foreign:
            reactor().call_soon(partial(self._stop, grace))
            self.closed = True

    def _stop(self, grace: float) -> None:
        """Take no more calls, and stop the workers; without a worker, fail the calls. Each subclass defines how."""
        raise NotImplementedError

    def _make_gone_error(self, death: WorkerError) -> BrokenWorkerError:
        """Make the error of a single call: a new one, because an exception keeps the traceback of each raise.

        It has the exit status and the cause of the death.
        """
        error = BrokenWorkerError(
            f"the actor {self.name} has gone: {death}", exit_status=getattr(death, "exit_status", None)
        )
        error.__cause__ = death.__cause__
        return error

    def _fail_waiting(self, death: WorkerError) -> None:
        """Remove all queued calls, and fail each with a new error."""
        waiting = tuple(self.queue)
        self.queue.clear()
        for call in waiting:
            call.fail(self._make_gone_error(death))

    def _on_cancel(self, call: Call) -> None:
        """Have the engine drop a cancelled method call; a method that has started goes on. In the reactor's thread."""
        self._core.on_cancel(call)


class ActorState(Callee):
    """A single actor, from request to exit.

    Attributes:
        member: Its worker, once there is one: a class of the engine with ``accepts``, ``pull``, ``shut_down``,
            ``stop``.
        construction: The call that makes the object.
        pipelined: Whether calls may be sent while others run, because no other worker could run them.
    """

    pipelined = True

    def __init__(self, core: Engine, name: str, options: Options) -> None:
        super().__init__(core, name, options)
        self.member: Any = None
        self.construction = Call(name, Options(needs=options.needs, max_calls=1), self._on_cancel)
        self.construction.kind = MessageKind.CONSTRUCT
        self.construction.actor = self
        self.ready = self.construction.future
        self.ready.add_done_callback(self._on_constructed)

    def _pull(self) -> None:
        """Have the worker take calls from the queue; no effect without a worker."""
        if self.member is not None:
            self.member.pull()

    def _close(self) -> None:
        """Take no more calls, and shut down a worker without work.

        A worker that has calls, or is not made yet, is shut down by the engine after the last call.
        """
        self.closed = self.closing = True
        member = self.member
        if member is not None and not (member.outstanding or self.queue or member.ending):
            member.shut_down()

    def _stop(self, grace: float) -> None:
        """Take no more calls, and stop the worker.

        Unanswered calls fail when the worker has exited. Without a worker, the construction and the queued calls fail
        at once, and the engine drops the construction.
        """
        self.closed = self.closing = True
        if self.member is not None:
            self.member.stop(grace)
        else:
            self.on_gone(BrokenWorkerError("it was killed before it had been made"))
            self._core.on_cancel(self.construction)

    def next_for(self, member: Any) -> Call | None:
        """Take the next pending call from the queue; drop calls before it that were cancelled or have an outcome.

        Returns:
            The call; None if there is none, or the worker does not accept it now. Then the call stays in the queue.
        """
        while self.queue and not self.queue[0].is_pending():  # cancelled
            self.queue.popleft()
        if not self.queue or not member.accepts(self.queue[0]):
            return None
        return self.queue.popleft()

    def put_back(self, calls: list[Call]) -> None:
        """Put calls back in front of the queue, in the given order; no worker takes them now.

        The caller fails the calls of a dead actor, by :meth:`on_gone`.
        """
        self.queue.extendleft(reversed(calls))

    def set_death(self, death: WorkerError) -> None:
        """Record why no call will be run any more; the first reason counts."""
        self.death = self.death or death

    def on_gone(self, death: WorkerError) -> None:
        """Fail the construction and the queued calls, because the worker has gone.

        Calls that the worker was given are left to the engine. The first recorded death stays the reason for the
        calls. No effect on a construction with an outcome.
        """
        self.set_death(death)
        self.construction.fail(death)
        self._fail_waiting(self.death or death)

    def _on_constructed(self, future: Future[Any]) -> None:
        """Record the death and fail the queued calls if the construction has failed; else no effect.

        Also no effect if it was cancelled: :meth:`_on_cancel` does the same.
        """
        cause = None if future.cancelled() else future.exception()
        if cause is not None:
            death = BrokenWorkerError(f"it could not be made: {type(cause).__name__}: {cause}")
            death.__cause__ = cause
            self.on_gone(death)

    def _on_cancel(self, call: Call) -> None:
        """Have the engine drop a cancelled call; a cancelled construction ends the actor and fails its calls.

        A method that has started goes on. After a cancelled construction, a worker that the actor has by then is
        stopped with the pool's grace.
        """
        super()._on_cancel(call)
        if call is self.construction:
            if self.member is not None:  # the object may have been made just now
                self.member.stop(self._core.settings.grace)
            self.on_gone(BrokenWorkerError("its construction was cancelled"))


class Actor(Generic[T]):
    """An object in a process of its own, on devices of its own; made by :meth:`anyaccel.Pool.actor`.

    ``actor.method(...)`` calls a method there and returns a future. Calls start in the order in which they were made,
    one after the other. With ``max_concurrency``, so many run at the same time, in threads, and ``async`` methods in
    one event loop. The devices are held until the process has exited: after :meth:`close`, after :meth:`kill`, with its
    pool, and when nothing refers to the actor any more.

    Type checkers check ``actor.call(Class.method, ...)``; they take any name and arguments in ``actor.method(...)``.

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
        # A finalizer runs in any thread that collects garbage, perhaps under one of our locks: it only leaves a note.
        weakref.finalize(self, reactor().call_soon, state.close).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Callable[..., CallFuture[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)
        return partial(self.call, name)

    @overload
    def call(
        self, method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> CallFuture[R]: ...

    @overload
    def call(self, method: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[R]: ...

    @overload
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> CallFuture[Any]: ...

    def call(self, method: Method, /, *args: Any, **kwargs: Any) -> CallFuture[Any]:
        """Call a method of the object, after earlier calls; return the future of the result.

        Arguments are copied before the return. An exception of pickling, or the death of the actor, fails the future.
        Calls of a group of actors start in order, each on a free actor.

        Args:
            method: The method as an attribute of its class, such as ``Model.score``, so that type checkers know its
                arguments and result; or its name. Either way, the object's own method of this name is called.
            args: Arguments of the method.
            kwargs: Keyword arguments of the method.

        Raises:
            RuntimeError: When the actor was closed and is not dead, or belongs to the parent of this process.
            AttributeError: When a callable has no name, such as a partial.
        """
        return self._state.call(get_method_name(method), args, kwargs)

    def close(self) -> None:
        """Take no more calls; the process exits after the queued calls.

        Returns at once. A later call raises RuntimeError or, once the process has exited, fails its future. No effect
        in a forked child.
        """
        self._state.close()

    def kill(self) -> None:
        """Take no more calls, have the process killed, and return at once. No effect in a forked child.

        Calls without an answer fail: when the process has exited, or soon if none was started.
        """
        self._state.stop(0)

    def __reduce__(self) -> str:
        raise TypeError(
            f"the actor {self._state.name} belongs to the process that made it and cannot be sent to another"
        )

    def __repr__(self) -> str:
        state = "gone" if self._state.death else "closing" if self._state.closed else "alive"
        return f"<{type(self).__name__} {self._state.name}: {state}>"
