"""Print the ids of devices that would serve a request, one per line, without holding them.

Leases are ignored: another user may hold these devices. Your limits count: a request above them is refused, and one
that would wait for them is reported.
"""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_request, add_terms, survey
from anyaccel.cli.output import take_fields
from anyaccel.errors import NeverFitsError
from anyaccel.launcher import find_limits
from anyaccel.model import format_units
from anyaccel.scheduler import apply_limits

EXAMPLES = (
    ("anyaccel select GPU:2,linked", "ids of two linked GPUs"),
    ("anyaccel select GPU --format index", "the vendor's number of one"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_terms(parser)
    parser.add_argument(
        "--format", choices=("id", "index"), default="id", help="print stable ids or the vendor's indexes (default: id)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    wanted = anyaccel.parse_request(args.request)
    inventory = survey(args, request=wanted)
    allocation = anyaccel.open_scheduler(inventory).allocate(wanted)
    # Limits count devices: a request that falls back to the CPU has none.
    limits = () if allocation.cpu else find_limits(wanted, time=args.time, priority=args.priority, inventory=inventory)
    verdict = apply_limits(anyaccel.Verdict(request=wanted, fits_now=True, ever_fits=True), limits)
    if not verdict.ever_fits:
        raise NeverFitsError(verdict.message, verdict=verdict, hint=verdict.hint)
    if args.json:
        shares = [
            {
                **take_fields(share.device, "vendor", "id", "index", "type"),
                "share": float(format_units(share.units)),
                **take_fields(share, "slots", "memory_bytes", "enforced_by", "memory_by", "compute_by", "limited_by"),
            }
            for share in allocation.shares
        ]
        content = {"request": str(wanted), "cpu": allocation.cpu, "devices": shares}
        output.print_json("select/1", content | {"limits": [each.message() for each in limits]})
        return 0
    output.print_lines(device.id if args.format == "id" else str(device.index) for device in allocation.devices)
    output.say("nothing is held: another program may take these devices")
    if limits:
        output.say(verdict.message)
        output.say_lines(verdict.hint)
    return 0
