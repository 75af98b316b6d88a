"""The backend that joblib sees; imported once joblib is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from joblib.parallel import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from anyaccel.integrations.capacity import count_jobs
from anyaccel.pool.call import CallFuture
from anyaccel.pool.pool import Pool

JOBLIBS_OWN = frozenset({"context", "max_nbytes", "mmap_mode", "prefer", "require", "temp_folder", "verbose"})
"""Options that joblib passes to every backend and that mean nothing here: large arrays travel without copies anyway."""
PATIENCE = 10.0
"""Seconds that an iterator of arguments may keep a call of Parallel that has failed from ending."""


class AnyaccelBackend(ParallelBackendBase):  # type: ignore[misc, unused-ignore]
    """Runs batches in the workers of a pool, each with devices of its own.

    ``Parallel`` inside of a batch uses threads, which share the batch's devices, as under joblib's other backends.

    Args:
        needs: What each batch holds while it runs, such as ``"GPU:1"``; None for the CPU alone.
        nesting_level: How deep in other calls of ``Parallel`` we are, as joblib counts.
        inner_max_num_threads: Not supported, and refused by joblib; masks do not limit threads.
        options: Further options of :class:`anyaccel.Pool`.
    """

    default_n_jobs = -1
    supports_retrieve_callback = True
    uses_threads = False
    supports_sharedmem = False

    def __init__(
        self,
        needs: Any = None,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._options: dict[str, Any] = {"needs": needs, **options}
        self._owner: Any = None
        self._pool: Pool | None = None
        self._running: set[CallFuture] = set()
        self._aborted = False
        self._callbacks: ThreadPoolExecutor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """How many batches run at the same time: no more than the devices allow."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        count = count_jobs(n_jobs, self._options["needs"], self._options)
        # A Parallel that runs is told two, since with one it would call the functions in its own process, without any
        # device. The pool does not start more than there are for that.
        return count if self._pool is None else max(2, count)

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, n_jobs: int | None = 1, parallel: Any = None, **options: Any
    ) -> int:
        """Make the pool for the calls that follow."""
        if self._owner is not parallel:
            # parallel_config has one backend for all, and generators of several may live at the same time.
            own = AnyaccelBackend(nesting_level=self.nesting_level, **self._options)
            own._options |= {name: value for name, value in options.items() if name not in JOBLIBS_OWN}
            own._owner = parallel
            own.configure(n_jobs, parallel)  # what is wrong is told from here, not while falling back
            raise FallbackToBackend(own)
        if self._pool is not None:
            return self.effective_n_jobs(n_jobs)
        self.parallel = parallel
        count = self.effective_n_jobs(n_jobs)
        if count == 1 and self._options["needs"] is None:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        pool: dict[str, Any] = {"max_workers": count, **self._options}
        self._pool = Pool(**pool)
        # What joblib does when a batch is done takes arguments from the user's iterator, which may take its time or
        # use pools itself: not in the thread that serves them all.
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="anyaccel joblib")
        return max(2, count)

    def start_call(self) -> None:
        """A call of the same Parallel begins, perhaps after one that failed."""
        self._aborted = False

    def submit(self, func: Callable[[], Any], callback: Callable[[CallFuture], Any] | None = None) -> CallFuture:
        """Have a batch run."""
        if self._pool is None or self._callbacks is None:
            raise RuntimeError("the pool of this Parallel has ended, perhaps because its generator was thrown away")
        future = self._pool.submit(func)
        self._running.add(future)
        if callback is not None:
            future.add_done_callback(partial(_pass_on, self._callbacks, callback))
        future.add_done_callback(self._running.discard)
        if self._aborted:  # meanwhile, by another thread
            future.cancel()
        return future

    def retrieve_result_callback(self, out: CallFuture) -> Any:
        """What a batch returned; raises what it raised."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:  # noqa: ARG002 - it is ready either way
        """End what runs, and forget what waits."""
        self._aborted = True
        for future in list(self._running):
            future.cancel()
        # Joblib would take what it is told later for news of the next call.
        end = time.monotonic() + PATIENCE
        while self._running and time.monotonic() < end:
            time.sleep(0.001)
        if self._callbacks is not None:
            wait([self._callbacks.submit(int)], timeout=PATIENCE)

    def terminate(self) -> None:
        """End the pool: its devices have been given back when this returns."""
        pool, self._pool = self._pool, None
        callbacks, self._callbacks = self._callbacks, None
        if pool is not None:
            pool.shutdown(wait=True)
        if callbacks is not None:
            callbacks.shutdown(wait=False)


def _pass_on(callbacks: ThreadPoolExecutor, callback: Callable[[Any], Any], future: Future[Any]) -> None:
    try:
        callbacks.submit(callback, future)
    except RuntimeError:  # it was shut down: joblib has all that it wants
        return
