"""Tables of commands: their layout on a terminal and in a pipe, and the table of devices."""

from __future__ import annotations

import time

from anyaccel.cli import output
from anyaccel.errors import UsageError
from anyaccel.model import Value, replace, write_labels
from anyaccel.text import cells, clock, elapsed, gibibytes, printable, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anyaccel.cli.sample import DeviceState, Holder

    Lines = list[list[output.Span]]

_GAP = 2
"""Blanks between the columns of a table."""
_LEAST_FOLDED = 10
"""Width below which the last column of a simple table is left out."""
_MODEST = 24
"""Width up to which every column grows before one grows further."""
_WANTED = 10
"""Columns of a table with a lower turn are worth narrower gaps."""
_PERCENT = 4
_FOLDED = 3
"""Most lines of a cell: a long note must not push the devices off the screen."""
# Blocks of an eighth to seven eighths of a cell: a bar is drawn to the eighth of a column.
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"


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

    A pipe or a file gets every column, a terminal those that have a value and room.

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
        max(cells(column.heading), *map(cells, values), 1) if room is None or _has_value(values) else 0
        for column, values in zip(columns, zip(*table, strict=True) if table else [()] * len(columns), strict=True)
    ]
    gap, widths = _fit_columns(columns, natural, room)
    headings = [column.heading for column in columns]
    return [
        "".join(text for text, _ in line).rstrip()
        for row in (headings, *table)
        for line in _spread(columns, [(cell, "") for cell in row], widths, gap)
    ]


def _spread(
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


def _has_value(values: Iterable[str]) -> bool:
    """Return whether any cell of a column has a value."""
    return any(value.strip() not in ("", "-") for value in values)


def _fit_columns(columns: Sequence[Column], natural: Sequence[int], room: int | None) -> tuple[int, list[int]]:
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


class DeviceColumn(Column):
    """A column of the table of devices.

    Attributes:
        cell: Returns the text for a device and its style; None for a column about holders.
        of_holder: Returns the text for a holder of the device and its style.
    """

    cell: Callable[[DeviceState], tuple[str, str]] | None = None
    of_holder: Callable[[Holder], tuple[str, str]] | None = None

    @property
    def name(self) -> str:
        """Name for ``--columns``: the heading in lower case, without its unit."""
        return self.heading.lower().partition("/")[0]


def memory_use(used: int | None, size: int | None) -> str:
    """Format memory in use and in total, in GiB; ``-`` for unknown."""
    return "-" if used is size is None else f"{gibibytes(used)}/{gibibytes(size)}"


def bar(ratio: float, width: int) -> str:
    """Draw a ratio as a bar of blocks."""
    whole, rest = divmod(round(min(max(ratio, 0.0), 1.0) * width * 8), 8)
    return (_FULL * whole + (_EIGHTHS[rest] if rest else ""))[:width]


def since(moment: float | None) -> str:
    """Format the time that has passed since a moment; None becomes ``-``."""
    return "-" if moment is None else elapsed(time.time() - moment)


def _load_style(ratio: float | None) -> str:
    return "dim" if ratio is None else "warn" if ratio > 0.9 else "good"  # noqa: PLR2004


def _heat_style(celsius: float | None) -> str:
    return "" if celsius is None or celsius < 80 else "bad" if celsius >= 90 else "warn"  # noqa: PLR2004


def _user(holder: Holder) -> tuple[str, str]:
    return holder.user, "warn" if not holder.lease else "bold" if holder.mine else ""


def _with(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def megahertz(hertz: int | None) -> str:
    """Format a clock rate; None becomes ``-``."""
    return "-" if hertz is None else f"{hertz / 1e6:.0f}MHz"


COLUMNS = (
    DeviceColumn(heading="DEVICE", cell=lambda row: (row.device.name, "bold"), turn=0),
    DeviceColumn(heading="TYPE", cell=lambda row: (row.device.type, ""), turn=6, least=8),
    DeviceColumn(heading="MODEL", cell=lambda row: (row.device.model, "")),
    DeviceColumn(
        heading="MEM/GiB",
        cell=lambda row: (memory_use(row.seen.memory_used_bytes, row.device.memory_bytes), ""),
        turn=8,
        right=True,
    ),
    DeviceColumn(
        heading="LOAD",
        cell=lambda row: (f"{output.percent(row.seen.utilization):>{_PERCENT}}", _load_style(row.seen.utilization)),
        turn=9,
        least=_PERCENT,
    ),
    DeviceColumn(
        heading="TEMP",
        cell=lambda row: (_with(row.seen.temperature_celsius, "C"), _heat_style(row.seen.temperature_celsius)),
        turn=11,
        right=True,
    ),
    DeviceColumn(heading="POWER", cell=lambda row: (_with(row.seen.power_watts, "W"), ""), turn=12, right=True),
    DeviceColumn(heading="CLOCK", cell=lambda row: (megahertz(row.seen.clock_hz), ""), right=True),
    DeviceColumn(
        heading="ECC",
        cell=lambda row: (_with(row.seen.ecc_errors_uncorrected, ""), "bad" if row.seen.ecc_errors_uncorrected else ""),
        right=True,
    ),
    DeviceColumn(heading="STATE", cell=lambda row: row.describe(), turn=1),
    DeviceColumn(heading="FREE", cell=lambda row: (row.describe_free(), ""), right=True),
    DeviceColumn(heading="USER", of_holder=_user, turn=2, least=6),
    DeviceColumn(heading="SHARE", of_holder=lambda holder: (holder.share, ""), turn=7, right=True),
    DeviceColumn(heading="PROGRAM", of_holder=lambda holder: (holder.program, ""), turn=13, least=8),
    DeviceColumn(heading="COMMAND", of_holder=lambda holder: (holder.command, "")),
    DeviceColumn(
        heading="HELD", of_holder=lambda holder: (since(holder.since) if holder.lease else "", ""), turn=14, right=True
    ),
    DeviceColumn(
        heading="UNTIL",
        turn=3,
        of_holder=lambda holder: (clock(holder.until) if holder.lease or holder.until else "", ""),
    ),
    DeviceColumn(heading="LEASE", of_holder=lambda holder: (holder.lease, "dim"), turn=5),
    DeviceColumn(heading="PROCESS", of_holder=lambda holder: (str(holder.pid or "-"), ""), turn=15, right=True),
    DeviceColumn(heading="NOTE", of_holder=lambda holder: (holder.note, ""), turn=4, least=16, fold=True),
    DeviceColumn(heading="PCI", cell=lambda row: (row.device.pci_bus_id or "-", "")),
    DeviceColumn(
        heading="NUMA",
        cell=lambda row: (str("-" if row.device.numa_node is None else row.device.numa_node), ""),
        right=True,
    ),
    DeviceColumn(heading="LABELS", cell=lambda row: (", ".join(write_labels(row.device.labels)) or "-", "")),
    DeviceColumn(heading="ID", cell=lambda row: (row.device.id, "dim"), turn=16),
)
"""All columns, in the order in which they are shown."""


def choose_columns(names: str) -> tuple[DeviceColumn, ...]:
    """Return the columns of a list of names, separated by commas; they get room in that order.

    Args:
        names: The names; headings, in any case and with their unit, are understood, too.

    Raises:
        UsageError: When a name is unknown.
    """
    by_name = {column.name: column for column in COLUMNS}
    found: list[DeviceColumn] = []
    # A column that is named twice is shown once.
    for name in dict.fromkeys(each.strip().lower().partition("/")[0] for each in names.split(",")):
        if name not in by_name:
            told = suggest(name, by_name, f"there are {', '.join(by_name)}")
            raise UsageError(f"there is no column {name!r}; {told}", hint="see 'anyaccel status --help'")
        found.append(replace(by_name[name], turn=len(found)))
    return tuple(found)


def lay_out(
    rows: Sequence[DeviceState],
    room: int | None,
    columns: Sequence[DeviceColumn] = (),
    *,
    draw: Callable[[DeviceState, int], str] = lambda row, width: bar(row.seen.utilization or 0.0, width),
    load: int = 15,
) -> tuple[list[output.Span], list[Lines], list[str]]:
    """Lay out the devices of a machine, a line for each device and for each further holder.

    Args:
        rows: The devices.
        room: Width of the terminal; None for no limit, and no bars.
        columns: Columns that the user asked for; the usual ones when empty.
        draw: Draws the load of a device, in a width.
        load: Width of the column of the load where there is room.

    Returns:
        The heading, the lines of each device, and the names of requested columns that have no room.
    """
    shown = list(columns) or [column for column in COLUMNS if column.turn is not None]
    content = _content(shown, rows)
    natural = []
    for at, column in enumerate(shown):
        values = [line[at][0] for lines in content for line in lines]
        wanted = bool(columns) or (_has_value(values) if room is not None else bool(column.cell) or any(values))
        natural.append(max(cells(column.heading), *map(cells, values), 1) if wanted else 0)
        if column.name == "load" and room is not None and wanted:
            natural[at] = load  # a bar fills what room there is; without a terminal there is none
    gap, widths = _fit_columns(shown, natural, room)
    for row, lines in zip(rows, content, strict=True):
        for at, (column, width) in enumerate(zip(shown, widths, strict=True)):
            text, style = lines[0][at]
            picture = width - _PERCENT - 1
            if column.name == "load" and picture > 1 and room is not None and row.seen.utilization is not None:
                lines[0][at] = (f"{draw(row, picture):<{picture}} {text}", style)
            elif column.name == "type" and cells(text) > width:
                # A cut-off canonical tag says less than a short one: Acme-Instrument-M3... and M300X.
                lines[0][at] = (min(map(printable, row.device.tags), key=len, default=text), style)
    (heading,) = _spread(shown, [(column.heading, "bold") for column in shown], widths, gap, 1)
    found: list[Lines] = []
    seen: set[str] = set()
    for lines in content:
        found.append([])
        for line in lines:
            note = "".join(text for column, (text, _) in zip(shown, line, strict=True) if column.fold)
            # The devices of a lease have one note: the first of them shows it.
            found[-1] += _spread(shown, line, widths, gap, 1 if note in seen else _FOLDED)
            seen.add(note)
    return heading, found, [column.name for column, width in zip(shown, widths, strict=True) if not width]


def plain_rows(rows: Sequence[DeviceState], columns: Sequence[DeviceColumn]) -> list[list[str]]:
    """Return the cells of the table, without styles, for a notebook."""
    return [[text for text, _ in line] for lines in _content(columns, rows) for line in lines]


def _content(columns: Sequence[DeviceColumn], rows: Sequence[DeviceState]) -> list[Lines]:
    """Return the cells of columns: a line for each device and, with columns about holders, for each further holder."""
    holders = any(column.of_holder is not None for column in columns)
    places = [range(len(row.holders) if holders and row.holders else 1) for row in rows]
    return [[_cells(columns, row, place) for place in each] for row, each in zip(rows, places, strict=True)]


def _cells(columns: Sequence[DeviceColumn], row: DeviceState, place: int) -> list[output.Span]:
    """Return the cells of a line: the device in the first line, each holder in a line."""
    found = []
    for column in columns:
        text, style = "", ""
        if column.cell is not None and place == 0:
            text, style = column.cell(row)
        elif column.of_holder is not None and row.holders:
            text, style = column.of_holder(row.holders[place])
        # Before widths are counted: a control character takes no column, its replacement does.
        found.append((printable(text), style))
    return found
