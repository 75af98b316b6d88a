"""Print the variables that make a shell see exactly what a request gets: eval "$(anyaccel env GPU:1)".

Nothing is held, and leases are not looked at: what is chosen may be somebody's. 'anyaccel hold --export' takes a lease.
"""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_launch, add_request, survey
from anyaccel.exports.shell import statements

EXAMPLES = (
    ('eval "$(anyaccel env GPU:1)"', "let this shell see one GPU, without holding it"),
    ("anyaccel env GPU:2 --json", "what to set and to unset, for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_launch(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    request = anyaccel.parse_request(args.request)
    launch = anyaccel.prepare(request, inventory=survey(args), mask=args.mask, unallocated=args.unallocated)
    environment = launch.environment
    if args.json:
        gaps = list(environment.allocation.gaps)
        output.print_json("env/1", {"set": dict(environment.set), "unset": sorted(environment.unset), "gaps": gaps})
        return 0
    for gap in environment.allocation.gaps:
        output.say(gap)
    output.print_document(statements(environment.set, environment.unset))
    return 0
