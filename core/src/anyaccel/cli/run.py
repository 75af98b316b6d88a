"""Run a command that sees exactly the accelerators it asked for; without a command, at a terminal, your shell."""

from __future__ import annotations

import argparse
import os

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.commands import extensions
from anyaccel.cli.options import (
    acquire,
    add_command,
    add_grace,
    add_launch,
    add_request,
    add_signal,
    add_start,
    add_time,
    add_wait,
    describe_devices,
    start_options,
)
from anyaccel.errors import RequestError, UnknownNameError, UsageError
from anyaccel.launcher import require_program
from anyaccel.model import Share, format_share, format_slots

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from anyaccel.launcher import StartOptions


EXAMPLES = (
    ("anyaccel run GPU:1 -- python train.py", "one whole GPU of any vendor, the others hidden"),
    (
        "anyaccel run GPU:2,linked --wait 30m -- torchrun --nproc-per-node 2 train.py",
        "two linked GPUs; fails after half an hour of waiting",
    ),
    ("anyaccel run GPU:0.5 -- python serve.py", "half of a GPU"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_command(parser, "the command to run, and its arguments")
    add_wait(parser.add_argument_group("waiting"))
    limit = parser.add_argument_group("time limit")
    add_time(limit)
    add_signal(limit)
    add_grace(limit)
    found = extensions("run")
    for extension in found:
        extension.add_arguments(parser)
    rare = parser.add_argument_group("rare options")
    add_start(rare)
    add_launch(rare)
    parser.set_defaults(extensions=found)


def main(args: argparse.Namespace) -> int:
    """Run the command, or the user's shell."""
    _check_ahead(args)
    # An option of an extension, such as --ranks, takes the command over.
    for extension in args.extensions:
        status: int | None = extension.main(args)
        if status is not None:
            return status
    shell = not args.command
    if shell:
        args.command = _shell(args)
    try:
        hold = acquire_devices(args)
    except (UnknownNameError, RequestError) as error:
        # Without '--', the words of a command look like terms of the request: 'run GPU:2 sleep 3'. One term that breaks
        # the grammar is a slip in the request.
        if not shell or (isinstance(error, RequestError) and len(args.request) == 1):
            raise
        behind = "the command to run stands after '--', as in: anyaccel run GPU:1 -- python train.py"
        raise type(error)(str(error), hint=behind) from error
    if shell:
        output.say(
            f"{args.command[0]} has {describe_devices(hold) if hold.devices else 'no device'}, until the shell ends"
        )
    if hold.lease:
        hold.lease.inherit()  # from here on the command and its children carry the lease
    return hold.launch.become(args.command)


def _check_ahead(args: argparse.Namespace) -> None:
    """Check the early signal and the program: an error now, rather than after a wait for devices."""
    if args.signal is not None:
        from anyaccel.launcher.time_limit import check_early

        args.signal = check_early(args.signal, args.time)
    if args.command:
        require_program(args.command[0])


def acquire_devices(
    args: argparse.Namespace, waits: Callable[[], object] = lambda: None, *, stays: bool = False
) -> anyaccel.DeviceLease:
    """Acquire the devices of the command, and report options that have no effect.

    Args:
        args: The arguments.
        waits: Called once when the wait has begun.
        stays: Whether this process stays until the command has ended.
    """
    start: StartOptions = {"bind": None, **start_options(args)}
    hold = acquire(args, start, waits=waits, program=args.command[0], stays=stays, runs=True)
    if hold.allocation.cpu:
        output.say(anyaccel.open_scheduler(hold.launch.inventory).why(hold.allocation.request).message)
        if args.time is not None:
            output.say("--time has no effect: no device is held")
    elif args.cap:
        from anyaccel.launcher.caps import FRACTION_VARIABLE

        if FRACTION_VARIABLE not in hold.environ:
            output.say("--cap has no effect: it is for a share of one device whose memory is known")
    _say_how(args, hold)
    return hold


def _say_how(args: argparse.Namespace, hold: anyaccel.DeviceLease) -> None:
    """Report the processors and the confinement of the command."""
    processors, sandbox = hold.allocation.processors, hold.launch.sandbox
    if args.bind and not processors:
        output.say("--bind has no effect: no NUMA node near the devices is known that has processors for this process")
    if args.verbose and processors:
        output.say(f"the command runs on the processors {format_slots(processors)}, nearest to the devices")
    if args.enforce and sandbox is None:
        from anyaccel.launcher.sandbox import find_obstacle

        output.say(f"the command is not confined to its devices: {find_obstacle()}")
    for gap in sandbox.gaps if sandbox else ():
        output.say(gap)
    if not args.verbose:
        return
    for share in hold.allocation.shares:
        if not share.whole:
            output.say(_held_to(share, str(hold.allocation.request)))
    if reason := hold.launch.environment.unlimited:
        output.say(f"no cgroup limits its device memory: {reason}")


def _held_to(share: Share, request: str) -> str:
    """Describe how a share is enforced."""
    limits = f", limits of {', '.join(share.limited_by)} set" if share.limited_by else ""
    asked = format_share(share.units, request, share.device.memory_bytes)
    return f"{share.device.name}: a share of {asked}, {share.enforced_by}{limits}"


def _shell(args: argparse.Namespace) -> list[str]:
    """Return the user's shell, for a person at a terminal."""
    import sys

    # A script that forgot its command must fail: without a terminal a shell would end at once.
    if args.command is not None or sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            "a command to run must follow '--', as in: anyaccel run GPU:1 -- python train.py",
            hint="at a terminal, 'anyaccel run GPU:1' alone starts a shell with the devices",
        )
    return [os.environ.get("SHELL") or "/bin/sh"]
