"""What commands print: data on standard output, everything else on standard error.

Every text goes to a terminal, a file or a pipe through this module, which lets nothing through that is not plain text:
see :mod:`anyaccel.text`. What an encoding lacks is replaced. A stream that cannot be written is told in one message.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from anyaccel.errors import AnyaccelError, PlacementError, UsageError
from anyaccel.text import cells, printable, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Literal

GIB = 1 << 30
_USUAL_WIDTH = 80
_GAP = 2
"""Blanks between the columns of a table, and before its continued rows."""


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


def print_json(schema: str, content: Mapping[str, Any]) -> None:
    """Print one JSON document, with its schema's name and version, and the time."""
    _print_json({"schema": f"anyaccel.{schema}", "time": moment(time.time()), **content})


def moment(seconds: float) -> str:
    """Write a time since 1970 for programs."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def print_help(text: str) -> None:
    """Print text of our own, laid out in lines."""
    print_lines(text.removesuffix("\n").split("\n"))


def say(message: str) -> None:
    """Tell people something, on standard error, in one line; does nothing where nobody can be told."""
    _write("stderr", f"anyaccel: {printable(message)}\n")


def say_lines(text: str) -> None:
    """Tell people something of several lines, such as a traceback, each marked as ours."""
    for line in text.splitlines():
        say(line)


def report_error(error: AnyaccelError, *, as_json: bool) -> None:
    """Report an error: one message for people, or one JSON document."""
    if as_json:
        content: dict[str, Any] = {"code": error.code, "message": str(error), "hint": error.hint or None}
        if isinstance(error, PlacementError):
            content |= error.verdict.to_json()
        try:
            _print_json({"error": content})
        except (AnyaccelError, BrokenPipeError):
            as_json = False
        else:
            return
    say(str(error))
    say_lines(error.hint)


def memory(size: int | None) -> str:
    """Write an amount of memory for people; unknown is ``-``."""
    return "-" if size is None else f"{size / GIB:.1f} GiB"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, one line per row and nothing cut off.

    On a terminal that is too narrow, the columns that do not fit stand in further lines of each row.
    """
    lines = [tuple(map(printable, row)) for row in (columns, *rows)]
    widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
    parts = [range(len(widths))]
    bold = False
    if _is_terminal():
        parts = list(_parts(widths, width()))
        bold = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    text = ""
    for number, line in enumerate(lines):
        for place, part in enumerate(parts):
            shown_cells = (line[at] + " " * (widths[at] - cells(line[at])) for at in part)
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

    It is what ``shutil.get_terminal_size`` says; that module imports half of all archive formats.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(1).columns or _USUAL_WIDTH
    except OSError:
        return _USUAL_WIDTH


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _print_json(document: Mapping[str, Any]) -> None:
    import json

    _print(json.dumps(document, indent=2) + "\n")  # ASCII, so that nothing in it is lost or steers a terminal


def _print(text: str) -> None:
    """Write data to standard output, at once.

    Raises:
        BrokenPipeError: When its reader has gone.
        AnyaccelError: When it cannot be written otherwise: the disk is full, it is closed.
    """
    error = _write("stdout", text)
    if isinstance(error, BrokenPipeError):
        raise error
    if error is not None:
        reason = error.strerror or str(error)
        raise AnyaccelError(
            f"standard output cannot be written: {reason}", hint="make room, or let it lead to another file"
        )


def _write(name: Literal["stdout", "stderr"], text: str) -> OSError | None:
    """Write to a standard stream, and say what went wrong."""
    stream = getattr(sys, name)
    if stream is None:  # it was closed when we started
        return OSError(None, "it is closed")
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        # What could not be written stays in the stream, and would be tried again, and fail again, at the end.
        setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - it lasts as long as the process
        return error
    return None
