"""Say whether a request fits this machine, why not, and which nearest request would."""

from __future__ import annotations

import argparse
import re

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_request, add_terms, survey
from anyaccel.errors import NeverFitsError, NotFreeError, RequestError, UnknownNameError
from anyaccel.launcher import estimate_start
from anyaccel.text import clock

_TICKET = re.compile("[0-9a-f]{12}")

EXAMPLES = (
    ("anyaccel why GPU:8", "does it fit, and what holds it up"),
    ("anyaccel why 'H100|A100:2,mem=40GiB'", "one of several types, with so much memory"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_terms(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    try:
        wanted = anyaccel.parse_request(args.request)
        inventory = survey(args, request=wanted)
        verdict = anyaccel.why(wanted, time=args.time, priority=args.priority, inventory=inventory)
    except (RequestError, UnknownNameError) as error:
        word = args.request[0]
        if len(args.request) > 1 or not (word.isdecimal() or _TICKET.fullmatch(word)):
            raise
        hint = "'anyaccel jobs ID' says why a job waits, 'anyaccel queue' why each request does"
        raise type(error)(str(error), hint=hint) from None
    # A forecast reads every lease and ticket: it is made only for a request that has to wait.
    waits = verdict.ever_fits and not verdict.fits_now
    start = estimate_start(wanted, time=args.time, inventory=inventory) if waits else None
    if args.json:
        told = output.moment(start)
        output.print_json("why/1", {"request": str(wanted), **verdict.to_json(), "starts": told})
    else:
        for line in (verdict.message, *verdict.hint.splitlines()):
            output.print_folded(line)
        for gap in verdict.gaps:
            output.print_folded(gap)
        if start is not None:
            output.print_folded(f"It would start by {clock(start)}, if all leases last until their time limits.")
        elif waits:
            output.print_folded("Its start is unknown: not all leases, requests and drains in the way have an end.")
    if verdict.fits_now:
        return 0
    return NotFreeError.exit_code if verdict.ever_fits else NeverFitsError.exit_code
