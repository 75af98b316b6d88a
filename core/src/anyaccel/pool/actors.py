"""Groups of equal actors: each call goes to a free actor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from anyaccel.durations import Duration
from anyaccel.errors import BrokenWorkerError, WorkerError
from anyaccel.pool.actor import Actor, ActorState, Callee, Method, get_method_name
from anyaccel.pool.call import AwaitableFuture, Call, Options
from anyaccel.pool.messages import Pickled, call_each_method
from anyaccel.pool.results import Batches, MapResults, Results, UnorderedOptions, check_batch, read_end

if TYPE_CHECKING:
    from concurrent.futures import Future

    from anyaccel.pool.engine import Engine
    from anyaccel.pool.progress import ProgressCallback


T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R")


class ActorGroup(Callee):
    """Equal actors with a common queue of calls, from request to exit of the last actor.

    An actor that has died is replaced as soon as there are calls for it. One that could not be constructed is not
    replaced, because the next one would fail as well.

    Args:
        core: The engine.
        name: Name of the class in messages.
        options: Options of the calls.
        work: The pickled construction of one actor.
        size: Number of actors.

    Attributes:
        ready: Future of the process ids of the first actors, without later replacements.
    """

    def __init__(self, core: Engine, name: str, options: Options, work: Pickled, size: int) -> None:
        super().__init__(core, name, options)
        self._work = work
        self._size = size
        self._states: list[_GroupedActor] = []
        self.ready = AwaitableFuture()
        self.ready.set_running_or_notify_cancel()
        self._first = tuple(_GroupedActor(self) for _ in range(size))
        self._states += self._first
        for state in self._first:
            state.ready.add_done_callback(self._on_made)

    def begin(self) -> None:
        """Start the construction of the first actors, as many as the group's size; after an error, begun ones go on.

        Raises:
            RuntimeError: When the pool was shut down, or belongs to the parent of this process.
            BrokenPoolError: When the pool is broken.
            AnyaccelError: When the engine cannot take calls, for instance without a machine; see its ``enter``.
        """
        for state in self._first:
            self._core.enter(state.construction, self._work)

    def _enter(self, call: Call) -> None:
        """Queue a call and have a free actor take calls; replace dead actors. A dead group fails the call."""
        super()._enter(call)
        if len(self._states) < self._size:
            self._replace()

    def _close(self) -> None:
        """Take no more calls, and have each actor exit after the queued calls."""
        self.closed = self.closing = True
        for state in tuple(self._states):
            state._close()  # noqa: SLF001 - its part

    def _stop(self, grace: float) -> None:
        """Take no more calls, and stop the actors without replacements; queued calls fail with the last actor.

        If no actor is left already, the group is dead at once.
        """
        self.closed = self.closing = True
        self._size = 0
        for state in tuple(self._states):
            state._stop(grace)  # noqa: SLF001 - its part
        if not self._states:  # a call that another thread is about to queue must fail, not wait
            self.death = self.death or BrokenWorkerError("it was killed")

    def on_actor_gone(self, state: _GroupedActor, death: WorkerError) -> None:
        """Remove a dead actor; construct missing actors if calls wait.

        A failed construction makes the group smaller for good, so that this actor is not replaced. If no actor is left
        and none may be made, the group is dead and its queued calls fail. No effect the second time.
        """
        if state not in self._states:
            return
        self._states.remove(state)
        if not state.ready.done() or state.get_failure() is not None:
            self._size -= 1
        if self._size <= 0 and not self._states:
            self.death = self.death or death
        self._replace()
        if self.death is not None:
            self._fail_waiting(self.death)

    def _pull(self) -> None:
        """Have the free actor with the fewest outstanding calls take calls from the queue, if an actor is free."""
        workers = (state.member for state in self._states)
        free = [member for member in workers if member is not None and member.free]
        if free:
            min(free, key=lambda member: len(member.outstanding)).pull()

    def _replace(self) -> None:
        """Construct replacements of dead actors while calls wait.

        A replacement that the engine refuses, as in a closed or broken pool, fails, which makes the group smaller.
        """
        while self.queue and len(self._states) < self._size:
            state = _GroupedActor(self)
            self._states.append(state)
            try:
                self._core.enter(state.construction, self._work)
            except Exception as error:  # noqa: BLE001 - the calls report it
                state.on_gone(BrokenWorkerError(f"it cannot be made again: {error}"))

    def _on_made(self, _: Future[Any]) -> None:
        """Set the outcome of :attr:`ready` after the last construction of a first actor.

        The outcome is the exception of the first failed actor by position, if any, else the process ids.
        """
        if not all(state.ready.done() for state in self._first):
            return
        for state in self._first:
            if (failure := state.get_failure()) is not None:
                self.ready.set_exception(failure)
                return
        self.ready.set_result([state.ready.result() for state in self._first])


class _GroupedActor(ActorState):
    """An actor of a group. Calls are not pipelined, because any actor of the group may run each call."""

    pipelined = False

    def __init__(self, group: ActorGroup) -> None:
        super().__init__(group._core, group.name, group.options)  # noqa: SLF001 - its part
        self.queue = group.queue
        self.closing = group.closing
        self._group = group

    def get_failure(self) -> BaseException | None:
        """Return the exception of the construction; None if it succeeded, or is not over.

        A cancelled construction gives a new BrokenWorkerError each time.
        """
        if self.ready.cancelled():
            return BrokenWorkerError("its construction was cancelled")
        return self.ready.exception() if self.ready.done() else None

    def _fail_waiting(self, death: WorkerError) -> None:
        """Report the death to the group instead: the other actors may run the queued calls."""
        self._group.on_actor_gone(self, death)  # the other actors may run the calls


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
            lambda part, _: self._state.call(call_each_method, (get_method_name(method), part), {}),
            size=batch or 1,
            prefetch_limit=0,
            in_order=in_order,
            progress=progress,
        )
        return MapResults(batches, end, plain=self._state.plain)
