"""Print the ids of devices that would serve a request, one per line, without holding them.

Leases are not looked at: what is chosen may be somebody's.
"""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_request, survey
from anyaccel.model import format_units

EXAMPLES = (
    ("anyaccel select GPU:2,linked", "ids of two linked GPUs"),
    ("anyaccel select GPU --format index", "the vendor's number of one"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    parser.add_argument(
        "--format", choices=("id", "index"), default="id", help="print stable ids or the vendor's indexes (default: id)"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    wanted = anyaccel.parse_request(args.request)
    allocation = anyaccel.open_scheduler(survey(args)).allocate(wanted)
    if args.json:
        shares = [
            {
                "vendor": share.device.vendor,
                "id": share.device.id,
                "index": share.device.index,
                "type": share.device.type,
                "share": float(format_units(share.units)),
                "slots": list(share.slots),
                "memory_bytes": share.memory_bytes,
                "enforced_by": share.enforced_by or None,
                "memory_by": share.memory_by or None,
                "compute_by": share.compute_by or None,
                "limited_by": list(share.limited_by),
            }
            for share in allocation.shares
        ]
        output.print_json("select/1", {"request": str(wanted), "cpu": allocation.cpu, "devices": shares})
        return 0
    output.print_lines(device.id if args.format == "id" else str(device.index) for device in allocation.devices)
    output.say("nothing is held: another program may take these devices")
    return 0
