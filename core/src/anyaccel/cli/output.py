"""What commands print: data on standard output, everything else on standard error.

Every text goes to a terminal, a file or a pipe through this module, which lets nothing through that is not plain text:
see :mod:`anyaccel.text`. What an encoding lacks is replaced. A stream that cannot be written is told in one message.
"""

from __future__ import annotations

import os
import sys
import time

from anyaccel.errors import AnyaccelError, PlacementError, UsageError
from anyaccel.text import cells, padded, printable, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any, Literal

    Span = tuple[str, str]
    """Text, and the name of its style in :data:`STYLES`; empty for none."""

_USUAL_WIDTH = 80
_USUAL_HEIGHT = 24
_NARROWEST = 8
_LEAST_CUT = 10
"""Columns that are left of what is cut off in a table, at least."""
_LOG_SECONDS = 600.0
_GAP = 2
"""Blanks between the columns of a table, and before its continued rows."""
STYLES = {"bold": "1", "dim": "2", "bad": "31", "good": "32", "warn": "33", "accent": "36"}
"""How a terminal is told to show what has a meaning."""


def prepare_streams() -> None:
    """Make the standard streams fit for use: call it before anything is opened or printed.

    A closed descriptor is kept closed for whoever reads or writes it, and its number is taken, so that no file of ours
    gets it and becomes the standard output of a command. A character that an encoding lacks is replaced.
    """
    for number, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # it gets the lowest free number, which is this one
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def print_line(text: str) -> None:
    """Print one line of data."""
    _print(f"{printable(text)}\n")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of data, each of which stays one line."""
    _print("".join(f"{printable(line)}\n" for line in lines))


def print_bytes(data: bytes) -> None:
    """Print what a command of this user has printed, as it is: what 'run' would have shown without a detour.

    Raises:
        BrokenPipeError: When its reader has gone.
        AnyaccelError: When it cannot be written otherwise.
    """
    if sys.stdout is not None:
        _print(data)


def print_folded(text: str) -> None:
    """Print one line of data, which a terminal gets in as many lines as it needs, broken between words."""
    print_lines(folded(text, width()) if is_terminal() else [text])


def print_document(text: str) -> None:
    """Print a text in a notation of its own, such as a script: as it is, or not at all.

    Raises:
        UsageError: When it holds other characters than printable ones and newlines, or such as the encoding lacks.
    """
    wrong = next((line for line in text.split("\n") if not line.isprintable()), None)
    if wrong is not None:
        raise UsageError(
            f"what is printed must be printable text (got {shown(wrong)})", hint="add --json, which can say it all"
        )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"standard output is {encoding}, which has no {text[error.start]!a}",
            hint="set PYTHONIOENCODING=utf-8, or add --json",
        ) from error
    _print(text)


def print_json(schema: str, content: Mapping[str, Any], *, on_one_line: bool = False) -> None:
    """Print one JSON document, with its schema's name and version, and the time."""
    document = {"schema": f"anyaccel.{schema}", "time": moment(time.time()), **content}
    _print_json(document, indent=None if on_one_line else 2)


def take_fields(value: object, *names: str) -> dict[str, Any]:
    """Take fields of a value into a JSON document, each under its own name; an empty text becomes null."""
    from anyaccel.model import encode  # vendors' processes start before it is imported

    fields = {name: encode(getattr(value, name)) for name in names}
    return {name: None if field == "" else field for name, field in fields.items()}


def moment(seconds: float) -> str:
    """Write a time since 1970 for programs."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def clock(seconds: float | None) -> str:
    """Write a time since 1970 for people, with the day where that is not today; unknown is ``-``."""
    if seconds is None:
        return "-"
    then, now = time.localtime(seconds), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%m-%d %H:%M" if then.tm_year == now.tm_year else "%Y-%m-%d", then)


def print_help(text: str) -> None:
    """Print text of our own, laid out in lines."""
    print_lines(text.removesuffix("\n").split("\n"))


def say(message: str) -> None:
    """Tell people something, on standard error, in one line; does nothing where nobody can be told."""
    _write("stderr", f"anyaccel: {printable(message)}\n")


def say_folded(message: str) -> None:
    """Tell people something, on standard error, in one line, or in as many as it needs where that is a terminal."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    for line in folded(f"anyaccel: {message}", width()) if terminal else [f"anyaccel: {printable(message)}"]:
        _write("stderr", f"{line}\n")


class StatusLine:
    """How something goes, on standard error: one line in place on a terminal, and next to nothing in a log.

    A log gets the first line and then one at most every ten minutes.

    Attributes:
        in_place: Whether each line takes the place of the one before.
    """

    def __init__(self) -> None:
        self._shown = 0
        self._said: float | None = None
        self.in_place = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def show(self, message: str) -> None:
        """Show how it goes now, cut off where the terminal ends."""
        now = time.monotonic()
        if not self.in_place:
            if self._said is None or now - self._said >= _LOG_SECONDS:
                self._said = now
                say(message)
            return
        text = shortened(printable(f"anyaccel: {message}"), max(1, _width_of(2) - 1), stream="stderr")
        self._said = now
        self._shown, before = cells(text), self._shown
        _write("stderr", f"\r{text}{' ' * (before - self._shown)}")

    def clear(self) -> None:
        """Take the line away, where it stands on a terminal, so that something else can be printed."""
        if self._shown:
            blanks = " " * max(self._shown, _width_of(2) - 1)  # also over what was typed behind it, such as ^C
            _write("stderr", f"\r{blanks}\r")
            self._shown = 0

    @property
    def used(self) -> bool:
        """Whether anything was shown."""
        return self._said is not None


def say_lines(text: str) -> None:
    """Tell people something of several lines, such as a traceback, each marked as ours."""
    for line in text.splitlines():
        say(line)


def report_error(error: AnyaccelError, *, as_json: bool) -> None:
    """Report an error: one message for people, or one JSON document."""
    if as_json:
        content: dict[str, Any] = {"code": error.code, "message": str(error), "hint": error.hint or None}
        if isinstance(error, PlacementError):
            content |= {name: value for name, value in error.verdict.to_json().items() if name not in content}
        try:
            _print_json({"error": content})
        except (AnyaccelError, BrokenPipeError):
            as_json = False
        else:
            return
    say(str(error))
    say_lines(error.hint)


def percent(ratio: float | None) -> str:
    """A part of a whole for people; unknown is ``-``."""
    return "-" if ratio is None else f"{ratio:.0%}"


def print_spans(lines: Iterable[Iterable[Span]]) -> None:
    """Print lines of text in several styles, which count only on a terminal that wants them."""
    _print("".join(f"{line}\n" for line in _styled(lines)))


class Screen:
    """Shows one frame after the other: in place of the last on a terminal, and below it, with the time, elsewhere."""

    def __init__(self) -> None:
        self._begun = False

    def show(self, lines: Iterable[Iterable[Span]]) -> None:
        """Show a frame; what has no room on the terminal is left out, and told."""
        text = list(_styled(lines))
        if not (is_terminal() and steered()):
            _print("".join(f"{line}\n" for line in (*[""] * self._begun, time.strftime("%H:%M:%S"), *text)))
        else:
            most = max(2, _size_of(1)[1] - 1)
            if len(text) > most:
                text[most - 1 :] = [f"{len(text) - most + 1} more lines"]
            begin = "\x1b[H" if self._begun else "\x1b[2J\x1b[H"
            _print(begin + "".join(f"{line}\x1b[K\n" for line in text) + "\x1b[J")
        self._begun = True


def _styled(lines: Iterable[Iterable[Span]]) -> Iterator[str]:
    colours = is_terminal() and coloured()
    for line in lines:
        written = ""
        for text, style in line:
            plain = printable(text)
            written += f"\x1b[{STYLES[style]}m{plain}\x1b[0m" if colours and style and plain.strip() else plain
        yield written if written.endswith("m") else written.rstrip()


def coloured() -> bool:
    """Whether the terminal that shows our output is to show colours and bold letters."""
    return not os.environ.get("NO_COLOR") and steered()


def steered() -> bool:
    """Whether the terminal knows sequences that steer it."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def writes(text: str, stream: Literal["stdout", "stderr"] = "stdout") -> bool:
    """Whether the encoding of a standard stream has all characters of a text."""
    try:
        text.encode(getattr(getattr(sys, stream), "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def shortened(text: str, room: int, *, stream: Literal["stdout", "stderr"] = "stdout") -> str:
    """Cut a printable text to so many columns of a terminal, and show that it is cut.

    Args:
        text: The text.
        room: The columns.
        stream: Where it will be written, which may lack the sign for what is cut.
    """
    if cells(text) <= room:
        return text
    sign = "\u2026" if writes("\u2026", stream) else "~"
    return (_beginning(text, max(0, room - 1)) + sign)[:room]


def _beginning(text: str, room: int) -> str:
    """As much of a printable text as fits into so many columns."""
    kept = text[:room]
    while cells(kept) > room:
        kept = kept[:-1]
    return kept


def folded(text: str, room: int) -> list[str]:
    """Cut a text into lines of so many columns at most, between words where that is possible; later ones indented."""
    lines, line = [], ""
    room = max(room, _NARROWEST)
    for word in printable(text).split(" "):
        rest = word
        if line and cells(line) + 1 + cells(rest) > room:
            lines.append(line)
            line = ""
        while cells(rest) > room - 2:
            head = _beginning(rest, room - 2)
            lines.append(f"{'  ' * bool(lines)}{head}")
            rest = rest[len(head) :]
        line = f"{line} {rest}" if line else f"{'  ' * bool(lines)}{rest}"
    return [*lines, line]


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, cut: int | None = None) -> None:
    """Print a table, one line per row and nothing cut off.

    On a terminal that is too narrow, the columns that do not fit stand in further lines of each row.

    Args:
        columns: Names of the columns.
        rows: The cells.
        cut: Position of a column that is cut off instead, if enough of it is left.
    """
    lines = [tuple(map(printable, row)) for row in (columns, *rows)]
    widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
    parts = [range(len(widths))]
    bold = False
    if is_terminal():
        if cut is not None:
            room = width() - (sum(widths) - widths[cut] + _GAP * (len(widths) - 1))
            if _LEAST_CUT <= room < widths[cut]:
                widths[cut] = room
                lines = [(*line[:cut], shortened(line[cut], room), *line[cut + 1 :]) for line in lines]
        parts = list(_parts(widths, width()))
        bold = coloured()
    text = ""
    for number, line in enumerate(lines):
        for place, part in enumerate(parts):
            shown_cells = (padded(line[at], widths[at]) for at in part)
            written = " " * (_GAP * (place > 0)) + (" " * _GAP).join(shown_cells).rstrip()
            text += (f"\x1b[1m{written}\x1b[0m" if bold and number == 0 else written) + "\n"
    _print(text)


def _parts(widths: Sequence[int], room: int) -> Iterator[range]:
    """Cut columns into lines, as many in each as there is room for, the first with the most."""
    start, used = 0, 0
    for at, width in enumerate(widths):
        if at > start and used + width > room:
            yield range(start, at)
            start, used = at, _GAP
        used += width + _GAP
    yield range(start, len(widths))


def width() -> int:
    """Columns of the terminal that shows our output: what COLUMNS says, what the terminal does, or else 80.

    It is what ``shutil.get_terminal_size`` says; that module imports half of all archive formats, which takes 4 ms.
    """
    return _width_of(1)


def _width_of(descriptor: int) -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) > 0 else _size_of(descriptor)[0]


def _size_of(descriptor: int) -> tuple[int, int]:
    """Return the columns and the lines of a terminal, or what a terminal usually has."""
    try:
        columns, lines = os.get_terminal_size(descriptor)
    except OSError:
        columns = lines = 0
    return columns or _USUAL_WIDTH, lines or _USUAL_HEIGHT


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def _print_json(document: Mapping[str, Any], indent: int | None = 2) -> None:
    import json

    _print(json.dumps(document, indent=indent) + "\n")  # ASCII, so that nothing in it is lost or steers a terminal


def _print(data: str | bytes) -> None:
    """Write data to standard output, at once.

    Raises:
        BrokenPipeError: When its reader has gone.
        AnyaccelError: When it cannot be written otherwise: the disk is full, it is closed.
    """
    error = _write("stdout", data)
    if isinstance(error, BrokenPipeError):
        raise error
    if error is not None:
        reason = error.strerror or str(error)
        raise AnyaccelError(
            f"standard output cannot be written: {reason}", hint="make room, or let it lead to another file"
        )


def _write(name: Literal["stdout", "stderr"], data: str | bytes) -> OSError | None:
    """Write to a standard stream, and say what went wrong."""
    stream = getattr(sys, name)
    if stream is None:  # it was closed when we started
        return OSError(None, "it is closed")
    try:
        (stream.buffer if isinstance(data, bytes) else stream).write(data)
        stream.flush()
    except OSError as error:
        # What could not be written stays in the stream, and would be tried again, and fail again, at the end.
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lasts as long as the process
        return error
    return None
