"""Say whether a request fits this machine, why it does not, and which nearest one would."""

from __future__ import annotations

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_request, survey
from anyaccel.errors import NeverFitsError, NotFreeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    wanted = anyaccel.parse_request(args.request)
    verdict = anyaccel.why(wanted, inventory=survey(args))
    if args.json:
        output.print_json("why/1", {"request": str(wanted), **verdict.to_json()})
    else:
        output.print_lines([verdict.message, *verdict.hint.splitlines()])
    if verdict.fits_now:
        return 0
    return NotFreeError.exit_code if verdict.ever_fits else NeverFitsError.exit_code
