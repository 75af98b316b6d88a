"""Output of commands: data on standard output, everything else on standard error.

Every text goes to a terminal, a file or a pipe through this module, which replaces all that is not plain text
(:mod:`anyaccel.text`) and characters that an encoding lacks. If a stream cannot be written, the user gets one message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time

from anyaccel.errors import AnyaccelError, PlacementError, UsageError
from anyaccel.text import cells, printable, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any, Literal

    Span = tuple[str, str]
    """A text and the name of its style in :data:`STYLES`; an empty name for none."""

_USUAL_WIDTH = 80
_USUAL_HEIGHT = 24
_NARROWEST = 8
_DIGITS = 6
"""Digits of the widest terminal that an environment may name."""
_LOG_SECONDS = 600.0
STYLES = {"bold": "1", "dim": "2", "bad": "31", "good": "32", "warn": "33", "accent": "36"}
"""Parameters of the terminal sequences for each style."""


def prepare_streams() -> None:
    """Prepare the standard streams, before a command opens files or prints.

    Closed descriptors are replaced by ones that cannot be read or written. Otherwise the next file that this process
    opens would become standard output of a command. Characters that an encoding lacks are replaced.
    """
    for number, flags in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # the kernel returns the lowest free number, which is this one
    # Python uses the error handler "strict" for standard output: one device with a name in Chinese would end a
    # command in an encoding error.
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def print_line(text: str) -> None:
    """Print a line of data."""
    print_raw(f"{printable(text)}\n")


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of data, with newlines inside of lines replaced."""
    print_raw("".join(f"{printable(line)}\n" for line in lines))


def print_folded(text: str) -> None:
    """Print one line of data, broken between words to the width of the terminal."""
    print_lines(folded(text, width()) if is_terminal() else [text])


def print_document(text: str) -> None:
    """Print a text in a notation of its own, such as a script, unchanged or not at all.

    Raises:
        UsageError: When the text has characters that are not printable, or that the encoding lacks.
    """
    wrong = next((line for line in text.split("\n") if not line.isprintable()), None)
    if wrong is not None:
        raise UsageError(
            f"output must be printable text (got {shown(wrong)})", hint="add --json, which escapes such characters"
        )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"standard output is {encoding}, which has no {text[error.start]!a}",
            hint="set PYTHONIOENCODING=utf-8, or add --json",
        ) from error
    print_raw(text)


def print_json(schema: str, content: Mapping[str, Any], *, on_one_line: bool = False) -> None:
    """Print a JSON document with the schema's name and version, and the time."""
    document = {"schema": f"anyaccel.{schema}", "time": moment(time.time()), **content}
    _print_json(document, indent=None if on_one_line else 2)


def take_fields(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of a value as JSON, by their names; an empty text becomes null."""
    from anyaccel.model import encode  # vendors' processes start before it is imported

    fields = {name: encode(getattr(value, name)) for name in names}
    # Records use an empty text for a value that is unknown; JSON has null for that.
    return {name: None if field == "" else field for name, field in fields.items()}


def moment(seconds: float | None) -> str | None:
    """Format a time in seconds since 1970 for programs, in UTC; None stays None."""
    return None if seconds is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def print_help(text: str) -> None:
    """Print a text of several lines."""
    print_lines(text.removesuffix("\n").split("\n"))


def say(message: str) -> None:
    """Print a message on standard error, broken between words to the width of a terminal; a log gets one line.

    Does nothing if standard error is closed.
    """
    text = printable(f"anyaccel: {message}")
    for line in folded(text, width(2)) if is_terminal(2) else [text]:
        _write("stderr", f"{line}\n")


def say_verbatim(line: str) -> None:
    """Print a line on standard error without the program's name, to be copied into a shell."""
    _write("stderr", f"{printable(line)}\n")


class StatusLine:
    """A progress message on standard error.

    On a terminal it is one line, updated in place. A log gets the first message, then at most one every ten minutes.
    """

    def __init__(self) -> None:
        self._shown = 0
        self._said: float | None = None

    @property
    def in_place(self) -> bool:
        """Whether each message replaces the one before; a job redirects standard error while it waits."""
        return is_terminal(2) and can_move_cursor()

    def show(self, message: str) -> None:
        """Show a message, cut off at the width of the terminal."""
        now = time.monotonic()
        if not self.in_place:
            # A log of a wait of days would else hold nothing but the same message.
            if self._said is None or now - self._said >= _LOG_SECONDS:
                self._said = now
                say(message)
            return
        text = shortened(printable(f"anyaccel: {message}"), max(1, width(2) - 1))
        self._said = now
        self._shown, before = cells(text), self._shown
        _write("stderr", f"\r{text}{' ' * (before - self._shown)}")

    def clear(self) -> None:
        """Erase the line from the terminal, so that other output can be printed."""
        if self._shown:
            # The whole width: the user may have typed behind the message, such as ^C.
            blanks = " " * max(self._shown, width(2) - 1)
            _write("stderr", f"\r{blanks}\r")
            self._shown = 0

    @property
    def used(self) -> bool:
        """Whether a message was shown."""
        return self._said is not None


def say_lines(text: str) -> None:
    """Print a message of several lines on standard error, such as a traceback, with the program's name on each."""
    for line in text.splitlines():
        say(line)


def report_error(error: AnyaccelError, *, as_json: bool) -> None:
    """Report an error, as a message for people or as a JSON document."""
    if as_json:
        content: dict[str, Any] = {"code": error.code, "message": str(error), "hint": error.hint or None}
        if isinstance(error, PlacementError):
            content |= {name: value for name, value in error.verdict.to_json().items() if name not in content}
        # Standard output may be closed or full: then the message goes to standard error.
        with contextlib.suppress(AnyaccelError, BrokenPipeError):
            return _print_json({"error": content})
    say(str(error))
    return say_lines(error.hint)


def drop_traceback(error: BaseException) -> None:
    """Let IPython show an error as the command line does, without the traceback through modules of this project."""
    told = (str(error) or "interrupted", *getattr(error, "hint", "").splitlines())
    lines = [printable(f"anyaccel: {each}") for each in told]
    vars(error)["_render_traceback_"] = lambda: lines  # IPython prints what this returns


def device_names(names: Iterable[str]) -> str:
    """Write names of devices as a request has them: ``acme/0-3,6``; ``-`` for none."""
    from anyaccel.model import join_names  # vendors' processes start before it is imported

    return join_names(names) or "-"


def percent(ratio: float | None) -> str:
    """Format a ratio as a percentage; None becomes ``-``."""
    return "-" if ratio is None else f"{ratio:.0%}"


def print_spans(lines: Iterable[Iterable[Span]]) -> None:
    """Print lines of styled text. Styles are dropped unless standard output is a terminal with colours."""
    print_raw("".join(f"{line}\n" for line in _styled(lines)))


class Screen:
    """Shows frames one after the other: in place on a terminal; elsewhere below each other, each with the time."""

    def __init__(self) -> None:
        self._begun = False

    def show(self, lines: Iterable[Iterable[Span]]) -> None:
        """Show a frame. Lines that do not fit on the terminal are counted in its last line."""
        text = list(_styled(lines))
        if not (is_terminal() and can_move_cursor()):
            print_raw("".join(f"{line}\n" for line in (*[""] * self._begun, time.strftime("%H:%M:%S"), *text)))
        else:
            # One line is left for the cursor: a newline in the last line would scroll.
            most = max(2, _size_of(1)[1] - 1)
            if len(text) > most:
                text[most - 1 :] = [f"{len(text) - most + 1} more lines"]
            # Only the first frame clears the screen: clearing before each would flicker.
            begin = "\x1b[H" if self._begun else "\x1b[2J\x1b[H"
            print_raw(begin + "".join(f"{line}\x1b[K\n" for line in text) + "\x1b[J")
        self._begun = True


def _styled(lines: Iterable[Iterable[Span]]) -> Iterator[str]:
    colours = is_terminal() and can_move_cursor() and not os.environ.get("NO_COLOR")
    for line in lines:
        # Each span is made plain by itself: a style must not begin within the text of another user.
        written = ""
        for text, style in line:
            plain = printable(text)
            written += f"\x1b[{STYLES[style]}m{plain}\x1b[0m" if colours and style and plain.strip() else plain
        # A line that ends in a style ends in its reset sequence: blanks before that are part of the style.
        yield written if written.endswith("m") else written.rstrip()


def can_move_cursor() -> bool:
    """Return whether the terminal understands escape sequences."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def shortened(text: str, room: int) -> str:
    """Cut a printable text to a width in columns of a terminal, with an ellipsis at the cut."""
    return text if cells(text) <= room else (_beginning(text, max(0, room - 1)) + "\u2026")[:room]


def _beginning(text: str, room: int) -> str:
    """Return the longest beginning of a printable text that fits a width."""
    kept = text[:room]
    # A wide character takes two columns, so that there may be too many by half.
    while cells(kept) > room:
        kept = kept[:-1]
    return kept


def folded(text: str, room: int) -> list[str]:
    """Break a text into lines of a width, between words if possible; further lines are indented by two blanks."""
    lines, line = [], ""
    # A terminal of one column would get a line for each letter.
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


def width(descriptor: int = 1) -> int:
    """Return the width of a terminal: that in COLUMNS, else that of the terminal, else 80.

    ``shutil.get_terminal_size`` returns the same; its module imports archive formats, which takes 4 ms.
    """
    # Shells set COLUMNS but do not export it: an exported value is the wish of the user.
    columns = os.environ.get("COLUMNS", "")
    # int() takes digits of all scripts, and refuses thousands of them.
    wish = int(columns) if columns.isascii() and columns.isdecimal() and len(columns) <= _DIGITS else 0
    return wish or _size_of(descriptor)[0]


def _size_of(descriptor: int) -> tuple[int, int]:
    """Return the columns and lines of a terminal, or 80 and 24."""
    try:
        columns, lines = os.get_terminal_size(descriptor)
    except OSError:
        columns = lines = 0
    # A serial console has 0 columns and lines.
    return columns or _USUAL_WIDTH, lines or _USUAL_HEIGHT


def is_terminal(descriptor: int = 1) -> bool:
    """Return whether standard output is a terminal, or standard error, which is descriptor 2."""
    stream = sys.stdout if descriptor == 1 else sys.stderr
    return stream is not None and stream.isatty()


def _print_json(document: Mapping[str, Any], indent: int | None = 2) -> None:
    import json

    print_raw(
        json.dumps(document, indent=indent) + "\n"
    )  # ASCII: no encoding loses it, and no terminal takes it for an escape sequence


def print_raw(data: str | bytes) -> None:
    """Print text or bytes without replacing anything.

    Raises:
        BrokenPipeError: When the reader has closed the pipe.
        AnyaccelError: When writing fails for another reason, such as a full disk.
    """
    error = _write("stdout", data)
    if isinstance(error, BrokenPipeError):
        raise error
    if error is not None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise AnyaccelError(
            f"standard output cannot be written: {error.strerror or error}",
            hint="free some space, or redirect the output to another file" if full else "redirect the output to a file",
        )


def _write(name: Literal["stdout", "stderr"], data: str | bytes) -> OSError | None:
    """Write to a standard stream and flush; return the error, or None."""
    stream = getattr(sys, name)
    if stream is None:  # Python sets it to None if the descriptor was closed at the start
        return OSError(None, "the stream is closed")
    try:
        # Bytes go to the buffer below the text layer, which is flushed with each write and so is never out of
        # order.
        (stream.buffer if isinstance(data, bytes) else stream).write(data)
        stream.flush()
    except OSError as error:
        # The data stays in the stream's buffer. The interpreter would write it again at exit, and fail again. What
        # writes later must fail as well: an error as JSON that is lost so has to go to standard error.
        setattr(sys, name, None)
        return error
    return None
