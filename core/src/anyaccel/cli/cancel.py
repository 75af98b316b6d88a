"""End jobs, waits and leases of one's own: anyaccel cancel 3, a ticket of 'anyaccel queue', a lease, or --all.

A job's processes, and those of a lease, are asked to end and killed after the time of --grace. Whoever waits with a
ticket leaves the line: its call for devices fails, its process is not ended.
"""

from __future__ import annotations

import argparse
import os

from anyaccel.cli import output
from anyaccel.cli.extensions import extensions
from anyaccel.cli.quantities import add_grace
from anyaccel.errors import AnyaccelError, LeaseNotFoundError, UsageError
from anyaccel.ledger import Ledger
from anyaccel.linux.teardown import GRACE_SECONDS

EXAMPLES = (
    ("anyaccel cancel 3", "end a job"),
    ("anyaccel cancel --all", "all jobs, waits and leases of yours"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="ID",
        help="number of a job, ticket of one who waits ('anyaccel queue --json'), or lease ('anyaccel')",
    )
    parser.add_argument("--all", action="store_true", help="all jobs, waits and leases of this user")
    add_grace(parser, None, of="10s, or that of the job")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if bool(args.what) == args.all:
        raise UsageError("name what to cancel, or give --all" + " alone" * args.all)
    ledger = Ledger.open()
    named = list(dict.fromkeys(args.what))
    if not named:
        named, own = list_own(ledger)
        for lease in own:
            output.say(f"lease {lease} is left alone: this command runs with it")
    done, failed = _cancel_all(ledger, named, args)
    if args.json and failed is None:
        output.print_json("cancel/1", {"cancelled": done})
    elif not args.json:
        for message in done.values():
            output.say(message)
        if not named:
            output.say("there is nothing of yours to cancel")
    if failed is not None:
        raise failed
    return 0


def _cancel_all(
    ledger: Ledger, named: list[str], args: argparse.Namespace
) -> tuple[dict[str, str], AnyaccelError | None]:
    """Cancel things one after the other; what to say of each, and the first error."""
    done: dict[str, str] = {}
    failed: AnyaccelError | None = None
    for each in named:
        try:
            done[each] = cancel_by_id(ledger, each, grace=args.grace)
        except AnyaccelError as error:
            if args.all and isinstance(error, LeaseNotFoundError):  # it has ended with another one
                continue
            if failed is not None:
                output.say(str(error))
            failed = failed or error
    return done, failed


def list_own(ledger: Ledger) -> tuple[list[str], list[str]]:
    """Return what this user can cancel, and the leases with which this process runs, which stay.

    What waits comes first, so that it does not get what the rest gives back.
    """
    user = os.geteuid()
    found, running, waiters = [], [], set[int]()
    for extension in extensions("cancel"):
        waits, runs, pids = extension.list_own()
        found += waits
        running += runs
        waiters |= pids
    found += [ticket.id for ticket in ledger.tickets() if ticket.uid == user and ticket.pid not in waiters]
    found += running
    leases = dict.fromkeys(lease.id for lease in ledger.leases() if lease.uid == user and lease.id)
    own = [lease for lease in leases if not ledger.explain_refusal(lease)]
    return [*found, *(lease for lease in leases if lease not in own)], own


def cancel_by_id(ledger: Ledger, what: str, *, grace: float | None = None) -> str:
    """Cancel a job, a wait or a lease, by its identity; returns what to say about it.

    Args:
        ledger: The machine's leases.
        what: The identity.
        grace: Seconds between SIGTERM and SIGKILL; None for those that a job was given, and 10 for a lease.

    Raises:
        AnyaccelError: When there is none, or it does not end.
    """
    for extension in extensions("cancel"):
        message: str | None = extension.cancel(what, grace)
        if message is not None:
            return message
    if any(ticket.id == what for ticket in ledger.tickets()):
        return f"process {ledger.cancel(what)} does not wait with ticket {what} any more"
    if all(lease.id != what for lease in ledger.leases()):
        raise LeaseNotFoundError(
            f"there is no job, ticket or lease {what!r}",
            hint="'anyaccel jobs' lists jobs, 'anyaccel queue --json' tickets, 'anyaccel --columns device,user,lease'"
            " leases",
        )
    pids = ledger.end_lease(what, grace=GRACE_SECONDS if grace is None else grace, force=True)
    return f"lease {what} is released; asked to end: {', '.join(map(str, pids)) or 'no process'}"
