"""Times in arguments of commands: dates, times of a day, and durations from now."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import time
from collections.abc import Callable

from anyaccel.text import duration as parse_duration


def moment(*, ahead: bool) -> Callable[[str], float]:
    """Return a parser of local times, as seconds since 1970, see :func:`read_moment`; a duration counts from now."""
    return lambda text: read_moment(text, time.time(), ahead=ahead)


def read_moment(text: str, start: float, *, ahead: bool) -> float:
    """Turn ``now``, ``2h``, ``14:30``, ``2026-12-01`` or ``2026-12-01 14:30`` into seconds since 1970.

    Args:
        text: The text.
        start: The time from which a duration or a time without a date counts. A time of the day is the next one from
            there, also where clocks are put back and show it twice.
        ahead: Whether it counts forward; else back.

    Raises:
        argparse.ArgumentTypeError: When the text is no time and no duration.
    """
    if text == "now":
        return time.time()
    with contextlib.suppress(ValueError):
        return start + parse_duration(text) * (1 if ahead else -1)
    # Without a time zone until the end: the day before or after may have another offset.
    base = dt.datetime.fromtimestamp(start)  # noqa: DTZ006 - local time is meant
    try:
        if len(text) > len("14:30") or ":" not in text:
            first, *again = _list_moments(dt.datetime.fromisoformat(text))
            return again[0] if again and ahead and first < start else first
        today = dt.datetime.combine(base.date(), dt.time.fromisoformat(text.zfill(5)))
        days = [today + dt.timedelta(days=each) for each in (-1, 0, 1)]
        moments = [each for day in days for each in _list_moments(day)]
        if ahead:
            return min(each for each in moments if each >= start)
        return max(each for each in moments if each <= start)
    except (ValueError, OverflowError):
        forms = (
            "must be a time such as 14:30, a date 2026-12-01, both '2026-12-01 14:30', a duration 2h of at most 366d,"
            " or now"
        )
        raise argparse.ArgumentTypeError(f"{forms} (got {text!r:.40})") from None


def _list_moments(found: dt.datetime) -> list[float]:
    """Return when a local time comes, in seconds since 1970: twice where clocks are put back and show it twice.

    A time that clocks skip counts as if they were put forward after it.
    """
    first, second = (found.replace(fold=fold).timestamp() for fold in (0, 1))
    return [first, second] if second > first else [first]
