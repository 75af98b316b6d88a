"""Record this machine as the plug-ins read it, for a replay anywhere with --machine DIR.

Serial numbers, UUIDs, network addresses and names of hosts and users are replaced, consistently, unless --raw is given.
DIR gets the recording, machine.json, and the inventory that it replays to, expected.json.

The exit status is 1 when the replay has other devices than the machine.
"""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.inventory import verify
from anyaccel.inventory.record import record

KIB = 1 << 10


EXAMPLES = (
    ("anyaccel record my-machine", "record this machine"),
    ("anyaccel record my-machine --verify", "check that it still replays to the same devices"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="directory for the recording; made when missing")
    parser.add_argument("--raw", action="store_true", help="keep serial numbers, addresses and names")
    parser.add_argument(
        "--verify", action="store_true", help="record nothing; compare the replay of DIR with its expected.json"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.verify:
        return _verify(args)
    done = record(args.directory, args.machine, raw=args.raw, timeout=args.probe_timeout)
    for problem in done.problems:
        output.say(str(problem))
    for vendor in done.differences:
        output.say(
            f"{vendor}: the replay has other devices than the machine: a fault of the plug-in or of the replacements;"
            " try --raw, and report it"
        )
    if args.json:
        content = {
            "path": done.path,
            "vendors": list(done.vendors),
            "sanitized": not args.raw,
            "differences": list(done.differences),
        }
        output.print_json("record/1", content)
    else:
        output.print_line(done.path)
        what = "nothing was replaced" if args.raw else "serial numbers, addresses and names were replaced"
        output.say(f"{-(-done.size // KIB)} KiB, {what}; read it before you share it")
    # A recording that differs is kept: it shows the fault.
    return 1 if done.differences else 0


def _verify(args: argparse.Namespace) -> int:
    differences = verify(args.directory, timeout=args.probe_timeout)
    if args.json:
        output.print_json("record/1", {"path": args.directory, "differences": list(differences)})
    else:
        for vendor in differences:
            output.print_line(f"{vendor}: {args.directory} replays to other devices than in its expected.json")
    return 1 if differences else 0
