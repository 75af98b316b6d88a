"""End jobs, waiting requests and leases of yours: anyaccel cancel 3, a ticket of 'anyaccel queue', a lease, or --all.

The processes of a job or a lease get SIGTERM, and are killed after the time of --grace. A request that is cancelled
fails in its process, which goes on.
"""

from __future__ import annotations

import argparse
import os

from anyaccel.cli import output
from anyaccel.cli.commands import extensions
from anyaccel.cli.options import add_grace
from anyaccel.errors import AnyaccelError, LeaseNotFoundError, UsageError
from anyaccel.ledger import Ledger
from anyaccel.linux import GRACE_SECONDS
from anyaccel.text import listed

EXAMPLES = (
    ("anyaccel cancel", "the only job, request or lease that you have"),
    ("anyaccel cancel 3", "a job"),
    ("anyaccel cancel --all", "all jobs, waits and leases of yours"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="ID",
        help="a job ('anyaccel jobs'), a ticket ('anyaccel queue') or a lease ('anyaccel'); optional for the only one",
    )
    parser.add_argument("--all", action="store_true", help="all jobs, waits and leases of this user")
    add_grace(parser, None, of="10s, or that of the job")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.what and args.all:
        raise UsageError("--all stands alone", hint="leave the ids out")
    ledger = Ledger.open()
    named = list(dict.fromkeys(args.what))
    if not named:
        named, own = list_own(ledger)
        if len(named) > 1 and not args.all:
            raise UsageError(
                f"you have {len(named)} to cancel: {listed(named)}", hint="name some of them, or give --all"
            )
        for lease in own:
            output.say(f"lease {lease} stays: this command runs with it")
    done, failed = _cancel_all(ledger, named, args)
    if args.json and failed is None:
        output.print_json("cancel/1", {"cancelled": done})
    elif not args.json:
        for message in done.values():
            output.say(message)
        if not named:
            output.say("nothing to cancel")
    if failed is not None:
        raise failed
    return 0


def _cancel_all(
    ledger: Ledger, named: list[str], args: argparse.Namespace
) -> tuple[dict[str, str], AnyaccelError | None]:
    """Cancel jobs, requests and leases in turn; return a message for each, and the first error."""
    done: dict[str, str] = {}
    failed: AnyaccelError | None = None
    for each in named:
        try:
            done[each] = cancel_by_id(ledger, each, grace=args.grace)
        except AnyaccelError as error:  # the rest is cancelled nevertheless
            # With --all, a lease may have been released with the job that was cancelled before it.
            if args.all and isinstance(error, LeaseNotFoundError):
                continue
            if failed is not None:
                output.say(str(error))
            failed = failed or error
    return done, failed


def list_own(ledger: Ledger) -> tuple[list[str], list[str]]:
    """Return what this user can cancel, and the leases of this process, which stay.

    Waiting requests come first, so that they do not get the devices that are freed next.
    """
    user = os.geteuid()
    leases = {lease.id: lease.pid for lease in ledger.leases() if lease.uid == user and lease.id}
    found, running, waiters, covered = [], [], set[int](), set[str]()
    for extension in extensions("cancel"):
        waits, runs, pids, held = extension.list_own(leases)
        found += waits
        running += runs
        waiters |= pids
        covered |= held
    # A job that waits has a ticket, too, and one that runs has leases; they are cancelled with the job.
    found += [ticket.id for ticket in ledger.tickets() if ticket.uid == user and ticket.pid not in waiters]
    found += running
    single = [lease for lease, pid in leases.items() if lease not in covered and pid not in waiters]
    # A shell that runs under a lease would else end itself with --all.
    own = [lease for lease in single if not ledger.explain_refusal(lease)]
    return [*found, *(lease for lease in single if lease not in own)], own


def cancel_by_id(ledger: Ledger, what: str, *, grace: float | None = None) -> str:
    """Cancel a job, a waiting request or a lease; return a message about it.

    Args:
        ledger: The machine's leases.
        what: Its identity.
        grace: Seconds between SIGTERM and SIGKILL; None for those of the job, or 10 for a lease.

    Raises:
        AnyaccelError: When the identity is unknown, or the processes do not end.
    """
    for extension in extensions("cancel"):
        message: str | None = extension.cancel(what, grace)
        if message is not None:
            return message
    # Jobs come first: they have numbers, and tickets and leases are longer.
    if any(ticket.id == what for ticket in ledger.tickets()):
        return f"process {ledger.cancel(what)} no longer waits with ticket {what}"
    if all(lease.id != what for lease in ledger.leases()):
        raise LeaseNotFoundError(
            f"there is no job, ticket or lease {what!r}",
            hint="'anyaccel jobs' lists jobs, 'anyaccel queue --json' tickets, 'anyaccel --columns device,user,lease'"
            " leases",
        )
    pids = ledger.end_lease(what, grace=GRACE_SECONDS if grace is None else grace, force=True)
    return f"lease {what} is released; signalled: {', '.join(map(str, pids)) or 'no process'}"
