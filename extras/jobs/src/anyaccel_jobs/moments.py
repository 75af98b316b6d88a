"""Moments of a command line: a date, a time of day, or a duration from now."""

from __future__ import annotations

import argparse
import contextlib
import time

from anyaccel.cli import duration

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")


def moment(*, ahead: bool) -> Callable[[str], float]:
    """Return a parser of moments, for an argument parser; a moment is seconds since 1970.

    Args:
        ahead: Whether a duration, or a time without a date, means the future; else the past.
    """

    def kind(text: str) -> float:
        for form in _DATES:
            with contextlib.suppress(ValueError, OverflowError):
                return time.mktime(time.strptime(text, form))
        now = time.time()
        with contextlib.suppress(ValueError):
            clock, today = time.strptime(text, "%H:%M"), time.localtime(now)
            days = [today.tm_mday + day for day in ((0, 1) if ahead else (0, -1))]
            # mktime accepts day 0 and day 32, and knows how long a day is when the clocks change.
            found = [
                time.mktime((today.tm_year, today.tm_mon, day, clock.tm_hour, clock.tm_min, 0, 0, 0, -1))
                for day in days
            ]
            # 18:00 is today or tomorrow for --begin, today or yesterday for --since.
            return next(each for each in found if (each > now) == ahead)
        try:
            seconds = duration(text)
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(
                f"must be a date such as 2026-11-30, with a time 2026-11-30T18:00, a time 18:00, or a duration 2h (got"
                f" {text!r:.40})"
            ) from None
        return now + seconds if ahead else now - seconds

    return kind
