"""Quantities of a command line, each a ``type`` for an argument parser."""

from __future__ import annotations

from anyaccel import text as texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable


def duration(text: str) -> float:
    """Turn a duration such as 90s, 15m, 2h, 1h30m, 90 or 1:30:00 into seconds.

    Raises:
        argparse.ArgumentTypeError: When the text is not a duration.
    """
    try:
        return texts.duration(text)
    except ValueError as error:
        raise _refused(str(error)) from None


def moment(text: str, after: float | None = None) -> float:
    """Turn a local time into seconds since 1970: ``now``, ``14:30``, or ``2026-12-01 14:30``.

    Args:
        text: The time.
        after: The time after which a time without a date is the next; now when None.

    Raises:
        argparse.ArgumentTypeError: When the text is not a time.
    """
    import datetime as dt
    import time

    if text == "now":
        return time.time()
    start = dt.datetime.fromtimestamp(time.time() if after is None else after).astimezone()
    try:
        if len(text) <= len("14:30") and ":" in text:
            found = dt.datetime.combine(start.date(), dt.time.fromisoformat(text.zfill(5))).astimezone()
            return (found if found >= start else found + dt.timedelta(days=1)).timestamp()
        return dt.datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise _refused(f"must be a time such as 14:30 or '2026-12-01 14:30' (got {text!r:.40})") from None


def end_moment(text: str) -> Callable[[float], float]:
    """Turn the end of a period into a function of its start: a time as of :func:`moment`, or a duration such as 4h.

    Raises:
        argparse.ArgumentTypeError: When the text is neither.
    """
    try:
        lasts = texts.duration(text)
    except ValueError:
        moment(text)
        return lambda begin: moment(text, begin)
    return lambda begin: begin + lasts


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Return a parser of a duration between two bounds, in seconds."""

    def kind(text: str) -> float:
        value = duration(text)
        if not least <= value <= most:
            raise _refused(f"must be from {texts.span(least)} to {texts.span(most)} (got {text!r:.40})")
        return value

    return kind


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of a whole number between two bounds."""

    def kind(text: str) -> int:
        # int() takes underscores, blanks and digits of all scripts.
        number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) else -1
        if not least <= number <= most:
            raise _refused(f"must be a whole number from {least} to {most} (got {text!r:.40})")
        return number

    return kind


def early_signal(text: str) -> str:
    """Check a signal to send some time before a time limit, such as USR1@60s.

    Raises:
        argparse.ArgumentTypeError: When the text is not a signal and a duration.
    """
    from anyaccel.launcher.time_limit import EarlySignal

    try:
        EarlySignal.parse(text)
    except ValueError as error:
        raise _refused(str(error)) from None
    return text


def add_grace(parser: argparse.ArgumentParser, default: float | None = 10.0, *, of: str = "10s") -> None:
    """Declare the time between SIGTERM and SIGKILL.

    Args:
        parser: The parser.
        default: Its value if the option is not given.
        of: Description of the default, for the help.
    """
    parser.add_argument(
        "--grace", metavar="DURATION", type=duration, default=default, help=f"time to end after SIGTERM (default: {of})"
    )


def _refused(message: str) -> argparse.ArgumentTypeError:
    import argparse

    return argparse.ArgumentTypeError(message)
