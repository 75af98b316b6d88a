"""The table of devices: which columns there are, what stands in them, and how many there is room for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from anyaccel.cli import output
from anyaccel.cli import sample as samples
from anyaccel.cli.sample import Holder, Sample
from anyaccel.errors import UsageError
from anyaccel.model import Device, Stats, Value, format_units
from anyaccel.model.labels import write_labels
from anyaccel.text import cells, elapsed, gibibytes, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    Lines = list[list[output.Span]]

_GAP = 2
_WANTED = 15
"""Columns whose turn is before that are worth a narrower gap."""
_ALL = 1 << 30
"""As wide as the widest cell."""
_PERCENT = 4
_EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"
_FULL = "\u2588"


class DeviceRow(Value):
    """A device with what is known of it."""

    device: Device
    seen: Stats
    sample: Sample
    holders: tuple[Holder, ...]


class Column(Value):
    """One column of the table.

    Attributes:
        name: By which people ask for it.
        heading: What stands above it.
        about: What it shows.
        cell: What it shows of a device, and the style of that; None where it shows something of each holder.
        of_holder: What it shows of a holder.
        steps: Widths that it may have, each with its turn: the lower, the earlier it gets that room. Without any it is
            shown on demand only.
        right: Whether its cells end below each other.
    """

    name: str
    heading: str
    about: str
    cell: Callable[[DeviceRow], tuple[str, str]] | None = None
    of_holder: Callable[[Holder], tuple[str, str]] | None = None
    steps: tuple[tuple[int, int], ...] = ()
    right: bool = False


def used_of(used: int | None, size: int | None) -> str:
    """Memory in use, of all, in GiB; what is unknown is ``-``."""
    told = [gibibytes(each) for each in (used, size)]
    return "-" if used is size is None else "/".join(told)


def bar(ratio: float, width: int) -> str:
    """Draw a part of a whole, in blocks where the encoding has them."""
    ratio = min(max(ratio, 0.0), 1.0)
    if not output.writes(_FULL + _EIGHTHS):
        return "#" * round(ratio * width)
    whole, rest = divmod(round(ratio * width * 8), 8)
    return (_FULL * whole + (_EIGHTHS[rest] if rest else ""))[:width]


def since(moment: float | None) -> str:
    """How long ago something was, for people."""
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
    """A clock for people; unknown is ``-``."""
    return "-" if hertz is None else f"{hertz / 1e6:.0f}MHz"


COLUMNS = (
    Column(
        name="device", heading="DEVICE", about="name, which can be typed as a request",
        cell=lambda row: (row.device.name, "bold"), steps=((0, 8), (1, _ALL)),
    ),
    Column(
        name="type", heading="TYPE", about="accelerator type",
        cell=lambda row: (row.device.type, ""), steps=((4, 7), (13, 12), (24, _ALL)),
    ),
    Column(
        name="model", heading="MODEL", about="the vendor's name of the product",
        cell=lambda row: (row.device.model, ""),
    ),
    Column(
        name="memory", heading="MEM/GiB", about="memory in use, of all, in GiB", right=True,
        cell=lambda row: (used_of(row.seen.memory_used_bytes, row.device.memory_bytes), ""), steps=((5, _ALL),),
    ),
    Column(
        name="load", heading="LOAD", about="share of time that it was busy",
        cell=lambda row: (f"{output.percent(row.seen.utilization):>{_PERCENT}}", _load_style(row.seen.utilization)),
        steps=((6, _PERCENT), (14, 10), (26, 15)),
    ),
    Column(
        name="temp", heading="TEMP", about="temperature in degrees Celsius", right=True,
        cell=lambda row: (_with(row.seen.temperature_celsius, "C"), _heat_style(row.seen.temperature_celsius)),
        steps=((9, _ALL),),
    ),
    Column(
        name="power", heading="POWER", about="power drawn, in watts", right=True,
        cell=lambda row: (_with(row.seen.power_watts, "W"), ""), steps=((10, _ALL),),
    ),
    Column(
        name="clock", heading="CLOCK", about="clock of the compute units", right=True,
        cell=lambda row: (megahertz(row.seen.clock_hz), ""),
    ),
    Column(
        name="ecc", heading="ECC", about="memory errors that could not be corrected", right=True,
        cell=lambda row: (_with(row.seen.ecc_errors_uncorrected, ""), "bad" if row.seen.ecc_errors_uncorrected else ""),
    ),
    Column(
        name="state", heading="STATE", about="free, held, how much is free, busy without a lease, unhealthy ...",
        cell=lambda row: samples.state(row.device, row.sample, row.holders), steps=((2, _ALL),),
    ),
    Column(
        name="free", heading="FREE", about="how much of it is free", right=True, cell=lambda row: (_free(row), ""),
    ),
    Column(
        name="user", heading="USER", about="who holds it; a star for who uses it without a lease",
        of_holder=_user, steps=((3, 6), (12, 10), (17, _ALL)),
    ),
    Column(
        name="share", heading="SHARE", about="how much of it is held",
        of_holder=lambda holder: (holder.share, ""), steps=((7, _ALL),), right=True,
    ),
    Column(
        name="program", heading="PROGRAM", about="name of the holder's program",
        of_holder=lambda holder: (holder.program, ""), steps=((8, 6), (11, 7), (15, 10), (16, 15), (31, _ALL)),
    ),
    Column(
        name="command", heading="COMMAND", about="its command line where it is yours, which may hold secrets",
        of_holder=lambda holder: (holder.command, ""),
    ),
    Column(
        name="since", heading="FOR", about="how long it has been held",
        of_holder=lambda holder: (since(holder.since) if holder.lease else "", ""), steps=((20, _ALL),), right=True,
    ),
    Column(
        name="lease", heading="LEASE", about="identity of the lease, for 'anyaccel release'",
        of_holder=lambda holder: (holder.lease, "dim"), steps=((21, _ALL),),
    ),
    Column(
        name="process", heading="PROCESS", about="process that holds it", right=True,
        of_holder=lambda holder: (str(holder.pid or "-"), ""), steps=((28, _ALL),),
    ),
    Column(
        name="note", heading="NOTE", about="what it is held for",
        of_holder=lambda holder: (holder.note, ""), steps=((25, 12), (27, 24), (32, _ALL)),
    ),
    Column(
        name="pci", heading="PCI", about="PCI address", cell=lambda row: (row.device.pci_bus_id or "-", ""),
    ),
    Column(
        name="numa", heading="NUMA", about="nearest NUMA node of the host", right=True,
        cell=lambda row: (str("-" if row.device.numa_node is None else row.device.numa_node), ""),
    ),
    Column(
        name="labels", heading="LABELS", about="what the administrator calls it",
        cell=lambda row: (", ".join(write_labels(row.device.labels)) or "-", ""),
    ),
    Column(
        name="id", heading="ID", about="stable identity",
        cell=lambda row: (row.device.id, "dim"), steps=((30, _ALL),),
    ),
)  # fmt: skip
"""In the order in which they are shown."""


def _free(row: DeviceRow) -> str:
    units = samples.free(row.device, row.sample)
    return "-" if units is None else format_units(units)


def chosen(names: str) -> tuple[Column, ...]:
    """Find the columns that people ask for.

    Args:
        names: Names with commas between them.

    Raises:
        UsageError: When one is none.
    """
    by_name = {column.name: column for column in COLUMNS}
    found = []
    for name in dict.fromkeys(each.strip().lower() for each in names.split(",")):
        if name not in by_name:
            import difflib

            close = difflib.get_close_matches(name, by_name, n=3)
            told = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {', '.join(by_name)}"
            raise UsageError(f"there is no column {name!r}; {told}", hint="see 'anyaccel status --help'")
        found.append(by_name[name])
    return tuple(found)


def laid_out(
    sample: Sample,
    room: int | None,
    columns: Sequence[Column] = (),
    *,
    draw: Callable[[DeviceRow, int], str] = lambda row, width: bar(row.seen.utilization or 0.0, width),
    drawn: tuple[tuple[int, int], ...] = (),
) -> tuple[list[output.Span], list[Lines], list[str]]:
    """Lay the devices of a machine out, a line each, and one more for each further holder.

    Args:
        sample: The machine.
        room: Columns of the terminal; None for no limit, and no bars.
        columns: The columns that are asked for; as many as there is room for when empty.
        draw: Draws the load of a device, in so many columns.
        drawn: Steps of the column of that load, where they are others.

    Returns:
        The heading, the lines of each device, and names of columns that were asked for and have no room.
    """
    rows = _rows(sample)
    anybody = any(row.holders for row in rows)
    shown = list(columns) or [column for column in COLUMNS if column.steps and (anybody or column.cell)]
    content = _content(shown, rows)
    natural = {
        column.name: max(cells(column.heading), *(cells(line[at][0]) for lines in content for line in lines), 1)
        for at, column in enumerate(shown)
    }
    steps = {column.name: _steps(column, place, asked=bool(columns)) for place, column in enumerate(shown)}
    if "load" in natural and room is not None:
        steps["load"] = drawn or steps["load"]
        natural["load"] = max(width for _, width in steps["load"])
    gap, widths = _fit(steps, natural, _ALL if room is None else room)
    picture = widths.get("load", 0) - _PERCENT - 1
    for row, lines in zip(rows, content, strict=True):
        for at, column in enumerate(shown):
            if column.name == "load" and picture > 1 and row.seen.utilization is not None:
                text, style = lines[0][at]
                lines[0][at] = (f"{draw(row, picture):<{picture}} {text}", style)
    heading = _line(shown, [(column.heading, "bold") for column in shown], widths, gap)
    found = [[_line(shown, line, widths, gap) for line in lines] for lines in content]
    return heading, found, [column.name for column in shown if column.name not in widths]


def plain_table(sample: Sample, columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """The same for a table that lays itself out: headings, and the texts of a row for each holder of each device."""
    lines = (line for lines in _content(columns, _rows(sample)) for line in lines)
    return [column.heading for column in columns], [[text.strip() for text, _ in line] for line in lines]


def _rows(sample: Sample) -> list[DeviceRow]:
    return [
        DeviceRow(device=device, seen=sample.stats(device), sample=sample, holders=samples.holders(device, sample))
        for device in sample.inventory.devices
    ]


def _content(columns: Sequence[Column], rows: Sequence[DeviceRow]) -> list[Lines]:
    """Return what stands in columns: for each device a line, and one more for each further holder."""
    return [[_cells(columns, row, place) for place in range(max(1, len(row.holders)))] for row in rows]


def _cells(columns: Sequence[Column], row: DeviceRow, place: int) -> list[output.Span]:
    """Return a line of a device: its first one shows the device, each one the holder in this place."""
    found = []
    for column in columns:
        text, style = "", ""
        if column.cell is not None and place == 0:
            text, style = column.cell(row)
        elif column.of_holder is not None and row.holders:
            text, style = column.of_holder(row.holders[place])
        found.append((printable(text), style))
    return found


def _steps(column: Column, place: int, *, asked: bool) -> tuple[tuple[int, int], ...]:
    """The widths of a column with its turns; columns that are asked for come first in that order."""
    steps = column.steps or ((0, _ALL),)
    return ((place - 1000, steps[0][1]), *steps[1:]) if asked else steps


def _fit(
    steps: Mapping[str, tuple[tuple[int, int], ...]], natural: Mapping[str, int], room: int
) -> tuple[int, dict[str, int]]:
    """Give columns as much of the room as there is, in turn; with narrower gaps where many would have none."""
    turns = sorted((turn, name, min(width, natural[name])) for name, own in steps.items() for turn, width in own)
    gap = _GAP
    widths = _in_turn(turns, room, gap)
    if any(widths.get(name, 0) < width for turn, name, width in turns if turn < _WANTED):
        gap = 1
        widths = _in_turn(turns, room, gap)
    return gap, widths


def _in_turn(turns: Sequence[tuple[int, str, int]], room: int, gap: int) -> dict[str, int]:
    """Give columns room in turn; the first is there in any case."""
    widths: dict[str, int] = {}
    used = -gap
    for _, name, width in turns:
        more = width - widths.get(name, -gap)
        if not widths:
            more = min(more, room - used)
        if 0 < more <= room - used:
            widths[name] = widths.get(name, -gap) + more
            used += more
    return widths


def _line(
    columns: Sequence[Column], line: Sequence[output.Span], widths: Mapping[str, int], gap: int
) -> list[output.Span]:
    """Pad what stands in the columns of a line that have a width; what is too long is cut."""
    spans: list[output.Span] = []
    for column, (text, style) in zip(columns, line, strict=True):
        if column.name not in widths:
            continue
        short = output.shortened(text, widths[column.name])
        blank = " " * (widths[column.name] - cells(short))
        before = " " * gap if spans else ""
        spans += [(before + blank, ""), (short, style)] if column.right else [(before, ""), (short, style), (blank, "")]
    return spans
