"""Durations as people write them on a command line: 90s, 15m, 2h, 1d, 1h30m."""

from __future__ import annotations

from anyaccel import text as texts


def duration(text: str) -> float:
    """Turn a duration into seconds.

    Raises:
        argparse.ArgumentTypeError: When it is none; a bare number is none either, since nobody can tell its unit.
    """
    try:
        return texts.duration(text)
    except ValueError as error:
        import argparse

        raise argparse.ArgumentTypeError(str(error)) from None
