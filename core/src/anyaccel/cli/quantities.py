"""Quantities of a command line, each a ``type`` for an argument parser."""

from __future__ import annotations

import time

from anyaccel import text as texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    Options = argparse.ArgumentParser | argparse._ArgumentGroup  # noqa: SLF001 - argparse has no public name for it
    """A parser, or a group of its options with a heading in the help."""


class BareSeconds(float):
    """A duration that was given without a unit, which people may have meant in minutes."""


def duration(text: str) -> float:
    """Turn a duration such as 90s, 15m, 2h, 1h30m, 90 or 1:30:00 into seconds; a number alone becomes BareSeconds.

    Raises:
        argparse.ArgumentTypeError: When the text is not a duration.
    """
    try:
        seconds = texts.duration(text)
    except ValueError as error:
        raise _refused(str(error)) from None
    return BareSeconds(seconds) if text[-1:].isdecimal() and ":" not in text else seconds


def moment(*, ahead: bool) -> Callable[[str], float]:
    """Return a parser of local times, as seconds since 1970, see :func:`read_moment`; a duration counts from now."""
    return lambda text: read_moment(text, time.time(), ahead=ahead)


def end_moment(text: str) -> Callable[[float], float]:
    """Turn the end of a period into a function of its start: a time after the start, or a duration such as 4h.

    Raises:
        argparse.ArgumentTypeError: When the text is neither.
    """
    read_moment(text, time.time(), ahead=True)
    return lambda begin: read_moment(text, begin, ahead=True)


def read_moment(text: str, start: float, *, ahead: bool) -> float:
    """Turn ``now``, ``2h``, ``14:30``, ``2026-12-01`` or ``2026-12-01 14:30`` into seconds since 1970.

    Args:
        text: The text.
        start: The time from which a duration or a time without a date counts.
        ahead: Whether it counts forward; else back.

    Raises:
        argparse.ArgumentTypeError: When the text is no time and no duration.
    """
    import contextlib  # late: this module is imported before the fork server is started
    import datetime as dt

    if text == "now":
        return time.time()
    with contextlib.suppress(ValueError):
        return start + texts.duration(text) * (1 if ahead else -1)
    # Without a time zone until the end: the day before or after may have another offset.
    base = dt.datetime.fromtimestamp(start)  # noqa: DTZ006 - local time is meant
    try:
        if len(text) > len("14:30") or ":" not in text:
            return dt.datetime.fromisoformat(text).timestamp()
        found = dt.datetime.combine(base.date(), dt.time.fromisoformat(text.zfill(5)))
        if (found < base) if ahead else (found > base):
            found += dt.timedelta(days=1 if ahead else -1)
        return found.timestamp()
    except (ValueError, OverflowError):
        forms = "must be a time such as 14:30, a date 2026-12-01, both '2026-12-01 14:30', or a duration 2h"
        raise _refused(f"{forms} (got {text!r:.40})") from None


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


def add_grace(parser: Options, default: float | None = 10.0, *, of: str = "10s") -> None:
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
