"""One function over many arguments: in chunks, and with word of how far it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from typing import Any, TextIO

from anyaccel.model import Value

EVERY_SECONDS = 10.0
"""How often a line is written where lines stay, such as into a file."""
FASTEST_SECONDS = 0.1
"""How often a line is redrawn on a terminal."""


class Progress(Value):
    """How far a :meth:`anyaccel.Pool.map` is.

    Attributes:
        done: Calls that are over, whatever became of them.
        failed: Those among them that raised, were cancelled, or lost their worker.
        total: All calls.
        seconds: Time since the start.
    """

    done: int
    failed: int
    total: int
    seconds: float

    @property
    def left_seconds(self) -> float | None:
        """Time that the rest will take if it goes on like this; None as long as nothing is done."""
        return self.seconds / self.done * (self.total - self.done) if self.done else None

    def __str__(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        left = "" if self.left_seconds is None else f", {_duration(self.left_seconds)} left"
        over = f"in {_duration(self.seconds)}"
        return f"{self.done} of {self.total} done{failed}{left if self.done < self.total else f' {over}'}"


class Counter:
    """Counts calls as they end, and tells somebody.

    Args:
        total: All calls.
        tell: Told each time, by whatever thread it happens in.
    """

    def __init__(self, total: int, tell: Callable[[Progress], None]) -> None:
        self._total = total
        self._tell = tell
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._done = self._failed = 0

    def count(self, future: Future[Any], calls: int) -> None:
        """Count the calls behind a future that is done."""
        failed = future.cancelled() or future.exception() is not None
        with self._lock:
            self._done += calls
            self._failed += calls if failed else 0
            self._tell(
                Progress(
                    done=self._done,
                    failed=self._failed,
                    total=self._total,
                    seconds=time.monotonic() - self._start,
                )
            )


class Printer:
    """Writes progress for people: one line that is redrawn on a terminal, else a line now and then.

    Args:
        stream: Where to; standard error when None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._redraws = self._stream.isatty()
        self._pause = FASTEST_SECONDS if self._redraws else EVERY_SECONDS
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Write it, unless something was written a moment ago."""
        over = progress.done == progress.total
        now = time.monotonic()
        if not over and now - self._last < self._pause:
            return
        self._last = now
        end = "\n" if over or not self._redraws else ""
        text = ("\r\x1b[K" if self._redraws else "") + str(progress) + end
        self._stream.write(text)
        self._stream.flush()


def chunks(arguments: Iterable[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Cut arguments into chunks of a size; the last may be smaller."""
    rest = iter(arguments)
    while chunk := list(islice(rest, size)):
        yield chunk


def call_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function with each of some arguments, in a worker."""
    return [function(*arguments) for arguments in chunk]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
