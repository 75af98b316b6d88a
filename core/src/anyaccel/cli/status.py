"""Show the accelerators of this machine, their holders, and the errors of detection."""

from __future__ import annotations

import time

import anyaccel
from anyaccel.cli import output
from anyaccel.cli import sample as samples
from anyaccel.cli.options import machine_options, seconds, survey
from anyaccel.cli.output import take_fields
from anyaccel.model import UNITS_PER_DEVICE, Inventory, VendorReport, VendorState

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from anyaccel.ledger import LeaseRecord

    Lines = list[list[output.Span]]

INTERVAL = 2.0
"""Default of ``--watch``, in seconds."""


EXAMPLES = (
    ("anyaccel", "the accelerators of this machine"),
    ("anyaccel --json", "the same for programs"),
    ("anyaccel --machine sim:H100:8", "a machine that you do not have"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_looks(parser, nargs="?", const=INTERVAL, help="repeat after this time (default: 2s)")
    parser.add_argument(
        "--columns",
        metavar="NAME,...",
        default="",
        help="the columns to show: device, type, model, mem, load, temp, power, clock, ecc, state, free,"
        " user, share, program, command, held, until, lease, process, note, pci, numa, labels, id",
    )


def add_looks(parser: argparse.ArgumentParser, **watch: Any) -> None:
    """Declare the options for the interval and the extent of measurements.

    Args:
        parser: The parser.
        watch: Further arguments of the declaration of ``--watch``.
    """
    parser.add_argument("--no-stats", action="store_true", help="leave out memory in use, load and temperature")
    parser.add_argument("-w", "--watch", metavar="DURATION", type=seconds(0.1, 3600), **watch)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.columns:
        from anyaccel.cli.table import choose_columns

        args.columns = choose_columns(args.columns)
    if args.watch is not None:
        _watch(args)
    inventory = anyaccel.detect(**machine_options(args)) if args.json else survey(args, meanwhile=_import_rest)
    sample = _look(args, inventory)
    if args.json:
        output.print_json("status/1", status_json(sample))
        return 0
    for note in samples.machine_notes(inventory) + samples.notes(sample):
        output.say(note)
    if not inventory.devices:
        _print_nothing_found(inventory)
        return 0
    lines, further = _lines(args, sample)
    output.print_spans(lines)
    for note in further:
        output.say(note)
    return 0


def _import_rest() -> None:
    """Import what the table needs once the devices are known."""
    import anyaccel.cli.table
    import anyaccel.launcher.verdicts
    import anyaccel.ledger.handovers  # noqa: F401


def _look(args: argparse.Namespace, inventory: Inventory) -> samples.Sample:
    # The number of waiting requests is shown, not their order: no journal is read.
    return samples.take_sample(inventory, stats=not args.no_stats, past=False, timeout=args.probe_timeout)


def _watch(args: argparse.Namespace) -> None:
    """Show the machine repeatedly, until the process is interrupted."""
    screen = output.Screen()
    while True:
        began = time.monotonic()
        # Devices may come and go between two frames.
        sample = _look(args, anyaccel.detect(**machine_options(args)))
        if args.json:
            output.print_json("status/1", status_json(sample), on_one_line=True)
        else:
            screen.show(_frame(args, sample))
        # A look that takes longer than the interval is followed by the next at once.
        time.sleep(max(0.0, args.watch - (time.monotonic() - began)))


def _frame(args: argparse.Namespace, sample: samples.Sample) -> Lines:
    """Return the lines of a frame: the table, and remarks below."""
    inventory = sample.inventory
    told = samples.machine_notes(inventory) + samples.all_notes(sample)
    lines: Lines = [[("No accelerators were found.", "")]]
    if inventory.devices:
        lines, further = _lines(args, sample)
        told += further
    room = output.width()
    return [*lines, *([(line, "")] for note in told for line in output.folded(f"anyaccel: {note}", room))]


def _lines(args: argparse.Namespace, sample: samples.Sample) -> tuple[Lines, list[str]]:
    """Return the lines of the table and of the summary, and remarks."""
    # Not imported for JSON, nor while vendors are still to be started.
    from anyaccel.cli.table import lay_out

    devices = sample.states()
    heading, rows, left_out = lay_out(devices, output.width() if output.is_terminal() else None, args.columns)
    summary = samples.summary(sample)
    if sample.tickets:
        summary += f"; {len(sample.tickets)} waiting (anyaccel queue)"
    further = []
    if args.columns and left_out:
        further.append(f"the terminal is too narrow for {', '.join(left_out)}")
    if any(holder.state == "unleased" for device in devices for holder in device.holders):
        further.append("* uses a device without a lease; --avoid-busy leaves such devices alone")
    return [heading, *(line for lines in rows for line in lines), [(summary, "")]], further


def status_json(sample: samples.Sample) -> dict[str, Any]:
    """Return the machine as JSON, in base units, with null for unknown values."""
    inventory = sample.inventory
    return {
        "machine": inventory.machine,
        "vendors": [_vendor_json(report) for report in inventory.vendors],
        "devices": [_device_json(state) for state in sample.states()],
    }


def _vendor_json(report: VendorReport) -> dict[str, Any]:
    problem = report.problem
    return {
        **take_fields(report, "vendor", "state"),
        "reason": problem.reason if problem else None,
        **take_fields(report, "resource", "kind", "distribution", "version", "driver_version", "partial", "notes"),
        "problem": take_fields(problem, "kind", "hook", "next_step") if problem else None,
        "seconds": round(report.seconds, 6),
    }


def _device_json(state: samples.DeviceState) -> dict[str, Any]:
    device, seen, free = state.device, state.seen, state.free
    health, reason, remedy = state.health
    return {
        **take_fields(device, "vendor", "id", "index", "type", "tags", "resource", "kind"),
        "model": device.model,
        "memory_bytes": device.memory_bytes,
        **take_fields(seen, "memory_used_bytes", "utilization", "temperature_celsius", "power_watts", "clock_hz"),
        **take_fields(seen, "memory_clock_hz", "ecc_errors_corrected", "ecc_errors_uncorrected"),
        "processes": None
        if seen.processes is None
        else [take_fields(process, "pid", "memory_bytes") for process in seen.processes],
        "visible": device.visible,
        "health": health.value,
        "health_reason": reason or None,
        "health_remedy": remedy or None,
        **take_fields(device, "fractional", "slots", "own_slots"),
        "free": None if free is None else free / UNITS_PER_DEVICE,
        "holders": None if state.records is None else [_holder_json(record) for record in state.records],
        **take_fields(device, "declared", "parent", "pci_bus_id", "numa_node", "links", "nodes", "occupies"),
        **take_fields(device, "labels", "attributes"),
    }


def _holder_json(record: LeaseRecord) -> dict[str, Any]:
    return {
        "lease": record.id or None,
        "share": record.units / UNITS_PER_DEVICE,
        **take_fields(record, "slots", "through", "state", "reason", "hint", "carriers"),
        "pid": record.pid or None,
        "user": record.user,
        "since": output.moment(record.since),
        "until": output.moment(record.until),
        **take_fields(record, "request", "note", "command", "confined"),
    }


def _print_nothing_found(inventory: Inventory) -> None:
    output.print_line("No accelerators were found.")
    if not inventory.vendors:
        output.print_line("No plug-in is installed: install one, for example with 'pip install anyaccel[all]'.")
    vendors: dict[str, list[str]] = {}
    for report in inventory.vendors:
        # Nineteen vendors without hardware would be nineteen lines.
        vendors.setdefault(_why_nothing(report), []).append(report.vendor)
    for why, names in vendors.items():
        output.print_folded(f"{', '.join(names)}: {why}")


def _why_nothing(report: VendorReport) -> str:
    if report.state is VendorState.NOT_ASKED:
        return "not probed: no such hardware is visible ('anyaccel doctor' probes all vendors)"
    if report.state is VendorState.ABSENT:
        return f"probed in {report.seconds * 1000:.0f} ms: no hardware of this vendor"
    if report.state is VendorState.OK:
        return "the driver reports no device"
    return "detection failed: see above"
