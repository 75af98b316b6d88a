"""Show who waits for devices of this machine, first to be served first."""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.cli.output import take_fields
from anyaccel.cli.sample import reason
from anyaccel.ledger import Ledger
from anyaccel.ledger.names import vendor_and_id, without_scope
from anyaccel.text import elapsed

EXAMPLES = (
    ("anyaccel queue", "who waits, first to be served first"),
    ("anyaccel queue --json", "the same for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    ledger = Ledger.open()
    waiting = ledger.tickets()
    kept = [lease for lease in ledger.leases() if lease.state == "kept"]
    if args.json:
        tickets = [
            {
                "ticket": ticket.id,
                "place": place,
                **take_fields(ticket, "priority", "behind", "seconds"),
                "starts": None if ticket.starts is None else output.moment(ticket.starts),
                "reason": reason(ticket),
                **take_fields(ticket, "user", "pid"),
                "waited_seconds": round(ticket.waited, 3),
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
        output.print_json("queue/1", {"tickets": tickets, "kept": ended})
    elif waiting:
        noted = any(ticket.note for ticket in waiting)  # without notes a table of 80 columns has one line for each
        rows = [
            (
                str(place),
                ticket.request or "-",
                ticket.user,
                str(ticket.pid),
                elapsed(ticket.waited),
                output.clock(ticket.starts),
                reason(ticket),
                *((ticket.note or "-",) if noted else ()),
            )
            for place, ticket in enumerate(waiting, start=1)
        ]
        columns = ("PLACE", "REQUEST", "USER", "PROCESS", "WAITED", "STARTS BY", "REASON")
        output.print_table((*columns, "NOTE") if noted else columns, rows)
    else:
        output.print_line("Nobody waits.")
    if not args.json:
        for lease in kept:
            device = vendor_and_id(without_scope(lease.device))[1]
            output.say(f"{device} is {lease.reason}; {lease.hint}")
    return 0
