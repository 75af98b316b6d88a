"""Make this machine a node of a Ray cluster: anyaccel ray start [OPTIONS OF ray start ...].

Detects the devices of all vendors and runs 'ray start' with their quantities, types and labels. All other options are
Ray's own, such as --head, --address, --port, --num-cpus or --block, and take precedence. An existing token of Ray's is
used. 'ray stop' ends a node.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence

from anyaccel.cli import output, survey, whole
from anyaccel.errors import CommandNotRunnableError, UsageError
from anyaccel.launcher import become
from anyaccel.model import VendorState
from anyaccel.probe import HOST, MACHINE_VARIABLE
from anyaccel_export.ray import PREDEFINED, countable, describe

from anyaccel_ray import authentication
from anyaccel_ray.snapshot import VARIABLE, write_snapshot
from anyaccel_ray.start import narrowed, prepare

EXAMPLES = (
    ("anyaccel ray start --head", "the first node of a cluster"),
    ("anyaccel ray start --address 10.0.0.1:6379 --dry-run", "print what it would run"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("action", metavar="start", choices=("start",), help="what to do; further options are Ray's own")
    parser.add_argument("--dry-run", "--print", action="store_true", help="print the command instead of running it")
    parser.add_argument("--num-gpus", metavar="COUNT", type=whole(0, 65536), help="give Ray only so many GPUs")
    parser.add_argument(
        "--resources", metavar="JSON", type=_resources, default={}, help="further resources, or fewer devices of one"
    )
    parser.add_argument(
        "--labels", metavar="KEY=VALUE,...", type=_labels, default={}, help="further labels of the node"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.json and not args.dry_run:
        raise UsageError("--json prints the command as JSON and starts nothing: add --dry-run")
    inventory = survey(args)
    failed = [report.vendor for report in inventory.vendors if report.state is VendorState.FAILED]
    if failed:
        output.say(f"the node gets no device of {' and '.join(failed)}, because the detection failed")
    wanted = args.resources if args.num_gpus is None else {**args.resources, PREDEFINED: args.num_gpus}
    inventory = narrowed(inventory, wanted)
    further = {name: quantity for name, quantity in wanted.items() if name not in countable(inventory)}
    node = prepare(describe(inventory, resources=further, node_labels=args.labels), inventory, os.environ)
    for note in node.notes:
        output.say(note)
    if not args.dry_run:
        program = _program()
        if address := _option(args.passed_on, "--address"):
            authentication.use_token()
            authentication.check_admission(address)
        snapshot = {VARIABLE: write_snapshot(inventory)}
        if inventory.machine != HOST:
            snapshot[MACHINE_VARIABLE] = inventory.machine
        become([program, "start", *node.arguments, *args.passed_on], {**os.environ, **node.variables, **snapshot})
    if args.json:
        command = ["ray", "start", *node.arguments, *args.passed_on]
        output.print_json("ray/1", {"command": command, "variables": dict(node.variables), "notes": list(node.notes)})
    else:
        output.print_document(f"{node.command(args.passed_on)}\n")
    return 0


def _option(arguments: Sequence[str], name: str) -> str:
    """Return the last value of an option of Ray's; empty without the option."""
    # Ray takes the last of several values, and these arguments are Ray's to parse.
    found = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == name:
            found = following
        elif argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
    return found


def _program() -> str:
    """Return the path of the command ``ray`` beside this interpreter, or on PATH."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("Ray is not installed beside anyaccel", hint="pip install 'anyaccel[ray]'")
    # An environment that is not activated has its programs beside the interpreter, not on PATH.
    beside = os.path.dirname(sys.executable)
    program = shutil.which("ray", path=os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]))
    if program is None:
        raise CommandNotRunnableError(f"Ray is installed and its command 'ray' is neither in {beside} nor on PATH")
    return program


def _resources(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be JSON such as '{{\"TPU\": 4}}' (got {text!r:.60}: {error})"
        ) from error
    if not isinstance(found, dict) or not all(_is_quantity(value) for value in found.values()):
        raise argparse.ArgumentTypeError(f"must be a JSON object of quantities, 0 or more (got {text!r:.60})")
    for name, option in (("CPU", "--num-cpus"), (PREDEFINED, "--num-gpus")):
        if name in found:
            raise argparse.ArgumentTypeError(f"cannot hold {name}, which has an option of its own: {option}")
    return found


def _is_quantity(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def _labels(text: str) -> dict[str, str]:
    pairs = [pair.strip().partition("=") for pair in text.split(",") if pair.strip()]
    if not all(name and equals and "=" not in value for name, equals, value in pairs):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, separated by commas (got {text!r:.60})")
    return {name.strip(): value.strip() for name, _, value in pairs}
