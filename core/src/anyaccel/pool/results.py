"""The results of many calls, and the items of a generator, as an iterator: for ``for`` and for ``async for``."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar

from anyaccel.durations import Duration, read_seconds
from anyaccel.pool.call import AwaitableFuture, CallFuture, is_whole, read_exception
from anyaccel.pool.messages import Message, MessageKind
from anyaccel.pool.reactor import allow_forks, reactor

if TYPE_CHECKING:
    from anyaccel.pool.progress import ProgressCallback, ProgressCounter

T = TypeVar("T")
Arguments = tuple[Any, ...]

BATCH_SECONDS = 0.005
"""Duration in seconds that ``map`` aims at for a batch: then the cost of a batch is small beside its calls."""


class UnorderedOptions(TypedDict, total=False):
    """The options of :meth:`anyaccel.Pool.map_unordered`, and of :meth:`anyaccel.Actors.map`."""

    timeout: Duration | None
    batch: int | None
    progress: bool | ProgressCallback


class Results(Iterator[T]):
    """The results of calls, one after the other.

    For one ``for`` or ``async for``. An exception of a call is raised in its place and ends the iteration. When the
    iteration ends early - by an exception, by :meth:`close`, or because nothing refers to it any more - the calls that
    are left are cancelled, running calls included; only running methods of actors go on.

    Args:
        end: Monotonic time at which all results must be there, or None; see :func:`read_end`.
    """

    def __init__(self, end: float | None = None) -> None:
        self._futures: deque[AwaitableFuture[Any]] = deque()
        self._values: deque[T] = deque()
        self._end = end
        self._failure: BaseException | None = None
        self._abandoned: weakref.finalize[..., Any] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        self._watch_references()
        try:
            while (future := self._next_future()) is not None:
                self._accept(future.result(self._seconds_left()))
            return self._next()
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        import asyncio

        self._watch_references()
        try:
            while (future := self._next_future()) is not None:
                self._accept(await asyncio.wait_for(future, self._seconds_left()))
            return self._next()
        except StopIteration:
            self.close()
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration: drop the results that were not taken, and have the reactor cancel the remaining calls.

        Running calls are cancelled, too, but not running methods of actors, and none in a forked child. The function of
        a :class:`Stream` is ended, also while the function runs. Returns at once; a further ``next`` raises
        StopIteration.
        """
        reactor().call_soon(self._make_canceller())  # not here: Ctrl-C could interrupt it halfway
        if self._abandoned is not None:
            self._abandoned.detach()
        self._futures, self._values, self._failure = deque(), deque(), None

    def _watch_references(self) -> None:
        """Have the calls cancelled once nothing refers to the results any more; no effect the second time.

        Called before the first result is taken, and when a stream is made: a ``map`` whose results are never taken runs
        to its end.
        """
        if self._abandoned is None:
            # A finalizer runs in any thread that collects garbage, perhaps under one of our locks: only leave a note.
            self._abandoned = weakref.finalize(self, reactor().call_soon, self._make_canceller())
            self._abandoned.atexit = False

    def _make_canceller(self) -> Callable[[], None]:
        """Return a function that cancels the calls that are left then; the function must not refer to the results."""
        raise NotImplementedError

    def _next_future(self) -> AwaitableFuture[Any] | None:
        """Return the future to wait for.

        Returns:
            The future; None if a value or an exception is ready, or everything was returned.
        """
        return None if self._values or self._failure or not self._futures else self._futures[0]

    def _accept(self, value: Any) -> None:
        """Store the results in the value of the first future, and remove the future."""
        raise NotImplementedError

    def _next(self) -> T:
        """Remove and return the next stored value; after the last, raise the stored exception of a call, if any.

        The caller closes the iteration after any exception, so no result follows.

        Raises:
            StopIteration: When all values were returned.
            BaseException: The exception of the call whose place has come.
        """
        if self._values:
            return self._values.popleft()
        raise self._failure or StopIteration

    def _seconds_left(self) -> float | None:
        """Return the seconds until the timeout, negative after it; None without a timeout."""
        return None if self._end is None else self._end - time.monotonic()


class Batches:
    """The calls of a ``map``, submitted in batches.

    Without a size, the first batches have one call each. A batch that is over is followed by one of as many calls as
    take about :data:`BATCH_SECONDS`, but at most four times as many as it had itself, and fewer towards the end, so
    that all workers finish at about the same time.

    Args:
        arguments: Arguments of the calls; all are taken at once.
        submit: Submits a batch; its second argument says whether there were batches before.
        size: Calls of a batch; None to choose by their durations.
        prefetch_limit: Maximum number of batches that wait for workers, if the size is chosen.
        in_order: Whether results come in the order of the calls, or as soon as they are there.
        progress: True to show the progress on a terminal or in a notebook, or a function that is called with it.

    Attributes:
        futures: Futures to wait for, in order.

    Raises:
        BaseException: When ``arguments`` raises, or a batch cannot be submitted; the submitted batches are cancelled.
    """

    def __init__(
        self,
        arguments: Iterable[Arguments],
        submit: Callable[[list[Arguments], bool], CallFuture[Any]],
        *,
        size: int | None,
        prefetch_limit: int,
        in_order: bool,
        progress: bool | ProgressCallback,
    ) -> None:
        self.futures: deque[AwaitableFuture[Any]] = deque()
        self._parts = parts = deque(arguments)
        self._submit = submit
        self._size = size
        self._tail = max(1, prefetch_limit // 2)
        self._counter: ProgressCounter | None = None
        if progress and parts:
            from anyaccel.pool.progress import make_counter

            self._counter = make_counter(len(parts), progress)
        self._in_order = in_order
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._vacant: deque[AwaitableFuture[Future[Any]]] = deque()
        self._made = self._over = False
        try:
            while self._parts and (size is not None or len(self.futures) < prefetch_limit):
                self._submit_next(size or 1)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Submit no more calls, and cancel the submitted calls, also running calls, but no running method of an actor.

        Calls that were never submitted, which have no futures, are reported as failed to the progress callback, later
        in the reactor's thread. A second call reports nothing.
        """
        self._over = True
        with self._lock:  # another thread may take arguments at this moment
            lost = len(self._parts)
            self._parts.clear()
        if lost:
            reactor().call_soon(partial(self._report, lost, lost))
        cancel_all(self._calls)

    def _report(self, count: int, failed: int) -> None:
        """Report ``count`` further calls as finished, ``failed`` of these as failed, to the progress callback, if any.

        Runs in the reactor's thread. An exception of the callback is logged, and ends the reports.
        """
        if self._counter is not None:
            with allow_forks():
                self._counter.count(count, failed)

    def _submit_next(self, size: int) -> None:
        """Submit the next batch of at most this size, and append its place to ``futures``.

        Runs in the thread of the caller or of the reactor. No effect without arguments left. A call that is submitted
        after :meth:`cancel` is cancelled.

        Raises:
            BaseException: When the batch cannot be submitted. Its place, or without an order the last vacant place,
                gets the exception as well, and the arguments are put back.
        """
        # Not the future of the call: that is done before the next batch is submitted, and so would end the loop.
        slot: AwaitableFuture[Future[Any]] = AwaitableFuture()
        slot.set_running_or_notify_cancel()  # cancel() has no effect on it: cancel_all() cancels the call
        with self._lock:  # both threads may be here, and the futures must be in the order of the calls
            batch = [self._parts.popleft() for _ in range(min(size, len(self._parts)))]
            if not batch:  # the other thread has taken the last arguments
                return
            self.futures.append(slot)
            if not self._in_order:
                self._vacant.append(slot)
        try:
            call = self._submit(batch, self._made)
        except BaseException as error:
            self._parts.extendleft(reversed(batch))
            # Without an order, another call may have taken this slot already: then any vacant slot will do.
            (slot if self._in_order else self._vacant.pop()).set_exception(error)
            raise
        self._made = True
        self._calls.add(call)
        call.add_done_callback(partial(self._on_done, len(batch), slot))
        if self._over:  # cancelled meanwhile by another thread
            call.cancel()

    def _on_done(self, count: int, slot: AwaitableFuture[Future[Any]], done: Future[Any]) -> None:
        """Submit the next batch if sizes are chosen; have the reactor count this one, and fill a place in ``futures``.

        Runs in the thread that ends the batch. A batch with a failed call is followed by a next one, too. Each call
        without a result counts as failed, also calls that did not run after a failure in their batch. The place's
        result is ``done`` itself, also when the batch failed or was cancelled. A batch that was cancelled, or a next
        batch that cannot be submitted, cancels the remaining calls; the exception of the latter is not raised here.

        Args:
            count: Number of calls of the batch.
            slot: Its place if results come in order; without an order, the oldest vacant place is filled instead.
            done: The finished future of the batch.
        """
        values, seconds = 0, 0.0
        if not (done.cancelled() or done.exception() is not None):
            results, _, seconds = done.result()
            values = len(results)
        if done.cancelled() and not self._over:  # the pool was shut down
            self.cancel()
        if self._size is None and self._parts:
            quick = int(BATCH_SECONDS * values / max(seconds, 1e-9))
            try:
                self._submit_next(max(1, min(quick, 4 * count, len(self._parts) // self._tail)))
            except BaseException:  # noqa: BLE001 - raised where results are taken, after those that are there
                self.cancel()
        self._calls.discard(done)
        # By a note: a call may end in any thread, even in the progress callback, which may shut the pool down.
        reactor().call_soon(partial(self._deliver, count, count - values, slot, done))

    def _deliver(self, count: int, failed: int, slot: AwaitableFuture[Future[Any]], done: Future[Any]) -> None:
        """Report a finished batch to the progress callback, then set ``done`` as the result of its place.

        Without an order, the oldest vacant place takes the result. Runs in the reactor's thread.
        """
        self._report(count, failed)
        (slot if self._in_order else self._vacant.popleft()).set_result(done)


class MapResults(Results[T]):
    """The results of a ``map``.

    Args:
        batches: The calls.
        end: Monotonic time at which all results must be there, or None.
        plain: Whether exceptions are read as plain data.
    """

    def __init__(self, batches: Batches, end: float | None, *, plain: bool) -> None:
        super().__init__(end)
        self._futures = batches.futures
        self._batches = batches
        self._plain = plain

    def _make_canceller(self) -> Callable[[], None]:
        """Return :meth:`Batches.cancel`."""
        return self._batches.cancel

    def _accept(self, value: Any) -> None:
        """Remove the first future; store the values of its batch, and the exception of a failed call if any.

        Args:
            value: The finished future of the batch.

        Raises:
            BaseException: The exception of the whole batch, such as a lost worker or a cancellation.
        """
        self._futures.popleft()
        values, failure, _ = value.result()
        self._values.extend(values)
        if failure is not None:
            self._failure = read_exception(Message(MessageKind.ERROR, failure, [], []), plain=self._plain)


def check_batch(**sizes: object) -> None:
    """Check the sizes of batches, which may be None.

    Raises:
        ValueError: When one is no whole number of 1 or more; not UsageError, since Executor.map() raises this.
    """
    for name, size in sizes.items():
        if size is not None and not is_whole(size, 1):
            raise ValueError(f"{name} must be a whole number, 1 or more (got {size!r:.60})")


def read_end(timeout: Duration | None) -> float | None:
    """Return the monotonic time at which a timeout from now ends; None without a timeout, and for centuries.

    A negative timeout has ended already.

    Raises:
        UsageError: When ``timeout`` is no duration.
    """
    seconds = read_seconds("timeout", timeout, least=-inf)
    return None if seconds is None or seconds >= threading.TIMEOUT_MAX else time.monotonic() + seconds


def cancel_all(futures: Iterable[Future[Any]]) -> None:
    """Cancel futures, also of running calls, but not of running methods of actors."""
    for future in tuple(futures):
        future.cancel()
