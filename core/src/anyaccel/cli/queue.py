"""Show the requests that wait for devices of this machine, in order; with --machine, only requests for that machine."""

from __future__ import annotations

import argparse
import os

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import machine_options, name_devices, survey
from anyaccel.cli.output import take_fields
from anyaccel.cli.table import Column, print_table
from anyaccel.ledger import Ledger
from anyaccel.ledger.names import vendor_and_id, without_scope
from anyaccel.ledger.record import BLOCKED
from anyaccel.text import clock, elapsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.model import Inventory

EXAMPLES = (
    ("anyaccel queue", "who waits, first to be served first"),
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

        inventory = _detect(args)
        devices = frozenset(Scope.make(inventory, os.environ).ids)
    waiting = ledger.tickets(devices=devices)
    # A device whose holder has ended is what most waits are about.
    found = [record for record in ledger.leases() if devices is None or record.device in devices]
    kept = [lease for lease in found if lease.state == "kept"]
    blocked = [record for record in found if record.state in BLOCKED]
    if args.json:
        tickets = [
            {
                "ticket": ticket.id,
                "place": place,
                **take_fields(ticket, "priority", "behind", "seconds"),
                "starts": None if ticket.starts is None else output.moment(ticket.starts),
                "reason": ticket.reason,
                **take_fields(ticket, "user", "pid"),
                "waited_seconds": round(ticket.waited, 3),
                "used_device_seconds": None if ticket.used is None else round(ticket.used, 3),
                **take_fields(ticket, "responsive", "request", "note", "command"),
            }
            for place, ticket in enumerate(waiting, start=1)
        ]
        ended = [
            {
                "lease": lease.id,
                "vendor": vendor_and_id(lease.device)[0] or None,
                "device": vendor_and_id(without_scope(lease.device))[1],
                **take_fields(lease, "user", "carriers", "reason", "hint"),
            }
            for lease in kept
        ]
        withheld = [
            {
                "vendor": vendor_and_id(record.device)[0] or None,
                "device": vendor_and_id(without_scope(record.device))[1],
                **take_fields(record, "state", "user", "reason"),
                "until": None if record.until is None else output.moment(record.until),
            }
            for record in blocked
        ]
        output.print_json("queue/1", {"tickets": tickets, "kept": ended, "withheld": withheld})
    elif waiting:
        rows = [
            (
                str(place),
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
            for place, ticket in enumerate(waiting, start=1)
        ]
        print_table(_COLUMNS, rows)
    else:
        output.print_line("No request waits.")
    if not args.json:
        blocks = [block for block in ledger.blocks() if devices is None or not devices.isdisjoint(block.devices)]
        if kept or blocks:
            named = inventory or _detect(args)  # for the names of the devices alone
            for lease in kept:
                output.say(f"{name_devices([lease.device], named)} is {lease.reason}; {lease.hint}")
            for block in blocks:
                output.say(f"{name_devices(block.devices, named)}: {block.describe()}")
    return 0


def _detect(args: argparse.Namespace) -> Inventory:
    return anyaccel.detect(**machine_options(args)) if args.json else survey(args)
