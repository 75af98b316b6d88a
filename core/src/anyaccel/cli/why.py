"""Say whether a request fits this machine, why it does not, and which nearest one would."""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_request, machine_options, warnings_of
from anyaccel.errors import NeverFitsError, NotFreeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    wanted = anyaccel.parse_request(args.request)
    inventory = anyaccel.detect(**machine_options(args))
    verdict = anyaccel.open_scheduler(inventory).why(wanted)
    for warning in warnings_of(inventory):
        output.say(warning)
    if args.json:
        output.print_json("why/1", {"request": str(wanted), **verdict.to_json()})
    else:
        print(verdict)
    if verdict.fits_now:
        return 0
    return NotFreeError.exit_code if verdict.ever_fits else NeverFitsError.exit_code
