"""Print the variables by which a shell sees exactly the devices of a request: eval "$(anyaccel env GPU:1)".

The devices are not held, and other users may hold them. 'anyaccel hold --export' takes a lease.
"""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_launch, add_request, survey
from anyaccel.shell import statements

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
    launch = anyaccel.prepare(
        request, inventory=survey(args, request=request), mask=args.mask, unallocated=args.unallocated
    )
    environment = launch.environment
    if args.json:
        gaps = list(environment.allocation.gaps)
        output.print_json("env/1", {"set": dict(environment.set), "unset": sorted(environment.unset), "gaps": gaps})
        return 0
    # On standard error: the shell evaluates standard output.
    for gap in environment.allocation.gaps:
        output.say(gap)
    output.print_document(statements(environment.set, environment.unset))
    return 0
