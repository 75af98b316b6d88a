"""Measure side by side, so that ratios hold while the machine's speed drifts."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was measured.
        seconds: Median time.
        ratio: How many times the reference, or None where there is none or the budget is an absolute time.
        reference: What the ratio is to.
        budget: What it may be, in words.
        kept: Whether it is within its budget; None where there is none.
        group: What is compared with others in the picture; empty where nothing is.
        who: Who did it: ``anyaccel``, a peer, or ``floor`` for the least that the kernel takes.
    """

    what: str
    seconds: float
    budget: str = ""
    kept: bool | None = None
    ratio: float | None = None
    reference: str = ""
    group: str = ""
    who: str = ""

    def to_json(self) -> dict[str, object]:
        """The row as JSON data."""
        return asdict(self)


def at_most(what: str, seconds: float, limit: float, *, group: str = "", who: str = "") -> Row:
    """A row with an absolute budget in seconds."""
    return Row(
        what=what, seconds=seconds, budget=f"at most {duration(limit)}", kept=seconds <= limit, group=group, who=who
    )


def against(reference: str, times: Mapping[str, float], budgets: Mapping[str, float | None]) -> list[Row]:
    """Rows for times that may be at most so many times a reference; those without a limit only say how many."""
    floor = times[reference]
    return [Row(what=reference, seconds=floor, ratio=1.0, reference=reference)] + [
        Row(
            what=what,
            seconds=times[what],
            ratio=times[what] / floor,
            reference=reference,
            budget="" if limit is None else f"at most {limit:.3g}x {reference}",
            kept=None if limit is None else times[what] <= limit * floor,
        )
        for what, limit in budgets.items()
    ]


def duration(seconds: float) -> str:
    """A time for people to read, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, *, pause: float = 0.0) -> dict[str, float]:
    """Median seconds of several calls, one of each per round and at least one, after a round that does not count.

    Args:
        calls: The calls by name.
        rounds: How many.
        pause: Seconds before each call.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(max(1, rounds) + 1):
        for name, call in calls.items():
            time.sleep(pause)
            start = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def median(call: Callable[[], object], calls: int) -> float:
    """Median seconds of a call, after one that does not count."""
    return interleaved({"": call}, calls)[""]


def command(
    argv: Sequence[str], env: Mapping[str, str], *, before: Callable[[], None] | None = None
) -> Callable[[], object]:
    """A call that runs a command to its end and refuses to time one that fails.

    Args:
        argv: The command.
        env: Its environment.
        before: Called in its process before it begins.
    """

    def call() -> None:
        subprocess.run(
            argv, env=dict(env), preexec_fn=before, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    return call


@contextmanager
def state() -> Iterator[str]:
    """A state directory of our own, on tmpfs where there is one, so that a busy machine changes nothing."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as directory:
        before = os.environ.get("ANYACCEL_STATE_DIR")
        os.environ["ANYACCEL_STATE_DIR"] = directory
        try:
            yield directory
        finally:
            if before is None:
                del os.environ["ANYACCEL_STATE_DIR"]
            else:
                os.environ["ANYACCEL_STATE_DIR"] = before
