"""Streams: a generator runs in a worker, a few items ahead of the loop here."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from anyaccel.pool.actor import ActorState
from anyaccel.pool.call import AwaitableFuture
from anyaccel.pool.results import Results, cancel_all

T = TypeVar("T")


class YieldedItems:
    """The items that a function yields: the object of a stream's actor, in the worker.

    Args:
        function: The function. It returns an iterable, or an asynchronous one.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin: Callable[[], Any] = partial(function, *args, **kwargs)
        self._items: Any = None  # not called here: an exception of the function is raised where the first item is taken

    def take(self) -> Any:
        """Return the next item in a tuple, or an empty tuple at the end; a coroutine for an asynchronous iterable.

        The first call calls the function.

        Raises:
            Exception: The exception of the function or of its iterable.
        """
        if self._items is None:
            made = self._begin()
            self._items = aiter(made) if hasattr(made, "__aiter__") else iter(made)
        if hasattr(self._items, "__anext__"):
            return self._take()
        for item in self._items:
            return (item,)
        return ()

    async def _take(self) -> tuple[Any, ...]:
        """Return the next item of an asynchronous iterable in a tuple, or an empty tuple at the end."""
        async for item in self._items:
            return (item,)
        return ()

    def end(self) -> Any:
        """Close the generator, so the function cleans up.

        No effect before the first item, or on an iterable that cannot be closed. Exceptions of the clean-up are raised.

        Returns:
            A coroutine for an asynchronous generator, else None.
        """
        if hasattr(self._items, "aclose"):
            return self._items.aclose()
        if hasattr(self._items, "close"):
            self._items.close()
        return None


class Stream(Results[T]):
    """The yielded items of a function, each without delay.

    For one ``for`` or ``async for``. The worker is some items ahead and then waits. When the stream ends early - by an
    exception, by :meth:`close`, or because nothing refers to it any more - the function is ended: in its ``yield`` like
    a generator that is closed, elsewhere with the pool's time of grace.

    Args:
        state: The actor that has the :class:`YieldedItems`.
        grace: Seconds between SIGTERM and SIGKILL of its process.
        owner: The pool, which must live as long as the stream.
    """

    def __init__(self, state: ActorState, grace: float, owner: object) -> None:
        super().__init__()
        self._state = state
        self._grace = grace
        self._owner = owner
        for _ in range(state.options.ahead):
            self._take()
        self._watch_references()

    def _take(self) -> None:
        """Have the worker produce a further item, and append its future.

        If the pool was shut down, no item is requested; the RuntimeError is raised after the items requested before.
        """
        try:
            self._futures.append(self._state.call("take", (), {}))
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
            self._state.close()

    def _make_canceller(self) -> Callable[[], None]:
        """Return a function that ends the stream's function, without a reference to the stream."""
        return partial(_end_stream, self._state, self._futures, self._grace)


def _end_stream(state: ActorState, takes: deque[AwaitableFuture[Any]], grace: float) -> None:
    """End the function of a stream left before the end.

    Returns at once. If the construction is not over, it is cancelled, and that is all. While an item is produced, the
    process is stopped; else the generator is closed and the process exits after that, unless it is exiting already.

    Args:
        state: The actor of the stream.
        takes: The futures of requested items, which are cancelled and removed.
        grace: Seconds between SIGTERM and SIGKILL.
    """
    cancel_all(takes)
    runs = any(not take.done() for take in takes)
    takes.clear()
    construction = state.construction.future
    if not construction.done() and construction.cancel():
        return
    if runs:
        state.stop(grace)
    elif not state.closing:
        with contextlib.suppress(RuntimeError):  # the pool was shut down just now, which ends the actor as well
            state.call("end", (), {})
        state.close()
