"""Times that functions of anyaccel take: a number of seconds, or a text such as ``"1h30m"``."""

from __future__ import annotations

from anyaccel.errors import UsageError
from anyaccel.text import duration, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import overload

Duration = float | str
"""A number of seconds, or a text: ``"90s"``, ``"15m"``, ``"2h"``, ``"7d"``, ``"1h30m"``, ``"90"``, ``"1:30:00"``."""

# mypy takes overloads in a block of their own, without other statements, as those of the function that follows.
if TYPE_CHECKING:

    @overload
    def read_seconds(name: str, value: Duration, *, least: float = 0.0, positive: bool = False) -> float: ...
    @overload
    def read_seconds(
        name: str, value: Duration | None, *, least: float = 0.0, positive: bool = False
    ) -> float | None: ...


def read_seconds(name: str, value: Duration | None, *, least: float = 0.0, positive: bool = False) -> float | None:
    """Return the value of an argument in seconds; None stays None.

    Args:
        name: Name of the argument, for the message.
        value: The value.
        least: The least number that is permitted; a text is always more than 0.
        positive: Whether the number must be more than 0.

    Raises:
        UsageError: If the value is neither such a number nor a duration.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return duration(value)
        except ValueError as error:
            raise UsageError(f"{name} {error}") from None
    # Callers without a type checker may pass any value; nan fails the comparisons.
    if isinstance(value, (int, float)) and (value > 0 if positive else value >= least):  # type: ignore[redundant-expr]
        return value
    bound = "more than 0" if positive else f"{least:g} or more" if least > float("-inf") else "any"
    raise UsageError(f"{name} must be a number of seconds ({bound}) or a text such as '1h30m' (got {shown(value)})")
