"""The table of devices: its columns, their cells, and its layout for a width."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from anyaccel.cli import output
from anyaccel.cli.sample import DeviceState, Holder
from anyaccel.cli.table import Column, fit_columns, has_value, spread
from anyaccel.errors import UsageError
from anyaccel.model import replace
from anyaccel.model.labels import write_labels
from anyaccel.text import cells, clock, elapsed, gibibytes, printable, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    Lines = list[list[output.Span]]

_PERCENT = 4
_FOLDED = 3
"""Most lines of a cell: a long note must not push the devices off the screen."""
# Blocks of an eighth to seven eighths of a cell: a bar is drawn to the eighth of a column.
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"


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
        wanted = bool(columns) or (has_value(values) if room is not None else bool(column.cell) or any(values))
        natural.append(max(cells(column.heading), *map(cells, values), 1) if wanted else 0)
        if column.name == "load" and room is not None and wanted:
            natural[at] = load  # a bar fills what room there is; without a terminal there is none
    gap, widths = fit_columns(shown, natural, room)
    for row, lines in zip(rows, content, strict=True):
        for at, (column, width) in enumerate(zip(shown, widths, strict=True)):
            text, style = lines[0][at]
            picture = width - _PERCENT - 1
            if column.name == "load" and picture > 1 and room is not None and row.seen.utilization is not None:
                lines[0][at] = (f"{draw(row, picture):<{picture}} {text}", style)
            elif column.name == "type" and cells(text) > width:
                # A cut-off canonical tag says less than a short one: Acme-Instrument-M3... and M300X.
                lines[0][at] = (min(map(printable, row.device.tags), key=len, default=text), style)
    (heading,) = spread(shown, [(column.heading, "bold") for column in shown], widths, gap, 1)
    found: list[Lines] = []
    seen: set[str] = set()
    for lines in content:
        found.append([])
        for line in lines:
            note = "".join(text for column, (text, _) in zip(shown, line, strict=True) if column.fold)
            # The devices of a lease have one note: the first of them shows it.
            found[-1] += spread(shown, line, widths, gap, 1 if note in seen else _FOLDED)
            seen.add(note)
    return heading, found, [column.name for column, width in zip(shown, widths, strict=True) if not width]


def plain_rows(rows: Sequence[DeviceState], columns: Sequence[DeviceColumn]) -> list[list[str]]:
    """Return the cells of the table, without styles, for a notebook."""
    return [[text for text, _ in line] for lines in _content(columns, rows) for line in lines]


def _content(columns: Sequence[DeviceColumn], rows: Sequence[DeviceState]) -> list[Lines]:
    """Return the cells of columns: for each device a line, and one for each further holder."""
    return [[_cells(columns, row, place) for place in range(max(1, len(row.holders)))] for row in rows]


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
