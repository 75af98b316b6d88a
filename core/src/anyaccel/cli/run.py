"""Run a command that sees exactly the accelerators it asked for: anyaccel run REQUEST ... -- CMD ...

Without a command, at a terminal, it starts your shell.
"""

from __future__ import annotations

import argparse
import os

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.extensions import extensions
from anyaccel.cli.options import (
    acquire,
    add_command,
    add_launch,
    add_memory,
    add_request,
    add_signal,
    add_time,
    add_wait,
    time_limit,
)
from anyaccel.cli.quantities import add_grace
from anyaccel.errors import UnknownNameError, UsageError
from anyaccel.launcher.caps import FRACTION_VARIABLE
from anyaccel.launcher.command import replace_process
from anyaccel.launcher.sandbox import Sandbox, available, sandbox_for
from anyaccel.model import Share, format_slots, format_units, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


EXAMPLES = (
    ("anyaccel run GPU:1 -- python train.py", "one whole GPU of any vendor, the others hidden"),
    (
        "anyaccel run GPU:2,linked --wait 30m -- torchrun --nproc-per-node 2 train.py",
        "two that are linked, or fail after half an hour",
    ),
    ("anyaccel run GPU:0.5 -- python serve.py", "half of one"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_command(parser, "the command to run, and its arguments; your shell without one, at a terminal")
    add_launch(parser)
    add_wait(parser)
    add_time(parser)
    add_signal(parser)
    add_grace(parser)
    parser.add_argument(
        "--cap",
        action="store_true",
        help="cap PyTorch and TensorFlow at the share of memory as well, by PYTHONPATH, when a Python program imports"
        " them",
    )
    parser.add_argument(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run the command on the processors of the NUMA node that is nearest to its devices (default: where it has"
        " whole devices and the machine tells)",
    )
    add_memory(parser)
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
        help="set MASTER_ADDR and MASTER_PORT, a port of this job alone, for a command that starts its ranks itself;"
        " torchrun starts one for each device",
    )
    found = extensions("run")
    for extension in found:
        extension.add_arguments(parser)
    parser.set_defaults(extensions=found)


def main(args: argparse.Namespace) -> int:
    """Run the command, or the user's shell where there is none."""
    if args.signal is not None:
        from anyaccel.launcher.time_limit import check_early

        check_early(args.signal, args.time)  # before it waits for devices
    for extension in args.extensions:
        status: int | None = extension.main(args)
        if status is not None:
            return status
    shell = not args.command
    if shell:
        args.command = _shell(args)
    try:
        hold = acquire_devices(args)
    except UnknownNameError as error:
        if not shell:
            raise
        behind = "a command stands behind '--', as in: anyaccel run GPU:1 -- python train.py"
        raise UnknownNameError(str(error), hint=behind) from error
    if shell:
        names = ", ".join(device.name for device in hold.devices) or "no device"
        output.say(f"{args.command[0]} has {names}; it is given back when the shell ends")
    return become_command(args, hold, confine(args, hold))


def acquire_devices(
    args: argparse.Namespace, waits: Callable[[], object] = lambda: None, *, stays: bool = False
) -> anyaccel.Hold:
    """Hold the devices for the command, and report on standard error what the options change and what they do not.

    Args:
        args: The arguments.
        waits: Called once when the wait has begun.
        stays: Whether this process stays until the command has ended.
    """
    confined = bool(args.enforce and not available())
    hold = acquire(
        args, confined=confined, waits=waits, program=args.command[0], stays=stays, cap=args.cap, bind=args.bind,
        memory=args.memory, limit=True, told=True,
    )  # fmt: skip
    if hold.allocation.cpu:
        output.say(anyaccel.open_scheduler(hold.launch.inventory).why(hold.allocation.request).message)
        if args.time is not None:
            output.say("--time changes nothing: a time limit is that of the devices, and none is held")
    elif args.cap and FRACTION_VARIABLE not in hold.environ:
        output.say("--cap changes nothing: it is for a share of one device whose memory is known")
    processors = hold.allocation.processors
    if args.bind and not processors:
        output.say("--bind changes nothing: no NUMA node is known that is near the devices and has processors for us")
    if args.verbose and processors:
        output.say(f"it runs on the processors {format_slots(processors)}, which are nearest to the devices")
    if args.verbose:
        for share in hold.allocation.shares:
            if not share.whole:
                output.say(_held_to(share))
        if reason := hold.launch.environment.unlimited:
            output.say(f"no cgroup holds it to memory of the device: {reason}")
    return hold


def _held_to(share: Share) -> str:
    """Say what holds a command to a share."""
    limits = f", limits of {', '.join(share.limited_by)} set" if share.limited_by else ""
    return f"{share.device.name}: a share of {format_units(share.units)}, {share.enforced_by}{limits}"


def confine(args: argparse.Namespace, hold: anyaccel.Hold) -> Sandbox | None:
    """Make the sandbox of the command, None without one, and report on standard error what is not confined."""
    sandbox = sandbox_for(hold.allocation, hold.launch.inventory, enforce=args.enforce)
    if args.enforce and sandbox is None:
        output.say(f"the command is not confined to its devices: {available()}")
    for gap in sandbox.gaps if sandbox else ():
        output.say(gap)
    return sandbox


def become_command(args: argparse.Namespace, hold: anyaccel.Hold, sandbox: Sandbox | None) -> int:
    """Become the command, or what runs its ranks."""
    if hold.lease:
        hold.lease.inherit()  # the command carries the lease from here on, and all that it starts
    if not args.ranks and not args.port:
        replace_process(hold.launch, args.command, sandbox)
    from anyaccel.launcher.rendezvous import Rendezvous

    rendezvous = Rendezvous()
    if args.port:
        rendezvous.inherit()  # as it does the lease
        count = max(1, len(hold.devices))
        # How many processes 'torchrun' starts, unless it is told.
        variables = rendezvous.variables | {"PET_NPROC_PER_NODE": str(count)}
        environment = hold.launch.environment.with_variables(variables)
        replace_process(replace(hold.launch, environment=environment), args.command, sandbox)
    from anyaccel.launcher.ranks import run_ranks

    limit = time_limit(args, hold)
    return run_ranks(hold.launch, args.command, rendezvous, sandbox=sandbox, grace=args.grace, limit=limit)


def _shell(args: argparse.Namespace) -> list[str]:
    """The user's shell, for a person at a terminal."""
    import sys

    if args.command is not None or args.ranks or args.port or sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            "a command to run must follow '--', as in: anyaccel run GPU:1 -- python train.py",
            hint="at a terminal, 'anyaccel run GPU:1' alone starts a shell with the devices",
        )
    return [os.environ.get("SHELL") or "/bin/sh"]
