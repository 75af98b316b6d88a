"""Run a command that sees exactly the accelerators it asked for: anyaccel run REQUEST ... -- CMD ..."""

from __future__ import annotations

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import acquire, add_launch, add_request, add_wait
from anyaccel.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_launch(parser)
    add_wait(parser)
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--enforce",
        action="store_true",
        default=False,
        help="let the kernel refuse the command the device nodes of all other devices",
    )
    group.add_argument(
        "--try-enforce",
        action="store_const",
        const="try",
        dest="enforce",
        help="the same where the kernel can, else run the command without it and say so",
    )
    job = parser.add_mutually_exclusive_group()
    job.add_argument(
        "--ranks",
        action="store_true",
        help="run the command once for each device, with RANK, WORLD_SIZE, MASTER_PORT and so on set; the first failure"
        " ends all",
    )
    job.add_argument(
        "--port",
        action="store_true",
        help="set MASTER_ADDR and MASTER_PORT, a port of this job alone, for a command that starts its ranks itself",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from anyaccel.launcher.command import replace_process
    from anyaccel.launcher.launch import with_variables
    from anyaccel.launcher.sandbox import available, sandbox_for

    if not args.command:
        raise UsageError("a command to run must follow '--', as in: anyaccel run GPU:1 -- python train.py")
    unable = available() if args.enforce else ""
    hold = acquire(args, confined=bool(args.enforce and not unable))
    allocation, inventory = hold.allocation, hold.launch.inventory
    if allocation.cpu:
        output.say(anyaccel.open_scheduler(inventory).why(allocation.request).message)
    sandbox = sandbox_for(allocation, inventory, enforce=args.enforce)
    if args.enforce and sandbox is None:
        output.say(f"the command is not confined to its devices: {unable}")
    for gap in sandbox.gaps if sandbox else ():
        output.say(gap)
    if hold.lease:
        hold.lease.inherit()  # the command carries the lease from here on, and all that it starts
    if not args.ranks and not args.port:
        replace_process(hold.launch, args.command, sandbox)
    from anyaccel.launcher.rendezvous import Rendezvous

    rendezvous = Rendezvous()
    if args.port:
        rendezvous.inherit()  # as it does the lease
        replace_process(with_variables(hold.launch, rendezvous.variables), args.command, sandbox)
    from anyaccel.launcher.ranks import run_ranks

    return run_ranks(hold.launch, args.command, rendezvous, sandbox=sandbox)
