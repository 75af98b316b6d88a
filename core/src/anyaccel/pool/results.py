"""The results of many calls, one after the other: for ``for`` and for ``async for``."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from anyaccel.pool.call import AwaitableFuture, CallFuture, exception_in, is_whole
from anyaccel.pool.channel import Message, MessageKind
from anyaccel.pool.progress import ProgressCallback, ProgressCounter, shown
from anyaccel.pool.reactor import reactor

Arguments = tuple[Any, ...]

BATCH_SECONDS = 0.005
"""About so long the calls of a batch take together: then what the batch costs counts for little."""


class Results(Iterator[Any]):
    """What calls return, one after the other.

    It is for one ``for`` or ``async for``. An exception of a call is raised in its place and ends it. When it ends
    early, by that, by :meth:`close`, or since nobody refers to it any more once it has begun, the calls that are left
    are cancelled, those that run included.

    Args:
        futures: Futures to wait for, in order.
        timeout: Seconds until everything must be there, or None.
    """

    def __init__(self, futures: Iterable[AwaitableFuture[Any]], timeout: float | None = None) -> None:
        self._futures = deque(futures)
        self._values: deque[Any] = deque()
        self._end = None if timeout is None else time.monotonic() + timeout
        self._failure: BaseException | None = None
        self._abandoned: weakref.finalize[..., Any] | None = None

    def __iter__(self) -> Results:
        return self

    def __next__(self) -> Any:
        self._begin()
        try:
            while (future := self._awaited()) is not None:
                self._accept(future.result(self._left()))
            return self._next()
        except BaseException:
            self.close()
            raise

    def __aiter__(self) -> Results:
        return self

    async def __anext__(self) -> Any:
        import asyncio

        self._begin()
        try:
            while (future := self._awaited()) is not None:
                self._accept(await asyncio.wait_for(future, self._left()))
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
        """End it: cancel the calls that are left, those that run included."""
        reactor().call_soon(self._ending())  # where Ctrl-C does not cut it short
        if self._abandoned is not None:
            self._abandoned.detach()
        self._futures, self._values, self._failure = deque(), deque(), None

    def _begin(self) -> None:
        """From now on, calls are cancelled when nobody refers to it any more."""
        if self._abandoned is None:
            # A finalizer runs wherever garbage is collected, perhaps under one of our locks: it only leaves a note.
            self._abandoned = weakref.finalize(self, reactor().call_soon, self._ending())
            self._abandoned.atexit = False

    def _ending(self) -> Callable[[], None]:
        """What is to be done when it ends early, at any time from now on; refers to everything but us."""
        return partial(cancel, self._futures)

    def _awaited(self) -> AwaitableFuture[Any] | None:
        """What to wait for before there is something to give."""
        return None if self._values or self._failure or not self._futures else self._futures[0]

    def _accept(self, value: Any) -> None:
        """Take what the first future has."""
        self._futures.popleft()
        self._values.append(value)

    def _next(self) -> Any:
        """Give what there is.

        Raises:
            StopIteration: When everything has been given.
        """
        if self._values:
            return self._values.popleft()
        raise self._failure or StopIteration

    def _left(self) -> float | None:
        return None if self._end is None else self._end - time.monotonic()


class Batches:
    """The calls of a ``map``, which travel in batches.

    Without a size, the first batches have one call each. Each that is over is followed by one of about as many calls as
    take :data:`BATCH_SECONDS`, at most four times as many as that one had, and by few towards the end: so calls that
    take long all run at the same time.

    Args:
        arguments: Arguments of the calls; all are taken at once.
        submit: Makes a batch of calls by :func:`anyaccel.pool.payload.call_each`, given whether there were others.
        size: Calls that travel together; None to choose by the time that they take.
        most_ahead: Batches that wait for workers at most, where that is chosen.
        in_order: Whether results come in the order of the calls, or as soon as they are there.
        progress: True to show how far it is, or a function that is told.

    Attributes:
        futures: Futures to wait for, in order.
    """

    def __init__(
        self,
        arguments: Iterable[Arguments],
        submit: Callable[[list[Arguments], bool], CallFuture],
        *,
        size: int | None,
        most_ahead: int,
        in_order: bool,
        progress: bool | ProgressCallback,
    ) -> None:
        self.futures: deque[AwaitableFuture[Any]] = deque()
        self._parts = parts = deque(arguments)
        self._submit = submit
        self._size = size
        self._tail = max(1, most_ahead // 2)
        tell = (progress if callable(progress) else shown(len(parts))) if progress and parts else None
        self._counter = None if tell is None else ProgressCounter(len(parts), tell)
        self._in_order = in_order
        self._lock = threading.Lock()
        self._calls: set[CallFuture] = set()
        self._vacant: deque[AwaitableFuture[CallFuture]] = deque()
        self._made = self._over = False
        try:
            while self._parts and (size is not None or len(self.futures) < most_ahead):
                self._go_on(size or 1)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Make no more calls, and cancel those that are left, those that run included."""
        self._over = True
        lost = len(self._parts)
        self._parts.clear()
        if self._counter is not None and lost:
            self._counter.count(lost, lost)
        cancel(self._calls)

    def _go_on(self, size: int) -> None:
        """Make the next batch, in the caller's thread or in that of the reactor."""
        # The call itself would be done before the next batch is made, and who takes results would take it for the last.
        slot: AwaitableFuture[CallFuture] = AwaitableFuture()
        slot.set_running_or_notify_cancel()  # it is no more to be cancelled: its call is
        with self._lock:  # so batches stand in the order of their calls
            batch = [self._parts.popleft() for _ in range(min(size, len(self._parts)))]
            if not batch:  # the other thread has taken the last ones
                return
            self.futures.append(slot)
            if not self._in_order:
                self._vacant.append(slot)
        try:
            call = self._submit(batch, self._made)
        except BaseException as error:
            self._parts.extendleft(reversed(batch))
            # Another call may be done already, and have been given this place: then one more is free.
            (slot if self._in_order else self._vacant.pop()).set_exception(error)
            raise
        self._made = True
        self._calls.add(call)
        call.add_done_callback(partial(self._on_done, len(batch), slot))
        if self._over:  # meanwhile, in another thread
            call.cancel()

    def _on_done(self, count: int, slot: AwaitableFuture[CallFuture], done: Future[Any]) -> None:
        assert isinstance(done, CallFuture)  # noqa: S101 - one of the calls
        values, seconds = 0, 0.0
        if not (done.cancelled() or done.exception() is not None):
            results, _, seconds = done.result()
            values = len(results)
        if self._counter is not None:
            self._counter.count(count, count - values)
        if done.cancelled() and not self._over:  # by the end of the pool
            self.cancel()
        if self._size is None and self._parts:
            quick = int(BATCH_SECONDS * values / max(seconds, 1e-9))
            try:
                self._go_on(max(1, min(quick, 4 * count, len(self._parts) // self._tail)))
            except BaseException:  # noqa: BLE001 - it is raised where results are taken, after those that there are
                self.cancel()
        self._calls.discard(done)
        (slot if self._in_order else self._vacant.popleft()).set_result(done)


class MapResults(Results):
    """The results of a ``map``.

    Args:
        batches: The calls.
        timeout: Seconds until everything must be there, or None.
        plain: Whether exceptions are read as plain data.
    """

    def __init__(self, batches: Batches, timeout: float | None, *, plain: bool) -> None:
        super().__init__((), timeout)
        self._futures = batches.futures
        self._batches = batches
        self._plain = plain

    def _ending(self) -> Callable[[], None]:
        return self._batches.cancel

    def _accept(self, value: Any) -> None:
        self._futures.popleft()
        if isinstance(value, CallFuture):
            value = value.result()
        values, failure, _ = value
        self._values.extend(values)
        if failure is not None:
            self._failure = exception_in(Message(MessageKind.ERROR, failure, [], []), plain=self._plain)


def check_batch(**sizes: object) -> None:
    """Check how many calls are to travel together.

    Raises:
        ValueError: When it makes no sense.
    """
    for name, size in sizes.items():
        if size is not None and not is_whole(size, 1):
            raise ValueError(f"{name} must be a whole number, 1 or more (got {size!r:.60})")


def cancel(futures: Iterable[Future[Any]]) -> None:
    """Cancel futures, those that run included."""
    for future in tuple(futures):
        future.cancel()
