"""Durations as people write them: 90s, 15m, 2h, 1d, 1h30m."""

from __future__ import annotations

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST = 366 * UNITS["d"]


def duration(text: str) -> float:
    """Turn a duration into seconds.

    Raises:
        argparse.ArgumentTypeError: When it is none; a bare number is none either, since nobody can tell its unit.
    """
    import argparse
    import re

    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"must be a duration such as 90s, 15m, 2h or 1h30m (got {text!r})")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= LONGEST:
        raise argparse.ArgumentTypeError(f"must be more than 0 and at most 366d (got {text!r})")
    return seconds
