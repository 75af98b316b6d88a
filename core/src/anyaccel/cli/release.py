"""Give back what a lease holds, by ending the processes that carry it: one's own leases, or anybody's as root."""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.cli.durations import duration
from anyaccel.ledger import Ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("lease", nargs="+", metavar="LEASE", help="identity of a lease, as 'anyaccel' shows it")
    parser.add_argument(
        "--grace", metavar="DURATION", type=duration, default=10.0, help="time to end after SIGTERM (default: 10s)"
    )
    parser.add_argument("--force", action="store_true", help="kill what has not ended by then")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    ledger = Ledger.open()
    ended = {lease: ledger.release_of(lease, grace=args.grace, force=args.force) for lease in args.lease}
    if args.json:
        output.print_json("release/1", {"released": {lease: list(pids) for lease, pids in ended.items()}})
    else:
        for lease, pids in ended.items():
            output.say(f"{lease} is released; asked to end: {', '.join(map(str, pids)) or 'nobody'}")
    return 0
