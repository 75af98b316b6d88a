"""What a pool and a view of it with other options have in common: ways to have calls run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError
from anyaccel.model import replace
from anyaccel.scheduler import RequestLike, parse_request
from anyaccel.workers.actors import Actor, ActorState
from anyaccel.workers.engine import Engine
from anyaccel.workers.loop import loop
from anyaccel.workers.mapping import Counter, Printer, Progress, call_each, chunks
from anyaccel.workers.pickling import dumps_whole
from anyaccel.workers.tasks import Options, TaskFuture, checked, is_whole, name_of

if TYPE_CHECKING:
    from anyaccel.workers.gangs import GangFuture

UNSET: Any = object()


class Submitter(Executor):
    """A pool with options for the calls that go through it; see :meth:`Pool.options`."""

    def __init__(self, core: Engine, options: Options, owner: object = None) -> None:
        self._core = core
        self._options = options
        self._owner = owner  # the pool lives as long as somebody can submit to it

    def options(
        self,
        *,
        needs: RequestLike | None = UNSET,
        timeout: float | None = UNSET,
        max_calls: int | None = UNSET,
        retries: int = UNSET,
    ) -> Submitter:
        """The same pool with other options for the calls that go through what is returned.

        Args:
            needs: The devices that a call holds while it runs; None for the CPU alone.
            timeout: Seconds that a call may run; None for no limit.
            max_calls: Calls after which the process is replaced, 0 for never; None for 1 where devices are needed, and
                else 0.
            retries: Times that a call is run again when its worker or its machine has died.

        Raises:
            UsageError: When an option makes no sense.
            NeverFitsError: When the machine can never serve the request.
        """
        changed = make_options(
            self._options.needs if needs is UNSET else needs,
            max_calls=(self._options.max_calls if needs is UNSET else None) if max_calls is UNSET else max_calls,
            timeout=self._options.timeout if timeout is UNSET else timeout,
            retries=self._options.retries if retries is UNSET else retries,
        )
        if changed.needs is not None:
            self._core.check(changed.needs)
        return Submitter(self._core, changed, self._owner or self)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> TaskFuture:
        """Run a function in a worker as soon as there is one, and devices for it.

        Returns:
            The future of its result. It can be cancelled also while the function runs.

        Raises:
            RuntimeError: When the pool was shut down.
            BrokenPoolError: When its workers cannot be set up.
        """
        return self._core.submit(self._options, fn, args, kwargs)

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        progress: bool | Callable[[Progress], None] = False,
    ) -> Iterator[Any]:
        """Run a function over arguments; the results come in their order.

        All arguments are taken at once. When the iterator is closed early, by an exception of a call for instance, the
        calls that are left are cancelled, those that run included.

        Args:
            fn: The function.
            iterables: Its arguments, one from each.
            timeout: Seconds until all results must be there.
            chunksize: How many calls go to a worker at once: more for short calls.
            progress: True to write to standard error how far it is, or a function that is told.

        Raises:
            TimeoutError: When a result is not there in time.
            Exception: What the first call that failed raised, in its place.
        """
        if chunksize < 1:
            raise ValueError(f"chunksize must be 1 or more (got {chunksize!r:.60})")
        end = None if timeout is None else time.monotonic() + timeout
        parts = list(chunks(zip(*iterables, strict=False), chunksize))
        counter = None
        if progress:
            tell = progress if callable(progress) else Printer()
            counter = Counter(sum(map(len, parts)), tell)
        futures = []
        for part in parts:
            future = self.submit(fn, *part[0]) if chunksize == 1 else self.submit(call_each, fn, part)
            if counter is not None:
                future.add_done_callback(partial(counter.count, calls=len(part)))
            futures.append(future)
        return _results(futures, end, chunked=chunksize > 1)

    def gang(self, hosts: int, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> GangFuture:
        """Run a function on several machines at once: one call on each, none before all have their devices.

        Each call finds its place in ``RANK`` and ``WORLD_SIZE``, and a port of rank 0's machine in ``MASTER_ADDR`` and
        ``MASTER_PORT``, as programs for ``torchrun`` do. Where devices of several machines are wired together in a
        slice, the machines are all those of one slice, and the ranks are their numbers in it. When a call fails, the
        others are ended.

        Args:
            hosts: How many machines. The engine ``"local"`` has one.
            fn: The function.
            args: Its arguments, the same for all.
            kwargs: The same.

        Returns:
            The future of a list: the results by rank.

        Raises:
            RuntimeError: When the pool was shut down.
            UsageError: When the pool's options make no sense for a gang.
            NeverFitsError: When there will never be so many machines that can serve the pool's needs.
            Exception: When the function or an argument cannot be pickled.
        """
        check_gang(hosts, self._options)
        # Each call has a process of its own: its variables say which rank it is.
        options = replace(self._options, max_calls=1)
        return self._core.gang(options, hosts, name_of(fn), dumps_whole((fn, args, kwargs)))

    def actor(self, cls: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Make an object in a process of its own, on devices of its own, and keep it there.

        Args:
            cls: Its class, or whatever makes it.
            args: Arguments of that.
            kwargs: Arguments of that.

        Returns:
            The actor; ``actor.method(...)`` returns a future. It may wait for its devices still.

        Raises:
            RuntimeError: When the pool was shut down.
        """
        state = ActorState(self._core, name_of(cls), self._options)
        self._core.enter(state.construction, (cls, args, kwargs))
        actor = Actor(state)
        # A finalizer runs wherever garbage is collected, perhaps under one of our locks: it only leaves a note.
        weakref.finalize(actor, loop().call_soon, state.close).atexit = False
        return actor

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls, let those that there are run, and end all workers.

        Args:
            wait: Whether to return only then.
            cancel_futures: Whether to cancel calls that have not started.
        """
        self._core.shutdown(wait=wait, cancel_futures=cancel_futures)


def _results(futures: list[TaskFuture], end: float | None, *, chunked: bool) -> Iterator[Any]:
    """What the futures yield, in order; each is forgotten as soon as it has been."""
    futures.reverse()
    try:
        while futures:
            futures[-1].result(None if end is None else end - time.monotonic())  # it is cancelled, too, if that fails
            if chunked:
                yield from futures.pop().result()
            else:
                yield futures.pop().result()
    finally:
        for future in futures:
            future.cancel()


def make_options(
    needs: RequestLike | None, *, max_calls: int | None, timeout: float | None, retries: int = 0
) -> Options:
    """Check options and fill in what depends on others.

    Raises:
        UsageError: When one makes no sense.
    """
    checked(max_calls=max_calls, timeout=timeout, retries=retries)
    request = None if needs is None else parse_request(needs)
    if max_calls is None:
        max_calls = 0 if request is None else 1
    return Options.of(needs=request, max_calls=max_calls, timeout=timeout, retries=retries)


def check_gang(hosts: object, options: Options) -> None:
    """Check what a gang is asked for.

    Raises:
        UsageError: When it makes no sense.
    """
    if not is_whole(hosts, 1):
        raise UsageError(f"hosts must be a whole number, 1 or more (got {hosts!r:.60})")
    if options.retries:
        raise UsageError("a gang is not run again when a worker has died; retries must be 0 for it")


def check_seconds(**seconds: object) -> None:
    """Check arguments that are times.

    Raises:
        UsageError: When one makes no sense.
    """
    for name, value in seconds.items():
        if not isinstance(value, (int, float)) or value < 0:
            raise UsageError(f"{name} must be a number of seconds, 0 or more (got {value!r:.60})")
