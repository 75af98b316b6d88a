"""Actors: objects in workers, each in a process of its own, and calls of their methods; streams are actors, too."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from anyaccel.durations import Duration
from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.pool.call import AwaitableFuture, Call, CallFuture, Options, has_result
from anyaccel.pool.messages import MessageKind, Pickled, dumps
from anyaccel.pool.reactor import find_reactor
from anyaccel.pool.results import Batches, MapResults, Results, UnorderedOptions, cancel_all, check_batch, read_end

if TYPE_CHECKING:
    from anyaccel.pool.engine import Engine
    from anyaccel.pool.results import ProgressCallback

T = TypeVar("T")
A = TypeVar("A")
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


class ActorGroup:
    """One actor, or several equal ones, with a common queue of method calls; from request to exit of the last.

    A single actor dies for good. One of several that has died is replaced as soon as there are calls, unless it could
    not be constructed: the next one would fail as well. Private methods run in the thread of the reactor, like
    everything that concerns a worker.

    Args:
        core: The engine.
        name: Name of the class in messages.
        options: Options of the calls.
        size: Number of actors; None for a single one, which is not replaced.

    Attributes:
        core: The engine.
        name: Name of the class in messages.
        options: Options of the calls.
        pipelined: Whether calls may be sent while others run, because no other worker could run them.
        queue: Method calls that wait.
        actors: The actors that live, or are being constructed.
        begun: The actors that were made first, without replacements.
        closed: Whether no more calls are taken; set by :meth:`close` and :meth:`stop` at once.
        closing: Whether the processes exit after the queued calls; set in the reactor's thread, behind the notes of the
            calls that were made before: a worker without calls may be about to get these.
        death: Why no call can be run any more, or None.
        ready: Future of the process id of a single actor; else of those of the first actors, without replacements.
    """

    ready: AwaitableFuture[Any]

    def __init__(self, core: Engine, name: str, options: Options, size: int | None = None) -> None:
        self.core = core
        self.name = name
        self.options = options
        self.pipelined = size is None
        self.queue: deque[Call] = deque()
        self.closed = self.closing = False
        self.death: WorkerError | None = None
        self._size = size or 1
        self._work: Pickled | tuple[Any, ...] = ()
        self.actors = [ActorState(self) for _ in range(self._size)]
        self.begun = tuple(self.actors)
        if size is None:
            self.ready = self.begun[0].construction.future
        else:
            self.ready = AwaitableFuture()
            self.ready.set_running_or_notify_cancel()
            for state in self.begun:
                state.construction.future.add_done_callback(self._on_made)

    def begin(self, work: Pickled | tuple[Any, ...]) -> None:
        """Start the construction of the actors; after an error, those that were begun go on.

        Args:
            work: Class, arguments, keyword arguments and ``max_concurrency``; pickled if there are several actors.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
            AnyaccelError: When the engine cannot take calls, for instance without a machine; see its ``enter``.
        """
        self._work = work
        self.core.groups.add(self)
        for state in self.begun:
            self.core.enter(state.construction, work)

    # Calls

    def call(self, method: str, args: Any, kwargs: dict[str, Any] | None) -> CallFuture[Any]:
        """Pickle a call of a method, copy the buffers, and queue the call behind earlier calls.

        Args:
            method: Name of the method.
            args: Its arguments; of a batch, a tuple of them for each call.
            kwargs: Its keyword arguments; None for a batch.

        Returns:
            The future of its result. An exception of pickling fails it, also for a closed actor or in a forked child,
            and so does the death of the actor.

        Raises:
            RuntimeError: When the actor was closed and is not dead, or belongs to the parent of this process.
        """
        call = self.prepare(method)
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
        call = Call(f"{self.name}.{method}", self.options, self.core.on_cancel)
        call.kind = MessageKind.METHOD
        return call

    def enter(self, call: Call) -> None:
        """Copy the arguments' buffers, and queue a call by a note to the reactor; any thread may.

        If the actor is dead, also after :meth:`close`, the reactor fails the call.

        Raises:
            RuntimeError: When the actor was closed and is not dead, or belongs to the parent of this process.
        """
        if self.core.foreign:
            self.core.check_open()
        if self.death is None and self.closed:
            raise RuntimeError(f"the actor {self.name} was closed and takes no more calls")
        self.core.copy_arguments(call)
        find_reactor().call_soon(partial(self._enter, call))

    def _enter(self, call: Call) -> None:
        """Queue a call, even a cancelled one, and have a worker take calls; fail the call if the actor is dead."""
        self.queue.append(call)
        if self.death is not None:
            self._fail_waiting(self.death)
            return
        workers = [state.member for state in self.actors if state.member is not None]
        for worker in sorted(workers, key=lambda worker: len(worker.running)):
            worker.pull()
        self._replace()

    def next_for(self, worker: Any) -> Call | None:
        """Take the next pending call from the queue; drop calls before it that were cancelled or have an outcome.

        Returns:
            The call; None if there is none, or the worker does not accept it now. Then the call stays in the queue.
        """
        while self.queue and not self.queue[0].is_pending():  # cancelled
            self.queue.popleft()
        if not self.queue or not worker.accepts(self.queue[0]):
            return None
        return self.queue.popleft()

    def put_back(self, calls: list[Call]) -> None:
        """Put calls back in front of the queue, in the given order; no worker takes them now.

        The caller reports the end of their actor next, by :meth:`ActorState.on_gone`.
        """
        self.queue.extendleft(reversed(calls))

    def _fail_waiting(self, death: WorkerError) -> None:
        """Remove all queued calls, and fail each with a new error: an exception keeps the traceback of each raise.

        It has the exit status and the cause of the death.
        """
        waiting = tuple(self.queue)
        self.queue.clear()
        for call in waiting:
            status = getattr(death, "exit_status", None)
            error = BrokenWorkerError(f"the actor {self.name} has gone: {death}", exit_status=status)
            error.__cause__ = death.__cause__
            call.fail(error)

    # The end

    def close(self) -> None:
        """Take no more calls; the processes exit after the queued calls. Returns at once; any thread may call it.

        No effect in a forked child.
        """
        if not self.core.foreign:
            find_reactor().call_soon(self._close)  # before the flag: an interrupt may come in between
            self.closed = True

    def _close(self) -> None:
        """Take no more calls, and shut down workers without work.

        A worker that has calls, or is not made yet, is shut down by the engine after the last call.
        """
        self.closed = self.closing = True
        for worker in [state.member for state in self.actors]:
            if worker is not None and not (worker.running or self.queue or worker.ending):
                worker.shut_down()

    def stop(self, grace: float) -> None:
        """Take no more calls, and have the reactor stop the workers; return before they end. Any thread may call it.

        Calls without an answer fail. No effect in a forked child.

        Args:
            grace: Seconds between SIGTERM and SIGKILL.
        """
        if not self.core.foreign:
            find_reactor().call_soon(partial(self._stop, grace))
            self.closed = True

    def _stop(self, grace: float) -> None:
        """Take no more calls, and stop the workers without replacements; queued calls fail with the last actor.

        The construction of an actor without a worker fails at once, and the engine drops it.
        """
        self.closed = self.closing = True
        self._size = 0
        for state in tuple(self.actors):
            if state.member is not None:
                state.member.stop(grace)
            else:
                state.on_gone(BrokenWorkerError("it was killed before it had been made"))
                self.core.on_cancel(state.construction)
        if not self.actors:  # a call that another thread is about to queue must fail, not wait
            self._end(BrokenWorkerError("it was killed"))

    def on_actor_gone(self, state: ActorState, death: WorkerError) -> None:
        """Remove a dead actor; construct missing actors if calls wait. No effect the second time.

        A single actor, and one that was never made, makes the group smaller for good. If no actor is left and none may
        be made, the group is dead and its queued calls fail.
        """
        if state not in self.actors:
            return
        self.actors.remove(state)
        if self.pipelined or not has_result(state.construction.future):
            self._size -= 1
        self._replace()
        if self._size <= 0 and not self.actors:
            self._end(death)

    def _end(self, death: WorkerError) -> None:
        """Record why no call can be run any more, and fail the queued calls; the first reason counts."""
        self.core.groups.discard(self)
        self.death = self.death or death
        self._fail_waiting(self.death)

    def _replace(self) -> None:
        """Construct replacements of dead actors while calls wait.

        A replacement that the engine refuses, as in a closed or broken pool, fails, which makes the group smaller.
        """
        while self.queue and len(self.actors) < self._size:
            state = ActorState(self)
            self.actors.append(state)
            try:
                self.core.enter(state.construction, self._work)
            except Exception as error:  # noqa: BLE001 - the calls report it
                state.on_gone(BrokenWorkerError(f"it cannot be made again: {error}"))

    def _on_made(self, _: Future[Any]) -> None:
        """Set the outcome of :attr:`ready` after the last construction of a first actor.

        The outcome is the exception of the first failed actor by position, if any, else the process ids.
        """
        if not all(state.construction.future.done() for state in self.begun):
            return
        failure = next(filter(None, (state.get_failure() for state in self.begun)), None)
        if failure is not None:
            self.ready.set_exception(failure)
        else:
            self.ready.set_result([state.construction.future.result() for state in self.begun])


class ActorState:
    """One actor of a group, from request to exit.

    Attributes:
        group: Its group, which has the calls.
        member: Its worker, once there is one: a class of the engine with ``accepts``, ``running``, ``ending``,
            ``pull``, ``shut_down``, ``stop``.
        construction: The call that makes the object.
    """

    def __init__(self, group: ActorGroup) -> None:
        self.group = group
        self.member: Any = None
        self.construction = Call(group.name, Options(needs=group.options.needs, max_calls=1), self._on_cancel)
        self.construction.kind = MessageKind.CONSTRUCT
        self.construction.actor = self
        self.construction.future.add_done_callback(self._on_constructed)

    def get_failure(self) -> BaseException | None:
        """Return the exception of the construction, which must be over; None if it succeeded.

        A cancelled construction gives a new BrokenWorkerError each time.
        """
        future = self.construction.future
        return BrokenWorkerError("its construction was cancelled") if future.cancelled() else future.exception()

    def on_gone(self, death: WorkerError) -> None:
        """Remove the actor from the group, and fail the construction, because the worker has gone.

        Calls that the worker was given are left to the engine. No effect on a construction with an outcome, and none on
        the group the second time.
        """
        self.group.on_actor_gone(self, death)
        self.construction.fail(death)

    def _on_constructed(self, future: Future[Any]) -> None:
        """Remove the actor from its group if the construction has failed; it is not replaced.

        If no actor is left, the group is dead, and queued calls fail with BrokenWorkerError. The worker is not touched
        here: the engine ends it. No effect after a success, or after a cancellation, which :meth:`_on_cancel` handles.
        """
        cause = None if future.cancelled() else future.exception()
        if cause is not None:
            death = BrokenWorkerError(f"it could not be made: {type(cause).__name__}: {cause}")
            death.__cause__ = cause
            self.on_gone(death)

    def _on_cancel(self, call: Call) -> None:
        """Have the engine drop the cancelled construction, which ends the actor.

        A worker that the actor has by then is stopped with the pool's grace.
        """
        core = self.group.core
        core.on_cancel(call)
        if self.member is not None:  # the object may have been made just now
            self.member.stop(core.settings.grace)
        self.on_gone(BrokenWorkerError("its construction was cancelled"))


class Stream(Results[T]):
    """The yielded items of a function, each without delay.

    For one ``for`` or ``async for``. The worker is some items ahead and then waits. When the stream ends early - by an
    exception, by :meth:`close`, or because nothing refers to it any more - the function is ended: in its ``yield`` like
    a generator that is closed, elsewhere with the pool's time of grace.

    Args:
        group: The actor that has the :class:`YieldedItems`.
        owner: The pool, which must live as long as the stream.
    """

    def __init__(self, group: ActorGroup, owner: object) -> None:
        super().__init__()
        self._group = group
        self._owner = owner
        for _ in range(group.options.ahead):
            self._take()
        self._watch_references()

    def _take(self) -> None:
        """Request a further item from the worker, and append its future.

        If the actor is closed, as after a shutdown of the pool, or if this process is a forked child, no item is
        requested: the iteration raises RuntimeError after the items requested before. If the worker has exited already,
        the appended future fails, and the iteration raises BrokenWorkerError instead.
        """
        try:
            self._futures.append(self._group.call("take", (), {}))
        except RuntimeError as error:  # the pool was shut down: raised after the items that are there
            if not self._futures:
                self._failure = error

    def _accept(self, value: tuple[T, ...]) -> None:
        """Store the item of the first future, and have a further item produced.

        An empty tuple is the end: the other requests are cancelled, and the actor is closed.
        """
        self._futures.popleft()
        self._values.extend(value)
        if value:
            self._take()
        else:
            cancel_all(self._futures)
            self._futures.clear()
            self._group.close()

    def _make_canceller(self) -> Callable[[], None]:
        """Return a function that ends the stream's function, without a reference to the stream."""
        return partial(_end_stream, self._group, self._futures)


def _end_stream(group: ActorGroup, takes: deque[AwaitableFuture[Any]]) -> None:
    """End the function of a stream left before the end.

    Returns at once. The ``takes`` are cancelled first. If the construction is not over, only the construction is
    cancelled then. Else, while an item is produced, the process is stopped; without an item in production, the
    generator is closed and the process exits after that, unless it is exiting already.

    Args:
        group: The actor of the stream.
        takes: The futures of requested items, which are cancelled and removed.
    """
    cancel_all(takes)
    runs = any(not take.done() for take in takes)
    takes.clear()
    if not group.ready.done() and group.ready.cancel():
        return
    if runs:
        group.stop(group.core.settings.grace)
    elif not group.closed:
        with contextlib.suppress(RuntimeError):  # the pool was shut down just now, which ends the actor as well
            group.call("end", (), {})
        group.close()


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

    def __init__(self, group: ActorGroup) -> None:
        self._group = group
        self.ready = group.ready
        # A finalizer runs in any thread that collects garbage, perhaps under one of our locks: it only leaves a note.
        weakref.finalize(self, find_reactor().call_soon, group.close).atexit = False

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
        return self._group.call(get_method_name(method), args, kwargs)

    def close(self) -> None:
        """Take no more calls; the process exits after the queued calls.

        Returns at once. A later call raises RuntimeError or, once the process has exited, fails its future. No effect
        in a forked child.
        """
        self._group.close()

    def kill(self) -> None:
        """Take no more calls, have the process killed, and return at once. No effect in a forked child.

        Calls without an answer fail: when the process has exited, or soon if none was started.
        """
        self._group.stop(0)

    def __reduce__(self) -> str:
        raise TypeError(
            f"the actor {self._group.name} belongs to the process that made it and cannot be sent to another; call it"
            " there, and pass results"
        )

    def __repr__(self) -> str:
        state = "gone" if self._group.death else "closing" if self._group.closed else "alive"
        return f"<{type(self).__name__} {self._group.name}: {state}>"


class Actors(Actor[T]):
    """A group of equal actors, used as one; made by :meth:`anyaccel.Pool.actors`.

    ``actors.method(...)`` calls a method of one that is free, and returns a future. An actor that has died is replaced
    as soon as there are calls for it, unless its construction failed; the calls that it ran fail, or are run again as
    often as the pool's ``retries`` says.

    Attributes:
        ready: Future of the process ids of the first actors, without later replacements.

    Examples:
        >>> class Model:
        ...     def score(self, x):
        ...         return 2 * x
        >>> with anyaccel.Pool("GPU:1", machine="sim:H100:2") as pool:
        ...     models = pool.actors(Model, 2)
        ...     print(list(models.map("score", [1, 2, 3])))
        [2, 4, 6]
    """

    @overload
    def map(
        self,
        method: Callable[[T, A], R],
        iterable: Iterable[A],
        /,
        **options: Unpack[UnorderedOptions],
    ) -> Results[R]: ...

    @overload
    def map(
        self,
        method: str,
        /,
        *iterables: Iterable[Any],
        **options: Unpack[UnorderedOptions],
    ) -> Results[Any]: ...

    def map(
        self,
        method: Method,
        /,
        *iterables: Iterable[Any],
        timeout: Duration | None = None,
        batch: int | None = None,
        progress: bool | ProgressCallback = False,
    ) -> Results[Any]:
        """Call a method over arguments; the results come in their order. See :meth:`anyaccel.Pool.map`.

        All calls are submitted at once. An exception of pickling is raised in place of the results of its batch. When
        the iteration ends early, the calls that wait are cancelled, and running methods go on.

        Args:
            method: The method as an attribute of its class, for type checkers, or its name; see :meth:`call`.
            iterables: Its arguments, one from each; the shortest decides.
            timeout: Time from now until all results must be there; None for no limit.
            batch: Number of calls that travel in one message; None for 1.
            progress: As for :meth:`anyaccel.Pool.map`.

        Raises:
            ValueError: When ``batch`` is no whole number of 1 or more.
            RuntimeError: When there are arguments, and the actors were closed and are not dead, or belong to the parent
                of this process.
            UsageError: When ``timeout`` is no duration; no call was submitted then.
            AttributeError: When a callable has no name, such as a partial.
        """
        return self._run_all(method, iterables, timeout, batch, progress, in_order=True)

    @overload
    def map_unordered(
        self,
        method: Callable[[T, A], R],
        iterable: Iterable[A],
        /,
        **options: Unpack[UnorderedOptions],
    ) -> Results[R]: ...

    @overload
    def map_unordered(
        self,
        method: str,
        /,
        *iterables: Iterable[Any],
        **options: Unpack[UnorderedOptions],
    ) -> Results[Any]: ...

    def map_unordered(
        self,
        method: Method,
        /,
        *iterables: Iterable[Any],
        timeout: Duration | None = None,
        batch: int | None = None,
        progress: bool | ProgressCallback = False,
    ) -> Results[Any]:
        """Call a method over arguments, as :meth:`map` does, but return the results in the order of completion.

        The results of a batch come together, when the whole batch is over.
        """
        return self._run_all(method, iterables, timeout, batch, progress, in_order=False)

    def _run_all(
        self,
        method: Method,
        iterables: tuple[Iterable[Any], ...],
        timeout: Duration | None,
        batch: int | None,
        progress: bool | ProgressCallback,
        *,
        in_order: bool,
    ) -> Results[Any]:
        """Submit a method over zipped arguments in batches; return the results, in order or as soon as they are there.

        Raises:
            ValueError, RuntimeError, UsageError: As for :meth:`map`.
            AttributeError: When ``method`` is a callable without a name; a name that the object lacks fails its call.
        """
        check_batch(batch=batch)
        end = read_end(timeout)
        batches = Batches(
            zip(*iterables, strict=False),
            lambda part, _: self._group.call(get_method_name(method), part, None),
            size=batch or 1,
            prefetch_limit=0,
            in_order=in_order,
            progress=progress,
        )
        return MapResults(batches, end, plain=self._group.core.settings.plain)
