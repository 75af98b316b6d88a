"""Release leases of yours, or any lease as root, and end the processes that were started with them."""

from __future__ import annotations

import argparse
import os

from anyaccel.cli import output
from anyaccel.cli.options import add_grace
from anyaccel.errors import LeaseNotFoundError, UsageError
from anyaccel.ledger import Ledger
from anyaccel.text import listed

EXAMPLES = (
    ("anyaccel release", "the only lease that you have"),
    ("anyaccel release 3f2a9c4b1d07", "a lease, as 'anyaccel' shows it"),
    ("anyaccel release --forget 3f2a9c4b1d07", "its devices even if processes still run"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "lease", nargs="*", metavar="LEASE", help="a lease, as 'anyaccel' shows it; needed unless you have just one"
    )
    add_grace(parser)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--force", action="store_true", help="kill the processes that have not ended by then")
    way.add_argument(
        "--forget",
        action="store_true",
        help="end no process: release the devices of a lease of yours even if processes still run",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    ledger = Ledger.open()
    ended: dict[str, list[int]] = {}
    running: dict[str, list[int]] = {}
    what, pids = ("still running with its devices", running) if args.forget else ("signalled", ended)
    for lease in dict.fromkeys(args.lease) or (_find_only(ledger),):
        ended[lease] = running[lease] = []
        if args.forget:
            pids[lease] = list(ledger.drop_lease(lease))
        else:
            pids[lease] = list(ledger.end_lease(lease, grace=args.grace, force=args.force))
        if not args.json:  # before the next lease, whose release may fail
            output.say(f"{lease} is released; {what}: {', '.join(map(str, pids[lease])) or 'no process'}")
    if args.json:
        output.print_json("release/1", {"released": ended, "running": running})
    return 0


def _find_only(ledger: Ledger) -> str:
    """Return the only lease of this user.

    Raises:
        LeaseNotFoundError: When the user has none.
        UsageError: When the user has several.
    """
    own = list(dict.fromkeys(each.id for each in ledger.leases() if each.uid == os.geteuid() and each.id))
    if not own:
        raise LeaseNotFoundError("you have no lease", hint="'anyaccel' shows the leases of all users")
    if len(own) > 1:
        raise UsageError(f"you have {len(own)} leases: {listed(own)}", hint="name those to release")
    return own[0]
