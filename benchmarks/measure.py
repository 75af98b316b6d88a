"""Measure side by side, so that ratios hold while the machine's speed drifts."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        what: What was measured.
        seconds: Median time.
        ratio: How many times the reference, or None where the budget is an absolute time.
        reference: What the ratio is to.
        budget: What it may be, in words.
        kept: Whether it is within its budget; None where there is none.
    """

    what: str
    seconds: float
    budget: str = ""
    kept: bool | None = None
    ratio: float | None = None
    reference: str = ""

    def to_json(self) -> dict[str, object]:
        """The row as JSON data."""
        return asdict(self)


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of several calls, one of each per round, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def command(argv: Sequence[str], env: Mapping[str, str]) -> Callable[[], object]:
    """A call that runs a command to its end and refuses to time one that fails."""

    def call() -> None:
        subprocess.run(argv, env=dict(env), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return call


def against(reference: str, times: Mapping[str, float], budgets: Mapping[str, float]) -> list[Row]:
    """Rows for times that may be at most so many times a reference."""
    floor = times[reference]
    return [Row(what=reference, seconds=floor, ratio=1.0, reference=reference)] + [
        Row(
            what=what,
            seconds=times[what],
            ratio=times[what] / floor,
            reference=reference,
            budget=f"at most {limit:g}x",
            kept=times[what] <= limit * floor,
        )
        for what, limit in budgets.items()
    ]
