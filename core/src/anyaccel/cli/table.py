"""Tables of commands: their layout on a terminal and in a pipe."""

from __future__ import annotations

from anyaccel.cli import output
from anyaccel.model import Value
from anyaccel.text import cells, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GAP = 2
"""Blanks between the columns of a table."""
_LEAST_FOLDED = 10
"""Width below which the last column of a simple table is left out."""
_MODEST = 24
"""Width up to which every column grows before one grows further."""
_WANTED = 10
"""Columns of a table with a lower turn are worth narrower gaps."""


class Column(Value):
    """A column of a table.

    Attributes:
        heading: Text above the column.
        turn: Place in the order in which columns get room on a terminal, the lowest first; None for a column that is
            shown on request only.
        least: Width below which the column is left out; 0 for the width of its widest cell.
        right: Align the cells to the right.
        fold: Continue a cell that is too long in further lines, instead of cutting it off.
    """

    heading: str
    turn: int | None = None
    least: int = 0
    right: bool = False
    fold: bool = False


def print_table(columns: Sequence[Column | str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of data.

    A pipe or a file gets every column. A terminal gets the columns that have a value and room, see :func:`fit_columns`.

    Args:
        columns: The columns, or their headings: then the first columns come first, and the last one is folded.
        rows: The cells; an unknown value is ``-``.
    """
    last = len(columns) - 1
    made = [
        Column(heading=each, turn=turn, least=_LEAST_FOLDED * (turn == last), fold=turn == last)
        if isinstance(each, str)
        else each
        for turn, each in enumerate(columns)
    ]
    heading, *lines = table_lines(made, rows, output.width() if output.is_terminal() else None)
    output.print_spans([[(heading, "bold")], *([(line, "")] for line in lines)])


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None) -> list[str]:
    """Return the lines of a table, its heading first.

    Args:
        columns: The columns.
        rows: The cells; an unknown value is ``-``.
        room: Width of the terminal; None for no limit.
    """
    table = [[printable(cell) for cell in row] for row in rows]
    natural = [
        max(cells(column.heading), *map(cells, values), 1) if room is None or has_value(values) else 0
        for column, values in zip(columns, zip(*table, strict=True) if table else [()] * len(columns), strict=True)
    ]
    gap, widths = fit_columns(columns, natural, room)
    headings = [column.heading for column in columns]
    return [
        "".join(text for text, _ in line).rstrip()
        for row in (headings, *table)
        for line in spread(columns, [(cell, "") for cell in row], widths, gap)
    ]


def spread(
    columns: Sequence[Column], row: Sequence[output.Span], widths: Sequence[int], gap: int, most: int | None = None
) -> list[list[output.Span]]:
    """Lay out a row of printable cells: pad each to the width of its column, and cut or fold those that are too long.

    Args:
        columns: The columns.
        row: The cells.
        widths: The width of each column; 0 for one that is left out.
        gap: Blanks between columns.
        most: Most lines of a folded cell, of which the last is cut off; None for any number.

    Returns:
        The lines.
    """
    parts = [
        (column, width, style, _fold(text, width, most if column.fold else 1))
        for column, (text, style), width in zip(columns, row, widths, strict=True)
        if width
    ]
    lines = []
    for number in range(max(len(texts) for *_, texts in parts)):
        line: list[output.Span] = []
        for column, width, style, texts in parts:
            text = texts[number] if number < len(texts) else ""
            before, blank = " " * gap if line else "", " " * (width - cells(text))
            ends = [(before + blank, ""), (text, style)] if column.right else [(before, ""), (text, style), (blank, "")]
            line += ends
        lines.append(line)
    return lines


def _fold(text: str, width: int, most: int | None) -> list[str]:
    """Break a cell into at most so many lines of a width."""
    if most == 1 or cells(text) <= width:
        return [output.shortened(text, width)]
    parts = output.folded(text, width)
    if most is not None and len(parts) > most:
        rest = " ".join(part.strip() for part in parts[most - 1 :])
        parts[most - 1 :] = [output.shortened(f"  {rest}", width)]
    return parts


def has_value(values: Iterable[str]) -> bool:
    """Return whether any cell of a column has a value."""
    return any(value.strip() not in ("", "-") for value in values)


def fit_columns(columns: Sequence[Column], natural: Sequence[int], room: int | None) -> tuple[int, list[int]]:
    """Divide the width of a terminal among columns.

    In turn, each column with a turn below :data:`_WANTED` gets its least width, and then up to :data:`_MODEST`. The
    other columns follow if there is room, and what is left goes to the widest cells. Two blanks separate columns, or
    one if two would leave out a column below :data:`_WANTED`.

    Args:
        columns: The columns.
        natural: Width of the widest cell of each; 0 for a column to leave out.
        room: Width of the terminal; None for no limit.

    Returns:
        The blanks between columns, and the width of each column; 0 for one that is left out.
    """
    if room is None:
        return _GAP, list(natural)
    order = sorted((at for at in range(len(columns)) if natural[at]), key=lambda at: columns[at].turn or 0)
    wanted = [at for at in order if (columns[at].turn or 0) < _WANTED]
    least = {at: min(natural[at], columns[at].least or natural[at]) for at in order}
    for first in order[:1]:
        least[first] = max(1, min(least[first], room))  # a terminal is never too narrow for the first column
    gap = _GAP if sum(least[at] + _GAP for at in wanted) <= room + _GAP else 1
    left, widths = room + gap, [0] * len(columns)
    # A name of 200 characters must not keep the other columns narrow.
    for placed, most in ((wanted, _MODEST), (order[len(wanted) :], _MODEST), ([], room)):
        for at in placed:
            if least[at] + gap <= left:
                widths[at] = least[at]
                left -= least[at] + gap
        for at in order:
            more = min(max(0, min(natural[at], most) - widths[at]), left) if widths[at] else 0
            widths[at] += more
            left -= more
    return gap, widths
