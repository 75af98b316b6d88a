"""Show the requests that wait for devices of this machine, in order; with --machine, only requests for that machine."""

from __future__ import annotations

import argparse
import os

from anyaccel.cli import output
from anyaccel.cli.options import name_devices, survey
from anyaccel.cli.output import take_fields
from anyaccel.cli.table import Column, print_table
from anyaccel.ledger import BLOCKED, Ledger, vendor_and_id, without_scope
from anyaccel.text import clock, elapsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from anyaccel.ledger import LeaseRecord, TicketRecord

EXAMPLES = (
    ("anyaccel queue", "waiting requests, in the order of service"),
    ("anyaccel queue --machine sim:H100:8", "requests for devices of a simulated machine"),
    ("anyaccel queue --json", "the same for programs"),
)

_COLUMNS = (
    Column(heading="PLACE", turn=0),
    Column(heading="REQUEST", turn=1, least=10),
    Column(heading="USER", turn=2, least=6),
    Column(heading="WAITED", turn=4),
    Column(heading="STARTS BY", turn=5),
    Column(heading="REASON", turn=3, least=16, fold=True),
    Column(heading="NOTE", turn=6, least=8),
    Column(heading="TICKET", turn=10),
    Column(heading="PROCESS", turn=11, right=True),
    Column(heading="USED", turn=7, right=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    ledger = Ledger.open()
    inventory = devices = None
    if args.machine:
        from anyaccel.launcher.scope import Scope

        inventory = survey(args)
        devices = frozenset(Scope.make(inventory, os.environ).ids)
    waiting = ledger.tickets(devices=devices)
    # A device whose holder has ended is what most waits are about.
    found = [record for record in ledger.leases() if devices is None or record.device in devices]
    kept = [record for record in found if record.state == "kept"]
    if args.json:
        content = {
            "tickets": [{"place": place, **_ticket_json(ticket)} for place, ticket in enumerate(waiting, start=1)],
            "kept": [_device_json(record, "user", "carriers", "hint") | {"lease": record.id} for record in kept],
            "withheld": [
                _device_json(record, "state", "user") | {"until": output.moment(record.until)}
                for record in found
                if record.state in BLOCKED
            ],
        }
        output.print_json("queue/1", content)
        return 0
    if waiting:
        print_table(_COLUMNS, [(str(place), *_row(ticket)) for place, ticket in enumerate(waiting, start=1)])
    else:
        output.print_line("No request waits.")
    blocks = [block for block in ledger.blocks() if devices is None or not devices.isdisjoint(block.devices)]
    if kept or blocks:
        named = inventory or survey(args)  # for the names of the devices alone
        for lease in kept:
            output.say(f"{name_devices([lease.device], named)} is {lease.reason}; {lease.hint}")
        for block in blocks:
            output.say(f"{name_devices(block.devices, named)}: {block.describe()}")
    return 0


def _ticket_json(ticket: TicketRecord) -> dict[str, Any]:
    """Return a waiting request as JSON."""
    return {
        "ticket": ticket.id,
        **take_fields(ticket, "priority", "behind", "seconds"),
        "starts": output.moment(ticket.starts),
        "reason": ticket.reason,
        **take_fields(ticket, "user", "pid"),
        "waited_seconds": round(ticket.waited, 3),
        "used_device_seconds": None if ticket.used is None else round(ticket.used, 3),
        **take_fields(ticket, "responsive", "request", "note", "command"),
    }


def _device_json(record: LeaseRecord, *names: str) -> dict[str, Any]:
    """Return a device that is kept or withheld as JSON, with the reason and further fields of its record."""
    vendor, _ = vendor_and_id(record.device)
    _, device = vendor_and_id(without_scope(record.device))
    return {"vendor": vendor or None, "device": device, **take_fields(record, "reason", *names)}


def _row(ticket: TicketRecord) -> tuple[str, ...]:
    """Return the cells of a waiting request, without its place."""
    return (
        ticket.request or "-",
        ticket.user,
        elapsed(ticket.waited),
        "unknown" if ticket.starts is None else clock(ticket.starts),
        ticket.reason,
        ticket.note or "-",
        ticket.id,
        str(ticket.pid),
        "-" if ticket.used is None else f"{ticket.used / 3600:.1f}h",
    )
