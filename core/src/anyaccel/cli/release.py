"""Give back what a lease holds, by ending what was started with it: leases of one's own, or any lease as root."""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.cli.quantities import add_grace
from anyaccel.ledger import Ledger

EXAMPLES = (
    ("anyaccel release 3f2a9c4b1d07", "end what holds a lease, as 'anyaccel' shows it"),
    ("anyaccel release --forget 3f2a9c4b1d07", "give its devices back whatever still runs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("lease", nargs="+", metavar="LEASE", help="identity of a lease, as 'anyaccel' shows it")
    add_grace(parser)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--force", action="store_true", help="kill what has not ended by then")
    way.add_argument(
        "--forget",
        action="store_true",
        help="end no process: give the devices of a lease of your own back whatever still runs with them",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    ledger = Ledger.open()
    if args.forget:
        found = {lease: ledger.drop_lease(lease) for lease in args.lease}
    else:
        found = {lease: ledger.end_lease(lease, grace=args.grace, force=args.force) for lease in args.lease}
    if args.json:
        running = {lease: list(pids) if args.forget else [] for lease, pids in found.items()}
        ended = {lease: [] if args.forget else list(pids) for lease, pids in found.items()}
        output.print_json("release/1", {"released": ended, "running": running})
        return 0
    for lease, pids in found.items():
        listed = ", ".join(map(str, pids)) or "no process"
        if args.forget:
            output.say(f"{lease} is given back; still running with its devices: {listed}")
        else:
            output.say(f"{lease} is released; asked to end: {listed}")
    return 0
