"""Give drained devices out again."""

from __future__ import annotations

import argparse

from anyaccel.cli import name_devices, output, survey
from anyaccel.ledger import without_scope

from anyaccel_jobs.withhold import undrain

EXAMPLES = (
    ("sudo anyaccel undrain GPU/3", "end the drain of a device, and of the devices drained with it"),
    ("sudo anyaccel undrain GPU/3 --json", "the same for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("device", nargs="+", metavar="DEVICE", help="a drained device, or the identity of a drain")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    inventory = survey(args)
    devices = [device for block in undrain(inventory, args.device) for device in block.devices]
    if args.json:
        output.print_json("undrain/1", {"devices": [without_scope(device) for device in devices]})
    else:
        output.say(f"no longer drained: {name_devices(devices, inventory)}")
    return 0
