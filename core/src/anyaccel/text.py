"""Text from other users, devices and plug-ins, made safe for terminals; and text for people.

Notes, ids, models, error messages of plug-ins, names of directories and programs come from other users, devices,
recordings and plug-ins. No such text may steer a terminal, or add a line to printed or written text.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REPLACEMENT = "\ufffd"
_SHOWN = 60
LONGEST_TEXT = 250
"""Characters of a note, a request or another foreign text that are kept."""
_LISTED = 4
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_DURATION = 366 * _UNITS["d"]
"""Seconds of the longest duration that :func:`duration` takes."""
_BYTES = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024), ("", 1024))
}


def printable(text: str) -> str:
    """Return one line of plain text: white space becomes a space, characters without a glyph become U+FFFD.

    Characters without a glyph are control characters, marks of direction, lone surrogates and characters that are
    unknown to this version of Python.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else REPLACEMENT for char in text)


def clean(value: object) -> str:
    """Cut a foreign text to 250 characters, and replace each unprintable character; empty for anything but a text.

    White space becomes a space, so that one line is left; other characters become U+FFFD.
    """
    return printable(value[:LONGEST_TEXT]) if isinstance(value, str) else ""


def duration(text: object) -> float:
    """Parse a duration such as ``90s``, ``15m``, ``2h``, ``7d``, ``1h30m``, ``90`` or ``1:30:00``; return seconds.

    Raises:
        ValueError: When the text is no duration, 0, or more than 366 days. ``1:30`` could be minutes or hours, and is
            no duration.
    """
    import re

    given = text if isinstance(text, str) else ""
    if clock := re.fullmatch("([0-9]+):([0-5][0-9]):([0-5][0-9])", given):
        given = "{}h{}m{}s".format(*clock.groups())
    elif re.fullmatch(r"[0-9]+(\.[0-9]+)?", given):
        given += "s"
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smhd])", given)
    if not parts or "".join(number + unit for number, unit in parts) != given:
        raise ValueError(f"must be a duration such as 90s, 15m, 2h, 1h30m or 1:30:00 (got {shown(text)})")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not 0 < seconds <= LONGEST_DURATION:
        raise ValueError(f"must be more than 0 and at most 366d (got {shown(text)})")
    return seconds


def elapsed(seconds: float) -> str:
    """Write seconds for people, in the two largest units: ``2h14m``, ``8m05s``, ``12s``."""
    whole = max(0, int(seconds))
    for unit, name, smaller, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // smaller:02d}{below}"
    return f"{whole}s"


def clock(seconds: float | None) -> str:
    """Write a time in seconds since 1970 for people; None becomes ``-``.

    The date is left out today, and within half a day of now: then the time alone cannot be mistaken.
    """
    import time

    if seconds is None:
        return "-"
    then, now = time.localtime(seconds), time.localtime()
    if then[:3] == now[:3] or abs(seconds - time.time()) < _UNITS["d"] / 2:
        return time.strftime("%H:%M", then)
    # A time of another year needs no hour.
    return time.strftime("%m-%d %H:%M" if then.tm_year == now.tm_year else "%Y-%m-%d", then)


def span(seconds: float) -> str:
    """Write a duration exactly, in the form of :func:`duration`: ``1h``, ``1h30m``, ``0.5s``."""
    rest, found = seconds, ""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "m")):
        count, rest = divmod(rest, unit)
        found += f"{count:.0f}{name}" if count else ""
    return f"{found}{rest:g}s" if rest or not found else found


def size(text: str) -> int:
    """Parse an amount of memory such as ``40GiB``, ``8G`` or ``1.5TB``; return bytes, rounded up.

    Raises:
        ValueError: When the text is no amount, or 0.
    """
    import re

    match = re.fullmatch(r"([0-9]{1,18})(?:\.([0-9]{1,4}))?([A-Za-z]*)", text)
    unit = _BYTES.get(match[3].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"must be a number with a unit of B, KB, KiB, MB, MiB, GB, GiB, TB, TiB (got {shown(text)})")
    rest = match[2] or ""
    number, parts = int(match[1] + rest), int("1" + "0" * len(rest))
    if not number:
        raise ValueError(f"must be more than 0 (got {shown(text)}); leave it out")
    found: int = -(-number * unit // parts)
    return found


def memory(number: int | None) -> str:
    """Write bytes of memory for people; unknown is ``-``."""
    return "-" if number is None else f"{gibibytes(number)} GiB"


def gibibytes(number: int | None) -> str:
    """Write bytes of memory in GiB, without the unit; unknown is ``-``."""
    return "-" if number is None else f"{number / _BYTES['GIB']:.1f}"


def cells(text: str) -> int:
    """Return the columns of a printable text on a terminal."""
    if text.isascii():
        return len(text)
    import unicodedata

    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) != 0 for char in text)


def listed(items: Sequence[str]) -> str:
    """Join the first four texts with commas, and add the number of further texts."""
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more


def suggest(name: str, known: Iterable[str], otherwise: str = "", *, most: int = 3, cutoff: float = 0.6) -> str:
    """Return ``did you mean NAME?`` with the known names that are similar to a wrong one, or else another text.

    Upper and lower case are the same.

    Args:
        name: The wrong name.
        known: The known names.
        otherwise: The text if no known name is similar.
        most: Most names to return.
        cutoff: Least similarity, from 0 to 1, as measured by :mod:`difflib`.
    """
    from difflib import get_close_matches

    spelled = {each.casefold(): each for each in known}
    close = get_close_matches(name.casefold(), spelled, most, cutoff)
    return f"did you mean {' or '.join(spelled[each] for each in close)}?" if close else otherwise


def shown(value: object) -> str:
    """Return a wrong value for a message: its Python form, cut off after 60 characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a number of too many digits, a deep list, a class of the caller
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table for notebooks; cells are escaped and printable."""
    from html import escape

    def row(tag: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(printable(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<table><caption>{escape(printable(caption))}</caption>{row('th', columns)}{body}</table>"
