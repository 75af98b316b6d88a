"""The results of many calls, and the items of a generator, as an iterator; and the progress of many calls.

The iterators are for ``for`` and for ``async for``. The progress is for a function of the user, or a display on a
terminal or in a notebook.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from math import inf
from typing import Any, NamedTuple, Self, TextIO, TypedDict, TypeVar

from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import RemoteError
from anyaccel.model import Value
from anyaccel.pool.call import AwaitableFuture, CallFuture, is_whole, read_exception
from anyaccel.pool.messages import Message, MessageKind
from anyaccel.pool.reactor import allow_forks, find_reactor
from anyaccel.text import elapsed

T = TypeVar("T")
Arguments = tuple[Any, ...]

BATCH_SECONDS = 0.005
"""Duration in seconds that ``map`` aims at for a batch: then the cost of a batch is small beside its calls."""


FASTEST_SECONDS = 0.1
"""Minimum interval in seconds between two updates of the line on a terminal."""


class Progress(Value):
    """Progress of a :meth:`anyaccel.Pool.map`.

    Attributes:
        done: Number of calls that are over.
        failed: Number of those that raised, were cancelled, or lost their worker.
        total: Number of all calls.
        seconds: Seconds since the start.
    """

    done: int
    failed: int
    total: int
    seconds: float

    @property
    def left_seconds(self) -> float | None:
        """Estimated seconds until all calls are over, by the mean so far; None before the first one is."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        left = "" if self.left_seconds is None else f", {elapsed(self.left_seconds)} left"
        over = f"in {elapsed(self.seconds)}"
        return f"{self.done} of {self.total} done{failed}{left if self.done < self.total else f' {over}'}"


ProgressCallback = Callable[[Progress], None]


class UnorderedOptions(TypedDict, total=False):
    """The options of :meth:`anyaccel.Pool.map_unordered`, and of :meth:`anyaccel.Actors.map`."""

    timeout: Duration | None
    batch: int | None
    progress: bool | ProgressCallback


class Results(Iterator[T]):
    """The results of calls, one after the other.

    For one ``for`` or ``async for``. An exception of a call is raised in its place and ends the iteration; one that
    would look like the end of all results, such as StopIteration, is raised as the cause of a RuntimeError. When the
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

    def __reduce__(self) -> str:
        raise TypeError("results that are still to come cannot be sent to another process; pass a list of them")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        self._watch_references()
        try:
            while (future := self._next_future()) is not None:
                self._accept(future.result(self._seconds_left()))
            if self._has_next():
                return self._next()
        except StopIteration as error:
            # As in a generator: the end of the iteration would hide that results are missing.
            self.close()
            raise RuntimeError("a call raised StopIteration") from error
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        import asyncio

        self._watch_references()
        try:
            while (future := self._next_future()) is not None:
                self._accept(await asyncio.wait_for(future, self._seconds_left()))
            if self._has_next():
                return self._next()
        except (StopIteration, StopAsyncIteration) as error:
            self.close()
            raise RuntimeError(f"a call raised {type(error).__name__}") from error
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopAsyncIteration

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
        find_reactor().call_soon(self._make_canceller())  # not here: Ctrl-C could interrupt it halfway
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
            self._abandoned = weakref.finalize(self, find_reactor().call_soon, self._make_canceller())
            self._abandoned.atexit = False

    def _make_canceller(self) -> Callable[[], None]:
        """Return a function that cancels the calls that are left then; the function must not refer to the results."""
        raise NotImplementedError

    def _next_future(self) -> AwaitableFuture[Any] | None:
        """Return the future to wait for.

        Returns:
            The future; None if a value or an exception is ready, or everything was returned.
        """
        return None if self._has_next() or not self._futures else self._futures[0]

    def _accept(self, value: Any) -> None:
        """Store the results in the value of the first future, and remove the future."""

    def _has_next(self) -> bool:
        """Return whether a value or the exception of a call is stored."""
        return bool(self._values) or self._failure is not None

    def _next(self) -> T:
        """Remove and return the next stored value; after the last, raise the stored exception of a call.

        The caller closes the iteration after any exception, so no result follows.

        Raises:
            BaseException: The exception of the call whose place has come.
        """
        if self._failure is not None and not self._values:
            raise self._failure
        return self._values.popleft()

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
        submit: Submits a batch; its second argument says whether there were batches before. After the first batches,
            it is called in the reactor's thread.
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
        self._tail = max(1, prefetch_limit // 2)
        self._report = ProgressCounter(len(parts), progress if parts else False).count
        self._in_order = in_order
        self._calls: dict[Future[Any], tuple[int, AwaitableFuture[Outcomes]]] = {}
        self._vacant: deque[AwaitableFuture[Outcomes]] = deque()
        self._over = False
        try:
            while parts and (size is not None or len(self._calls) < prefetch_limit):
                self._submit_next(size or 1, late=bool(self._calls))
            for call in tuple(self._calls):  # only now: from the first end of a call on, the reactor submits
                call.add_done_callback(self._on_done)
        except BaseException:
            find_reactor().call_soon(self.cancel)  # not here: Ctrl-C could interrupt it halfway
            raise

    def cancel(self) -> None:
        """Submit no more calls, and cancel the submitted calls, also running calls, but no running method of an actor.

        Calls that were never submitted, which have no futures, are reported as failed to the progress callback, later
        in the reactor's thread. A second call reports nothing.
        """
        self._over = True
        lost = len(self._parts)
        self._parts.clear()
        if lost:
            find_reactor().call_soon(partial(self._report, lost, lost))
        cancel_all(self._calls)

    def _submit_next(self, size: int, *, late: bool) -> Future[Any]:
        """Submit the next batch of at most this size, with a new place in ``futures``; return the future of its call.

        Raises:
            BaseException: When the batch cannot be submitted. The arguments are put back.
        """
        batch = [self._parts.popleft() for _ in range(min(size, len(self._parts)))]
        try:
            call = self._submit(batch, late)
        except BaseException:
            self._parts.extendleft(reversed(batch))
            raise
        place = self._add_place()
        if not self._in_order:
            self._vacant.append(place)
        self._calls[call] = len(batch), place
        return call

    def _add_place(self) -> AwaitableFuture[Outcomes]:
        """Append a place to ``futures``, and return it."""
        # Not the future of a call: that is done before the next batch is submitted, and so would end the loop.
        place: AwaitableFuture[Outcomes] = AwaitableFuture()
        place.set_running_or_notify_cancel()  # cancel() has no effect on it: cancel_all() cancels the call
        self.futures.append(place)
        return place

    def _on_done(self, call: Future[Any]) -> None:
        """Have the reactor finish a batch, which may end in any thread, even in the progress callback."""
        find_reactor().call_soon(partial(self._finish, call))

    def _finish(self, call: Future[Any]) -> None:
        """Submit the next batch if sizes are chosen; count this one, and fill a place in ``futures`` with its outcomes.

        A batch with a failed call is followed by a next one, too. Each call without a result counts as failed, also
        calls that did not run after a failure in their batch. If results come in order, the place is that of the batch,
        else the oldest vacant one. A batch that was cancelled, or a next batch that cannot be submitted, cancels the
        remaining calls; the exception of the latter is raised where results are taken, after those that are there.
        """
        count, place = self._calls.pop(call)
        outcomes, seconds = read_batch(call, count)
        done = len(outcomes.values)
        if call.cancelled() and not self._over:  # the pool was shut down
            self.cancel()
        if self._parts:
            quick = int(BATCH_SECONDS * done / max(seconds, 1e-9))
            size = max(1, min(quick, 4 * count, len(self._parts) // self._tail))
            try:
                self._submit_next(size, late=True).add_done_callback(self._on_done)
            except BaseException as error:  # noqa: BLE001 - raised where results are taken
                self.cancel()
                self._add_place().set_exception(error)
        self._report(count, count - done)
        (place if self._in_order else self._vacant.popleft()).set_result(outcomes)


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

    def _accept(self, value: Outcomes) -> None:
        """Remove the first future; store the values of its batch, and the exception of a failed call if any.

        Raises:
            BaseException: The exception of the whole batch.
        """
        self._futures.popleft()
        self._values.extend(value.values)
        if isinstance(value.failure, BaseException):
            raise value.failure
        if value.failure is not None:
            self._failure = read_exception(Message(MessageKind.ERROR, value.failure, [], []), plain=self._plain)


class Outcomes(NamedTuple):
    """The outcomes of the calls of a batch.

    Attributes:
        values: The values that calls returned, in order; all of them without a failure.
        failure: The pickled exception of the call that ended the batch; or the exception of the whole batch, such as a
            lost worker or a cancellation; None without a failure.
    """

    values: list[Any]
    failure: bytes | BaseException | None


def read_batch(call: Future[Any], count: int) -> tuple[Outcomes, float]:
    """Return the outcomes of a finished batch of so many calls, and the seconds that these took; 0 without an answer.

    The outcome is a RemoteError when the worker's answer is none to such a batch.
    """
    if call.cancelled():
        return Outcomes([], CancelledError()), 0.0
    failure = call.exception()
    if failure is None:
        match call.result():
            case ([*values], bytes() | None as error, float(seconds)) if (
                0 <= seconds < inf and len(values) <= count and (error is None) == (len(values) == count)
            ):
                return Outcomes(values, error), seconds
        failure = RemoteError(f"a worker has sent what is no answer to a batch of {count} calls")
    return Outcomes([], failure), 0.0


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


class ProgressCounter:
    """Counts calls as they end, and calls a function with the progress; for the reactor's thread alone.

    Args:
        total: Number of all calls.
        progress: The function, which may fork, or shut the pool down; True for a display, if one can be shown; False
            for none.
    """

    def __init__(self, total: int, progress: bool | ProgressCallback) -> None:
        self._total = total
        self._callback = progress if callable(progress) else find_display(total) if progress else None
        self._start = time.monotonic()
        self._done = self._failed = 0

    def count(self, done: int, failed: int) -> None:
        """Count so many calls that are over, of which ``failed`` have failed, and call the function with the progress.

        An exception of the function, also SystemExit or KeyboardInterrupt, is logged, not raised; then the function is
        not called again.
        """
        self._done += done
        self._failed += failed
        if self._callback is None:
            return
        seconds = time.monotonic() - self._start
        try:
            with allow_forks():
                self._callback(Progress(done=self._done, failed=self._failed, total=self._total, seconds=seconds))
        except BaseException:  # also SystemExit: the map goes on
            self._callback = None
            logging.getLogger("anyaccel").exception("the progress callback failed and is not called again")


def find_display(total: int) -> ProgressCallback | None:
    """Open a display of progress on standard error: of tqdm, if that is installed, else a line.

    Args:
        total: Number of all calls.

    Returns:
        The callback, with a bar of tqdm already shown; None if standard error is missing, or neither a terminal nor a
        notebook.
    """
    if not (_in_notebook() or (sys.stderr is not None and sys.stderr.isatty())):  # None in a program without streams
        return None
    try:
        return _tqdm(total)
    except ImportError:
        return ProgressLine(sys.stderr)


def _tqdm(total: int) -> ProgressCallback:
    """Show a progress bar of tqdm; return its callback, which closes the bar after the last call.

    Raises:
        ImportError: When tqdm is not installed.
    """
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns if ipywidgets is missing
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    bar: Any = tqdm(total=total)

    def tell(progress: Progress) -> None:
        """Update the bar, with the number of failed calls if any; close the bar after the last call."""
        if progress.failed:
            bar.set_postfix(failed=progress.failed, refresh=False)
        bar.update(progress.done - bar.n)
        if progress.done == progress.total:
            bar.close()

    return tell


class ProgressLine:
    """Writes the progress as a line, overwritten each time.

    Args:
        stream: A terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Overwrite the line with the progress, and end the line after the last call.

        No effect within :data:`FASTEST_SECONDS` of the start or the last update, except after the last call.
        """
        over = progress.done == progress.total
        now = time.monotonic()
        if not over and now - self._last < FASTEST_SECONDS:
            return
        self._last = now
        self._stream.write(f"\r\x1b[K{progress}" + ("\n" if over else ""))
        self._stream.flush()


def _in_notebook() -> bool:
    """Return whether output goes to a notebook: IPython runs in a kernel there, not in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
