"""Backend class for joblib; the import needs joblib."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from anyaccel import Pool
from joblib.parallel import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
)

from anyaccel_integrations.n_jobs import count_jobs

JOBLIBS_OWN = frozenset({"context", "max_nbytes", "mmap_mode", "prefer", "require", "temp_folder", "verbose"})
"""Options of joblib's own backends, which this one ignores: a pool passes large arrays without copies anyway."""
CLEANUP_SECONDS = 10.0
"""How long a failed ``Parallel`` waits for its cancelled batches and for an iterator of arguments that still runs."""


class AnyaccelBackend(ParallelBackendBase):  # type: ignore[misc, unused-ignore]
    """Backend for joblib: each batch runs in a worker with its own devices.

    A ``Parallel`` inside a batch uses threads, which share the devices of the batch, as in joblib's other backends.

    Args:
        needs: The request of each batch, such as ``"GPU:1"``; None for the CPU alone.
        nesting_level: The number of calls of ``Parallel`` around this one, as joblib counts.
        inner_max_num_threads: Not supported: joblib refuses the argument.
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
        self._running: set[Future[Any]] = set()
        self._aborted = False
        self._callbacks: ThreadPoolExecutor | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return how many batches run at the same time, limited by the devices."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        count = count_jobs(n_jobs, self._options["needs"], self._options)
        # With one job, a running Parallel would call the functions in its own process, without a device. The pool
        # still runs only as many batches as there are devices.
        return count if self._pool is None else max(2, count)

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, n_jobs: int | None = 1, parallel: Any = None, **options: Any
    ) -> int:
        """Open the pool, and return how many batches run at the same time."""
        if self._owner is not parallel:
            # parallel_config shares one backend among all calls of Parallel, and several generators may live at once.
            own = AnyaccelBackend(nesting_level=self.nesting_level, **self._options)
            own._options |= {name: value for name, value in options.items() if name not in JOBLIBS_OWN}
            own._owner = parallel
            own.configure(n_jobs, parallel)  # raises from here: joblib would swallow an error while it falls back
            raise FallbackToBackend(own)
        if self._pool is not None:
            return self.effective_n_jobs(n_jobs)
        self.parallel = parallel
        count = self.effective_n_jobs(n_jobs)
        if count == 1 and self._options["needs"] is None:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        pool: dict[str, Any] = {"max_workers": count, **self._options}
        self._pool = Pool(**pool)
        # joblib's callback takes the next arguments from the caller's iterator, which may be slow or use pools: it
        # would block the thread that serves every pool.
        self._callbacks = ThreadPoolExecutor(1, thread_name_prefix="anyaccel joblib")
        return max(2, count)

    def start_call(self) -> None:
        """Accept batches again: the same Parallel begins a call, perhaps after a failed call."""
        self._aborted = False

    def submit(self, func: Callable[[], Any], callback: Callable[[Future[Any]], Any] | None = None) -> Future[Any]:
        """Submit a batch to the pool."""
        if self._pool is None or self._callbacks is None:
            raise RuntimeError("the pool of this Parallel is closed: its generator was closed or garbage-collected")
        future = self._pool.submit(func)
        self._running.add(future)
        if callback is not None:
            future.add_done_callback(partial(_call_later, self._callbacks, callback))
        future.add_done_callback(self._running.discard)
        if self._aborted:  # by another thread, after the first look of joblib
            future.cancel()
        return future

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        """Return the result of a batch, or raise its exception."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:  # noqa: ARG002 - the backend is ready either way
        """Cancel running and waiting batches, and wait until joblib has heard of each."""
        self._aborted = True
        for future in list(self._running):
            future.cancel()
        # joblib would take a later callback for one of the next call.
        end = time.monotonic() + CLEANUP_SECONDS
        while self._running and time.monotonic() < end:
            time.sleep(0.001)
        if self._callbacks is not None:
            wait([self._callbacks.submit(int)], timeout=CLEANUP_SECONDS)

    def terminate(self) -> None:
        """Shut down the pool and wait until the devices are released."""
        pool, self._pool = self._pool, None
        callbacks, self._callbacks = self._callbacks, None
        if pool is not None:
            pool.shutdown(wait=True)
        if callbacks is not None:
            callbacks.shutdown(wait=False)


def _call_later(callbacks: ThreadPoolExecutor, callback: Callable[[Any], Any], future: Future[Any]) -> None:
    try:
        callbacks.submit(callback, future)
    except RuntimeError:  # shut down: joblib waits for no batch any more
        return
