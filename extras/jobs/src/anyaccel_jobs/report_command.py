"""Show the usage of devices, from the journal: anyaccel report --since 7d --by user.

A lease that is still held counts until now. HOURS are device hours: hours times devices, or times the part of a device.
SHARE is the part of all device hours of the machine in the period. WAITED is the mean wait of a request, LONGEST the
longest.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import anyaccel
from anyaccel.cli import Column, machine_options, output, print_table, whole
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.ledger import BLOCKED, LeaseRecord, Ledger, is_named, journal
from anyaccel.model import UNITS_PER_DEVICE, Value, replace
from anyaccel.text import clock, elapsed, memory

from anyaccel_jobs.moments import moment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BY = ("user", "device", "type", "job")
_APART = ("user", "job")
"""Groups that tell users of one device apart: each has its own figures of a shared device, or none."""
_NOT_TOLD = (
    "the load of shares is left out, since vendors report that of whole devices; '--by device' counts every holder"
)
_HOUR = 3600.0
_WEEK = 7 * 24 * _HOUR
_COLUMNS = (
    Column(heading="LEASES", turn=2),
    Column(heading="HOURS", turn=1),
    Column(heading="SHARE", turn=2),
    Column(heading="WAITED", turn=5),
    Column(heading="LONGEST", turn=6),
    Column(heading="BUSY", turn=3),
    Column(heading="IDLE HOURS", turn=4),
    Column(heading="PEAK MEM", turn=7),
    Column(heading="TIMEOUTS", turn=8),
)
_NUMBERS = (
    *(
        "leases",
        "device_seconds",
        "share",
        "waited_mean_seconds",
        "waited_longest_seconds",
        "utilization",
        "idle_leases",
    ),
    *("idle_device_seconds", "memory_peak_bytes", "timeouts"),
)
"""Attributes of :class:`ReportRow` that programs get."""


class ReportRow(Value):
    """The sums of a group.

    Attributes:
        name: The group.
        leases: Number of leases.
        device_seconds: Seconds held, times the devices.
        share: Share of the device seconds that the machine had in the period; None for a machine without devices.
        waited_mean_seconds: Mean wait of a request.
        waited_longest_seconds: Longest wait of a request; a mean for leases that the journal adds up.
        utilization: Share of the held time for which the devices were busy; None when not measured.
        idle_leases: Leases with a device that was idle for most of the time; None when not measured.
        idle_device_seconds: Device seconds of devices that were held idle; None when not measured.
        memory_peak_bytes: Highest memory use of one device; None when not measured.
        timeouts: Leases that their time limit ended.
        shares: Whether shares of devices are left out of the utilization and the memory.
    """

    name: str
    leases: int
    device_seconds: float
    waited_mean_seconds: float
    waited_longest_seconds: float
    utilization: float | None
    idle_leases: int | None
    idle_device_seconds: float | None
    memory_peak_bytes: int | None
    timeouts: int
    shares: bool
    share: float | None = None


EXAMPLES = (
    ("anyaccel report --since 7d", "hours of each user in the last week"),
    ("anyaccel report --since 2026-11-01 --until 2026-12-01 --top 10", "the ten users with the most hours in a month"),
    ("anyaccel report --by type --plot use.svg", "by type, with a picture"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--since", metavar="TIME", type=moment(ahead=False), help="from a date, or a duration ago (default: 7d)"
    )
    parser.add_argument("--until", metavar="TIME", type=moment(ahead=False), help="to a date, or now (default: now)")
    parser.add_argument(
        "--top", metavar="N", type=whole(1, 1_000_000), help="only the N rows with the most device hours"
    )
    parser.add_argument("--by", choices=BY, default="user", help="add up by user, device, type or job (default: user)")
    parser.add_argument("--csv", action="store_true", help="print comma-separated values")
    parser.add_argument("--plot", metavar="FILE", help="write an SVG picture of holders over time to FILE")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    now = time.time()
    until = now if args.until is None else min(args.until, now)  # the machine had no device hours in the future
    since = until - _WEEK if args.since is None else args.since
    if since >= until:
        raise UsageError("--since must be before --until", hint="a date alone is its first moment, at 00:00")
    inventory = anyaccel.detect(**machine_options(args))
    ended = list(journal.read(since=since))
    lasting = _list_lasting(inventory, now, {entry.lease for entry in ended})
    entries = [part for entry in (*ended, *lasting) if (part := clipped(entry, since, until))]
    if args.plot:
        _write(args.plot, entries, since, until)
    rows = summarize(entries, args.by)
    available = (until - since) * sum(not device.parent for device in inventory.devices)  # without parts of devices
    if available:
        rows = [replace(row, share=row.device_seconds / available) for row in rows]
    total = _row("total", [(entry, entry.devices) for entry in entries], apart=args.by in _APART)
    total = replace(total, share=total.device_seconds / available if available else None)
    left_out = len(rows) - len(rows := rows[: args.top])
    if args.json:
        period = {"since": output.moment(since), "until": output.moment(until)}
        output.print_json("report/1", {**period, "by": args.by, "rows": [_json(row, args.by) for row in rows]})
    elif args.csv:
        _print_csv(rows, args.by)
    elif rows:
        of = f" of {available / _HOUR:.2f}" if available else ""
        hours = f"{total.device_seconds / _HOUR:.2f}{of}"
        first, last = (time.strftime("%Y-%m-%d %H:%M", time.localtime(each)) for each in (since, until))
        output.print_folded(f"From {first} to {last}: {hours} device hours were used.")
        print_table(
            (Column(heading=args.by.upper(), turn=0, least=8), *_COLUMNS),
            [
                (
                    row.name,
                    str(row.leases),
                    f"{row.device_seconds / _HOUR:.2f}",
                    output.percent(row.share),
                    elapsed(row.waited_mean_seconds),
                    elapsed(row.waited_longest_seconds),
                    output.percent(row.utilization),
                    "-" if row.idle_device_seconds is None else f"{row.idle_device_seconds / _HOUR:.2f}",
                    memory(row.memory_peak_bytes),
                    str(row.timeouts),
                )
                for row in (*rows, total)
            ],
        )
        if left_out:
            output.say(f"{left_out} more row{'s' * (left_out > 1)}")
        if any(row.shares for row in rows):
            output.say(_NOT_TOLD)
    else:
        output.print_line(f"No lease was held between {clock(since)} and {clock(until)}.")
    return 0


def _list_lasting(inventory: anyaccel.Inventory, now: float, ended: Collection[str]) -> list[journal.JournalEntry]:
    """Return the leases that are still held as if they ended now: of the users whose ended leases the journal has.

    Left out are leases that get no line in the end, on behalf of other processes, and leases with a line, of which only
    processes that the holder has left behind keep the devices.

    Args:
        inventory: The machine.
        now: The time, in seconds since 1970.
        ended: Identities of the leases that have a line.
    """
    everybody = journal.is_machine_wide() and not is_named(Ledger.open().path)
    types = {device.id: (device.name, device.type) for device in inventory.devices}
    held: dict[str, list[LeaseRecord]] = {}
    for record in anyaccel.leases(inventory):
        counted = record.state not in (*BLOCKED, "on behalf", "outside") and not record.through
        if counted and record.id and record.id not in ended and (everybody or record.uid == os.getuid()):
            held.setdefault(record.id, []).append(record)
    entries = []
    for lease, (first, *more) in held.items():
        if first.since is None:
            continue
        used = []
        for record in (first, *more):
            name, kind = types[record.device]
            used.append(journal.Used(device=name, type=kind, units=record.units))
        entries.append(
            journal.JournalEntry(
                lease=lease,
                user=first.user,
                began=first.since,
                ended=now,
                held=max(0.0, now - first.since),
                waited=0.0,
                devices=tuple(used),
                request=first.request,
                note=first.note,
                program=first.command,
            )
        )
    return entries


def clipped(entry: journal.JournalEntry, since: float, until: float) -> journal.JournalEntry | None:
    """Return the part of a use within a period, or None. Measurements remain unscaled."""
    began, ended = max(entry.began, since), min(entry.ended, until)
    if ended < began:
        return None
    whole = entry.ended - entry.began
    # Of leases that are added up, the time held is less than the span: it is cut in proportion.
    share = (ended - began) / whole if whole > 0 else 1.0
    return replace(entry, began=began, ended=ended, held=min(entry.held, whole or entry.held) * share)


def summarize(entries: Iterable[journal.JournalEntry], by: str) -> list[ReportRow]:
    """Sum uses by group, those with the most device hours first."""
    groups: dict[str, list[tuple[journal.JournalEntry, Sequence[journal.Used]]]] = {}
    for entry in entries:
        for name, devices in _parts(entry, by):
            groups.setdefault(name, []).append((entry, devices))
    rows = [_row(name, uses, apart=by in _APART) for name, uses in groups.items()]
    return sorted(rows, key=lambda row: (-row.device_seconds, row.name))


def _parts(entry: journal.JournalEntry, by: str) -> list[tuple[str, Sequence[journal.Used]]]:
    """Return the groups of a use, each with its devices."""
    if by == "user":
        return [(entry.user, entry.devices)]
    if by == "job":
        return [(f"{entry.user}: {entry.note or entry.program or entry.request or '-'}", entry.devices)]
    name: Callable[[journal.Used], str] = (
        (lambda used: used.device) if by == "device" else (lambda used: used.type or "-")
    )
    names = dict.fromkeys(map(name, entry.devices))
    return [(each, [used for used in entry.devices if name(used) == each]) for each in names]


def _row(name: str, uses: Sequence[tuple[journal.JournalEntry, Sequence[journal.Used]]], *, apart: bool) -> ReportRow:
    """Sum the uses of a group.

    Args:
        name: The group.
        uses: Uses, each with the devices that count.
        apart: Whether users of one device are in different groups.
    """
    held = [(used, entry.held * used.units / UNITS_PER_DEVICE) for entry, devices in uses for used in devices]
    leases = sum(entry.leases for entry, _ in uses)
    told = [(used, seconds) for used, seconds in held if used.utilization is not None]
    # Vendors measure whole devices: which holder of a share keeps it busy is unknown. An idle device is idle for all.
    own = [(used, seconds) for used, seconds in held if used.units == UNITS_PER_DEVICE or not apart]
    busy = [(used.utilization, seconds) for used, seconds in own if used.utilization is not None]
    total = sum(seconds for _, seconds in busy)
    peaks = [used.memory_peak_bytes for used, _ in own if used.memory_peak_bytes is not None]
    return ReportRow(
        name=name,
        leases=leases,
        device_seconds=sum(seconds for _, seconds in held),
        waited_mean_seconds=sum(entry.waited for entry, _ in uses) / max(1, leases),
        waited_longest_seconds=max((entry.waited / entry.leases for entry, _ in uses), default=0.0),
        utilization=sum(share * seconds for share, seconds in busy) / total if total else None,
        idle_leases=sum(any(used.was_idle for used in devices) for _, devices in uses) if told else None,
        idle_device_seconds=sum(seconds for used, seconds in told if used.was_idle) if told else None,
        memory_peak_bytes=max(peaks, default=None),
        timeouts=sum(entry.timeouts for entry, _ in uses),
        shares=len(busy) < len(told),
    )


def _json(row: ReportRow, by: str) -> dict[str, Any]:
    numbers = output.take_fields(row, *_NUMBERS)
    digits = dict.fromkeys(_NUMBERS, 3) | {"utilization": 4, "share": 4}
    return {by: row.name} | {
        name: round(number, digits[name]) if isinstance(number, float) else number for name, number in numbers.items()
    }


def _print_csv(rows: Sequence[ReportRow], by: str) -> None:
    import csv
    import io

    file = io.StringIO()
    # Rows end in a newline, as of every other command.
    table = csv.writer(file, lineterminator="\n")
    table.writerow((by, *_NUMBERS))
    for row in rows:
        values = list(_json(row, by).values())
        # A spreadsheet takes what begins with one of these for a formula.
        values[0] = f"'{values[0]}" if str(values[0])[:1] in tuple("=+-@") else values[0]
        table.writerow("" if value is None else value for value in values)
    output.print_lines(file.getvalue().splitlines())


def _write(path: str, entries: Sequence[journal.JournalEntry], since: float, until: float) -> None:
    from anyaccel_jobs.timeline import picture

    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(picture(entries, since, until))
    except OSError as error:
        raise AnyaccelError(f"{path} cannot be written: {error.strerror}", hint="name another file") from error
    output.say(f"the picture is in {path}")
