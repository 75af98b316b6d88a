"""Quantities as people write them on a command line, each a ``type`` for an argument parser."""

from __future__ import annotations

from anyaccel import text as texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def duration(text: str) -> float:
    """Turn a duration such as 90s, 15m, 2h, 1d or 1h30m into seconds.

    Raises:
        argparse.ArgumentTypeError: When it is none; a bare number is none either, since nobody can tell its unit.
    """
    try:
        return texts.duration(text)
    except ValueError as error:
        raise _refused(str(error)) from None


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Take a bare number of seconds, from the least to the most; for options that were there before durations."""

    def kind(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:  # also refuses nan
            raise _refused(f"must be seconds, from {least:g} to {most:g} (got {text!r:.40})")
        return value

    return kind


def whole(least: int, most: int) -> Callable[[str], int]:
    """Take a whole number, from the least to the most."""

    def kind(text: str) -> int:
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) else -1
        if not least <= number <= most:
            raise _refused(f"must be a whole number from {least} to {most} (got {text!r:.40})")
        return number

    return kind


def early_signal(text: str) -> str:
    """Check a signal that is sent some time before a time limit, such as USR1@60s.

    Raises:
        argparse.ArgumentTypeError: When it is none.
    """
    from anyaccel.launcher.time_limit import EarlySignal

    try:
        EarlySignal.parse(text)
    except ValueError as error:
        raise _refused(str(error)) from None
    return text


def add_grace(parser: argparse.ArgumentParser, default: float | None = 10.0, *, of: str = "10s") -> None:
    """Let a command say how long what is asked to end has for that.

    Args:
        parser: Where to add it.
        default: What holds where nothing is said.
        of: How the help calls that.
    """
    parser.add_argument(
        "--grace", metavar="DURATION", type=duration, default=default, help=f"time to end after SIGTERM (default: {of})"
    )


def _refused(message: str) -> argparse.ArgumentTypeError:
    import argparse

    return argparse.ArgumentTypeError(message)
