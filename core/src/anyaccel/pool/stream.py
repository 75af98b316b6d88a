"""A function that yields: it runs in a worker, some items ahead of whoever takes them here."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from anyaccel.pool.actor import ActorState
from anyaccel.pool.call import AwaitableFuture
from anyaccel.pool.results import Results, cancel


class YieldedItems:
    """In the worker: what a function yields.

    Args:
        function: The function. It returns whatever can be iterated over, also by ``async for``.
        args: Its arguments.
        kwargs: The same.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin: Callable[[], Any] = partial(function, *args, **kwargs)
        self._items: Any = None  # until the first is taken: so what the function raises is raised there

    def take(self) -> Any:
        """The next item in a tuple, which is empty when there is none; for an ``async`` function, a coroutine."""
        if self._items is None:
            made = self._begin()
            self._items = aiter(made) if hasattr(made, "__aiter__") else iter(made)
        if hasattr(self._items, "__anext__"):
            return self._take()
        for item in self._items:
            return (item,)
        return ()

    async def _take(self) -> tuple[Any, ...]:
        async for item in self._items:
            return (item,)
        return ()

    def end(self) -> Any:
        """Let the function clean up, which waits in a ``yield``."""
        if hasattr(self._items, "aclose"):
            return self._items.aclose()
        if hasattr(self._items, "close"):
            self._items.close()
        return None


class Stream(Results):
    """What a function yields, item by item, as soon as it is there.

    It is for one ``for`` or ``async for``. The worker is some items ahead and then waits. When the stream ends early,
    by an exception, by :meth:`close`, or since nobody refers to it any more, the function is ended: where it waits in a
    ``yield``, as a generator that is closed; where it runs, with the pool's time of grace.

    Args:
        state: The actor that has the :class:`YieldedItems`.
        grace: Seconds between asking its process to end and killing it.
        owner: What is to live as long as this does.
    """

    def __init__(self, state: ActorState, grace: float, owner: object) -> None:
        super().__init__(())
        self._state = state
        self._grace = grace
        self._owner = owner
        for _ in range(state.options.ahead):
            self._take()
        self._begin()

    def _take(self) -> None:
        try:
            self._futures.append(self._state.call("take", (), {}))
        except RuntimeError as error:  # the pool was shut down; what is there already is given before that is told
            if not self._futures:
                self._failure = error

    def _accept(self, value: tuple[Any, ...]) -> None:
        self._futures.popleft()
        self._values.extend(value)
        if value:
            self._take()
        else:
            cancel(self._futures)
            self._futures.clear()
            self._state.close()

    def _ending(self) -> Callable[[], None]:
        return partial(_end, self._state, self._futures, self._grace)


def _end(state: ActorState, takes: deque[AwaitableFuture[Any]], grace: float) -> None:
    """End a stream of which items are left."""
    cancel(takes)
    runs = any(not take.done() for take in takes)
    takes.clear()
    construction = state.construction.future
    if not construction.done() and construction.cancel():
        return
    if runs:
        state.stop(grace)
    elif not state.closing:
        with contextlib.suppress(RuntimeError):  # the pool was shut down this moment, which ends it as well
            state.call("end", (), {})
        state.close()
