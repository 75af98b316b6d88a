"""The results of many calls, one after the other: for ``for`` and for ``async for``."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import Any, Self

from anyaccel.pool.call import AwaitableFuture, CallFuture, exception_in, is_whole
from anyaccel.pool.channel import Kind, Message
from anyaccel.pool.progress import Counter, Tell, shown
from anyaccel.pool.reactor import reactor

Arguments = tuple[Any, ...]


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
        self._begin()
        try:
            while (future := self._awaited()) is not None:
                self._accept(await _within(future, self._left()))
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
        if self._abandoned is not None:
            self._abandoned.detach()
        self._ending()()
        self._futures.clear()
        self._values.clear()
        self._failure = None

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


class MapResults(Results):
    """Of calls that all have been made.

    Args:
        calls: The calls.
        timeout: Seconds until everything must be there, or None.
        batched: Whether each is a batch, made by :func:`anyaccel.pool.payload.call_each`.
        in_order: Whether results come in the order of the calls, or as soon as they are there.
        plain: Whether exceptions of batches are read as plain data.
    """

    def __init__(
        self, calls: list[CallFuture], timeout: float | None, *, batched: bool, in_order: bool, plain: bool
    ) -> None:
        self._batched = batched
        self._plain = plain
        self._calls: set[CallFuture] | None = None
        if not in_order:
            self._calls = set(calls)
        super().__init__(calls if in_order else _as_completed(calls, self._calls or set()), timeout)

    def _ending(self) -> Callable[[], None]:
        return super()._ending() if self._calls is None else partial(cancel, self._calls)

    def _accept(self, value: Any) -> None:
        self._futures.popleft()
        if self._calls is not None:
            value = value.result()
        if not self._batched:
            self._values.append(value)
            return
        values, failure = value
        self._values.extend(values)
        if failure is not None:
            self._failure = exception_in(Message(Kind.ERROR, failure, [], []), plain=self._plain)


def _as_completed(calls: list[CallFuture], left: set[CallFuture]) -> list[AwaitableFuture[CallFuture]]:
    """Futures of the call that is done first, of the one that is done next, and so on.

    Args:
        calls: The calls.
        left: The same; each is taken out when it is done.
    """
    made: list[AwaitableFuture[CallFuture]] = [AwaitableFuture() for _ in calls]
    vacant = deque(made)
    for each in made:
        each.set_running_or_notify_cancel()  # it is no more to be cancelled: its call is

    def settle(done: Future[Any]) -> None:
        assert isinstance(done, CallFuture)  # noqa: S101 - one of the calls
        left.discard(done)
        vacant.popleft().set_result(done)

    for call in calls:
        call.add_done_callback(settle)
    return made


def run_all(
    arguments: Iterable[Arguments],
    one: Callable[..., CallFuture],
    many: Callable[[list[Arguments]], CallFuture],
    *,
    batch: int,
    timeout: float | None,
    progress: bool | Tell,
    in_order: bool,
    plain: bool,
) -> Results:
    """Make a call for each of some arguments.

    Args:
        arguments: The arguments; all are taken at once.
        one: Makes a call.
        many: Makes a batch of calls, of :func:`anyaccel.pool.payload.call_each`.
        batch: Calls that travel together.
        timeout: Seconds until all results must be there, or None.
        progress: True to show how far it is, or a function that is told.
        in_order: Whether results come in the order of the calls, or as soon as they are there.
        plain: Whether exceptions of batches are read as plain data.
    """
    parts = list(batches(arguments, batch))
    counter = None
    if progress and parts and (tell := progress if callable(progress) else shown(sum(map(len, parts)))):
        counter = Counter(sum(map(len, parts)), tell)
    calls: list[CallFuture] = []
    try:
        for part in parts:
            calls.append(one(*part[0]) if batch == 1 else many(part))
            if counter is not None:
                calls[-1].add_done_callback(partial(_count, counter, len(part), batch > 1))
    except BaseException:
        cancel(calls)
        if counter is not None:  # those that were not made: what shows progress ends when all are over
            lost = sum(map(len, parts[len(calls) :]))
            counter.count(lost, lost)
        raise
    return MapResults(calls, timeout, batched=batch > 1, in_order=in_order, plain=plain)


def batches(arguments: Iterable[Arguments], size: int) -> Iterator[list[Arguments]]:
    """Cut arguments into batches of a size; the last may be smaller."""
    rest = iter(arguments)
    while part := list(islice(rest, size)):
        yield part


def check_batch(**sizes: object) -> None:
    """Check how many calls are to travel together.

    Raises:
        ValueError: When it makes no sense.
    """
    for name, size in sizes.items():
        if not is_whole(size, 1):
            raise ValueError(f"{name} must be a whole number, 1 or more (got {size!r:.60})")


def _count(counter: Counter, calls: int, batched: bool, done: Future[Any]) -> None:
    if done.cancelled() or done.exception() is not None:
        counter.count(calls, calls)
    else:
        counter.count(calls, calls - len(done.result()[0]) if batched else 0)


def cancel(futures: Iterable[Future[Any]]) -> None:
    """Cancel futures, those that run included."""
    for future in tuple(futures):
        future.cancel()


async def _within(future: AwaitableFuture[Any], seconds: float | None) -> Any:
    """Wait for a future, for so long at most."""
    if seconds is None:
        return await future
    from asyncio import wait_for

    return await wait_for(_value(future), seconds)


async def _value(future: AwaitableFuture[Any]) -> Any:
    return await future
