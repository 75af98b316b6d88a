"""Hold devices without a command, until they are released or the time is over: anyaccel hold GPU:1 --for 2h."""

from __future__ import annotations

import argparse
import shlex
import subprocess

from anyaccel.cli import output
from anyaccel.cli.durations import duration
from anyaccel.cli.options import acquire, add_launch, add_request, add_wait


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_launch(parser)
    add_wait(parser)
    parser.add_argument(
        "--for", dest="time", metavar="DURATION", type=duration, help="give them back by itself after so long"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    hold = acquire(args)
    if hold.lease is None:
        output.say("nothing is held: the request falls back to the CPU")
        return 0
    # A process that does nothing carries the lease: it ends with that process, however it ends.
    keeper = subprocess.Popen(
        ["sleep", "infinity" if args.time is None else str(args.time)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=hold.fds,
        cwd="/",
    )
    hold.lease.hand_to(keeper.pid)
    keeper.returncode = 0  # it outlives us on purpose, and nobody waits for it
    variables = hold.launch.environment.set
    if args.json:
        devices = [device.id for device in hold.devices]
        content = {"lease": hold.id, "pid": keeper.pid, "devices": devices, "set": dict(variables)}
        output.print_json("hold/1", content)
        return 0
    print(hold.id)
    for name, value in sorted(variables.items()):
        output.say(f"export {name}={shlex.quote(value)}")
    output.say(f"give them back with: anyaccel release {hold.id}")
    return 0
