"""Progress of many calls, for a function of the user or as a display on a terminal or in a notebook."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, TextIO

from anyaccel.model import Value
from anyaccel.text import elapsed

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


class ProgressCounter:
    """Counts calls as they end, and calls a function with the progress; for the reactor's thread alone.

    Args:
        total: Number of all calls.
        callback: The function. It may fork, or shut the pool down.
    """

    def __init__(self, total: int, callback: ProgressCallback) -> None:
        self._total = total
        self._callback: ProgressCallback | None = callback
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
            self._callback(Progress(done=self._done, failed=self._failed, total=self._total, seconds=seconds))
        except BaseException:  # also SystemExit: the map goes on
            self._callback = None
            logging.getLogger("anyaccel").exception("the progress callback failed and is not called again")


def make_counter(total: int, progress: bool | ProgressCallback) -> ProgressCounter | None:
    """Return a counter of calls for a function, or for a display if ``progress`` is True; None if none can be shown."""
    callback = progress if callable(progress) else find_display(total)
    return None if callback is None else ProgressCounter(total, callback)


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
