"""In a worker: the event loop for coroutines, and threads for methods of an actor that run at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any

from anyaccel.pool.channel import Message


class Lanes:
    """Threads for simultaneous calls, a thread for each call.

    Daemon threads, unlike those of ThreadPoolExecutor: a process that is asked to end does not wait for them.

    Args:
        run: Runs a call and sends its answer.
    """

    def __init__(self, run: Callable[[Message], object]) -> None:
        self._run = run
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def put(self, message: Message) -> None:
        """Run a call in an idle thread, or in a new one; returns at once."""
        self._messages.put(message)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name="anyaccel lane", daemon=True).start()

    def _work(self) -> None:
        """Run calls sequentially, for ever."""
        while True:
            self._run(self._messages.get())
            self._idle.release()


class Loop:
    """The event loop of this process, in a thread of its own, so that tasks go on between calls."""

    def __init__(self) -> None:
        self._closing = False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anyaccel loop", daemon=True)
        self._thread.start()
        self._begun.wait()

    def finish(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop's thread, and wait; return the value or raise the exception.

        Raises:
            CancelledError: When the loop is closing; the coroutine is not run then, or was cancelled.
            RuntimeError: When the loop has closed just now.
            BaseException: The exception of the coroutine.
        """
        if self._closing:
            coroutine.close()
            raise CancelledError
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def ended(self, error: BaseException) -> bool:
        """Return whether an exception of a coroutine is the consequence of :meth:`close`.

        Any CancelledError or RuntimeError counts after that.
        """
        return self._closing and isinstance(error, (CancelledError, RuntimeError))

    def close(self) -> None:
        """Cancel all tasks, stop the loop, and return when the tasks' clean-up is over."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def _run(self) -> None:
        """Run the event loop until :meth:`close`, then cancel its tasks."""
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._end = asyncio.Event()
            self._begun.set()
            runner.run(self._end.wait())
