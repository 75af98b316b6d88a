"""Show the accelerators of this machine, and how each vendor's plug-in fared in finding them."""

from __future__ import annotations

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import machine_options, survey
from anyaccel.model import (
    UNITS_PER_DEVICE,
    Device,
    Health,
    Inventory,
    Stats,
    VendorReport,
    VendorState,
    format_slots,
    format_units,
)
from anyaccel.probe import HOST

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from anyaccel.ledger import LeaseRecord

    Leases = dict[str, list[LeaseRecord]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--no-stats", action="store_true", help="leave out memory in use, load and temperature")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    inventory = anyaccel.detect(**machine_options(args)) if args.json else survey(args)
    observed, problems = ({}, ()) if args.no_stats else anyaccel.stats(inventory, timeout=args.probe_timeout)
    leases, unknown = _leases(inventory)
    if args.json:
        output.print_json("status/1", status_json(inventory, observed, leases))
        return 0
    if inventory.machine != HOST:
        output.say(f"this is not your host but {inventory.machine}")
    if inventory.devices:
        _print_devices(inventory, observed, leases)
    else:
        _print_nothing_found(inventory)
    for problem in problems:
        output.say(str(problem))
    if unknown:
        output.say(f"who holds what is not known: {unknown}")
    return 0


def _leases(inventory: Inventory) -> tuple[Leases | None, str]:
    """The leases by device id, or None and why they are not known. Nobody can hold what is not there."""
    from anyaccel.errors import LedgerError

    if not inventory.devices:
        return {}, ""
    from anyaccel.launcher.hold import leases

    found: Leases = {}
    try:
        for record in leases(inventory):
            found.setdefault(record.device, []).append(record)
    except LedgerError as error:
        return None, str(error)
    return found, ""


def status_json(inventory: Inventory, observed: dict[str, Stats], leases: Leases | None) -> dict[str, Any]:
    """The inventory as JSON: base units, null for unknown."""
    return {
        "machine": inventory.machine,
        "vendors": [_vendor_json(report) for report in inventory.vendors],
        "devices": [_device_json(device, observed.get(device.id, Stats()), leases) for device in inventory.devices],
    }


def _vendor_json(report: VendorReport) -> dict[str, Any]:
    problem = report.problem
    return {
        "vendor": report.vendor,
        "state": report.state.value,
        "reason": problem.reason if problem else None,
        "resource": report.resource or None,
        "kind": report.kind or None,
        "distribution": report.distribution or None,
        "version": report.version or None,
        "driver_version": report.driver_version or None,
        "partial": report.partial,
        "notes": list(report.notes),
        "problem": None
        if problem is None
        else {
            "kind": problem.kind.value,
            "hook": problem.hook or None,
            "next_step": problem.next_step or None,
        },
        "seconds": round(report.seconds, 6),
    }


def _device_json(device: Device, seen: Stats, leases: Leases | None) -> dict[str, Any]:
    health, reason, remedy = _health(device, seen)
    free = _free(device, leases)
    return {
        "vendor": device.vendor,
        "id": device.id,
        "index": device.index,
        "type": device.type,
        "tags": list(device.tags),
        "resource": device.resource,
        "kind": device.kind or None,
        "model": device.model,
        "memory_bytes": device.memory_bytes,
        "memory_used_bytes": seen.memory_used_bytes,
        "utilization": seen.utilization,
        "temperature_celsius": seen.temperature_celsius,
        "power_watts": seen.power_watts,
        "clock_hz": seen.clock_hz,
        "memory_clock_hz": seen.memory_clock_hz,
        "ecc_errors_corrected": seen.ecc_errors_corrected,
        "ecc_errors_uncorrected": seen.ecc_errors_uncorrected,
        "processes": None
        if seen.processes is None
        else [{"pid": process.pid, "memory_bytes": process.memory_bytes} for process in seen.processes],
        "visible": device.visible,
        "health": health.value,
        "health_reason": reason or None,
        "health_remedy": remedy or None,
        "fractional": device.fractional.value,
        "slots": device.slots,
        "own_slots": list(device.own_slots),
        "free": None if free is None else free / UNITS_PER_DEVICE,
        "holders": None if leases is None else [_holder_json(record) for record in leases.get(device.id, [])],
        "declared": device.declared,
        "parent": device.parent,
        "pci_bus_id": device.pci_bus_id,
        "numa_node": device.numa_node,
        "links": dict(device.links),
        "nodes": list(device.nodes),
        "occupies": list(device.occupies),
        "attributes": dict(device.attributes),
    }


def _health(device: Device, seen: Stats) -> tuple[Health, str, str]:
    """Health, reason and remedy: what was seen last counts, unless it says nothing."""
    if seen.health is Health.UNKNOWN or device.health is Health.UNHEALTHY:
        return device.health, device.health_reason, device.health_remedy
    return seen.health, seen.health_reason, seen.health_remedy


def _holder_json(record: LeaseRecord) -> dict[str, Any]:
    return {
        "lease": record.id or None,
        "share": record.units / UNITS_PER_DEVICE,
        "slots": list(record.slots),
        "through": record.through or None,
        "state": record.state,
        "reason": record.reason or None,
        "hint": record.hint or None,
        "carriers": list(record.carriers),
        "pid": record.pid or None,
        "user": record.user,
        "since": None if record.since is None else output.moment(record.since),
        "request": record.request or None,
        "note": record.note or None,
        "command": record.command or None,
        "confined": record.confined,
    }


def _free(device: Device, leases: Leases | None) -> int | None:
    """Units of a device that are free now, or None when nobody knows."""
    if not device.usable:
        return 0
    if leases is None:
        return None
    return max(0, device.units - sum(record.units for record in leases.get(device.id, [])))


def _held_by(device: Device, seen: Stats, leases: Leases | None) -> str:
    """Who has a device, in words; a star for those who hold no lease."""
    from anyaccel.launcher.hold import holder

    records = (leases or {}).get(device.id, [])
    if records:
        return "; ".join(
            f"{record.id} {holder(record)}"
            + (f" (with {record.through})" if record.through else "")
            + (f" (slots {format_slots(record.slots)})" if record.slots else "")
            + " (confined)" * record.confined
            + " (set aside: anyaccel doctor says why)" * (record.state == "aside")
            for record in records
        )
    if seen.processes:
        return "* " + ", ".join(f"process {process.pid}" for process in seen.processes[:3])
    return "-"


def _print_devices(inventory: Inventory, observed: dict[str, Stats], leases: Leases | None) -> None:
    rows = []
    total = 0
    for device in inventory.devices:
        seen = observed.get(device.id, Stats())
        health, reason, remedy = _health(device, seen)
        state = health.value if health is Health.UNHEALTHY else "ok" if device.visible else "hidden"
        if health is Health.UNHEALTHY:
            told = f"{reason or 'the vendor gives no reason'}{'; ' if remedy else ''}{remedy}"
            output.say(f"{device.name} is unhealthy: {told}")
        free = _free(device, leases)
        total += free or 0
        used = f"{seen.memory_used_bytes / output.GIB:.1f} / " if seen.memory_used_bytes is not None else ""
        rows.append(
            (
                device.name,
                device.type,
                used + output.memory(device.memory_bytes),
                "-" if seen.utilization is None else f"{seen.utilization:.0%}",
                "-" if seen.temperature_celsius is None else f"{seen.temperature_celsius:.0f}C",
                "declared" if device.declared else state,
                "-" if free is None else format_units(free),
                device.id,
                _held_by(device, seen, leases),
            )
        )
    output.print_table(("DEVICE", "TYPE", "MEMORY", "UTIL", "TEMP", "STATE", "FREE", "ID", "HELD BY"), rows)
    output.print_line(f"{len(inventory.devices)} devices, {format_units(total)} free")
    if any(row[-1].startswith("*") for row in rows):
        output.say("* is used by processes that hold no lease; --avoid-busy leaves such devices alone")


def _print_nothing_found(inventory: Inventory) -> None:
    output.print_line("No accelerators were found.")
    if not inventory.vendors:
        output.print_line(
            "No plug-in is installed, so nothing was probed: install one, for example with 'pip install anyaccel[all]'."
        )
    for report in inventory.vendors:
        output.print_line(f"  {report.vendor}: {_why_nothing(report)}")


def _why_nothing(report: VendorReport) -> str:
    if report.state is VendorState.NOT_ASKED:
        return "not asked, since nothing here looks like its hardware ('anyaccel doctor' asks everybody)"
    if report.state is VendorState.ABSENT:
        return f"probed in {report.seconds * 1000:.0f} ms, no hardware of this vendor is on the machine"
    if report.state is VendorState.OK:
        return "the driver is here and reports no device"
    return "detection failed, see above"
