"""Withhold devices from new requests, as for maintenance: running leases go on, and no request gets the devices."""

from __future__ import annotations

import argparse

from anyaccel.cli import add_note, name_devices, output, survey
from anyaccel.ledger import Ledger, without_scope

from anyaccel_jobs.withhold import drain

EXAMPLES = (
    ("sudo anyaccel drain GPU/3 --note 'fan is replaced on Monday'", "give out no more of this device"),
    ("sudo anyaccel undrain GPU/3", "give it out again"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "device", nargs="+", metavar="DEVICE", help="a device or several: a name such as GPU/3 or GPU/0-3, or an id"
    )
    add_note(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    inventory = survey(args)
    before = [block for block in Ledger.open().blocks() if block.drains]
    block = drain(inventory, args.device, args.note)
    if args.json:
        devices = [without_scope(device) for device in block.devices]
        output.print_json("drain/1", {"drain": block.id, "devices": devices, "reason": block.reason})
    else:
        names = name_devices(block.devices, inventory)
        output.say(f"drained: {names}; 'anyaccel undrain {names}' ends that")
        for other in before:
            if both := set(other.devices).intersection(block.devices):
                output.say(f"{name_devices(both, inventory)}: already {other.describe()}; 'anyaccel undrain' ends both")
    return 0
