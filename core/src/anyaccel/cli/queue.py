"""Show who waits for devices of this machine, first to be served first."""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.ledger import Ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from anyaccel.launcher.hold import written

    waiting = Ledger.open().tickets()
    if args.json:
        tickets = [
            {
                "ticket": ticket.id,
                "place": place,
                "priority": ticket.priority,
                "user": ticket.user,
                "pid": ticket.pid,
                "waited_seconds": round(ticket.waited, 3),
                "responsive": ticket.responsive,
                "request": ticket.request or None,
                "note": ticket.note or None,
                "command": ticket.command or None,
            }
            for place, ticket in enumerate(waiting, start=1)
        ]
        output.print_json("queue/1", {"tickets": tickets})
    elif waiting:
        rows = [
            (
                str(place),
                ticket.request or "-",
                ticket.user,
                str(ticket.pid),
                written(ticket.waited),
                ticket.note or "-",
            )
            for place, ticket in enumerate(waiting, start=1)
        ]
        output.print_table(("PLACE", "REQUEST", "USER", "PROCESS", "WAITED", "NOTE"), rows)
    else:
        print("Nobody waits.")
    return 0
