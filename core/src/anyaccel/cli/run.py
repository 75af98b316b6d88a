"""Run a command that sees exactly the accelerators it asked for: anyaccel run REQUEST ... -- CMD ..."""

from __future__ import annotations

import argparse

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.options import add_launch, add_request, launch
from anyaccel.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_launch(parser)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from anyaccel.launcher.command import replace_process

    if not args.command:
        raise UsageError("a command to run must follow '--', as in: anyaccel run GPU:1 -- python train.py")
    prepared = launch(args)
    allocation = prepared.environment.allocation
    if allocation.cpu:
        output.say(anyaccel.open_scheduler(prepared.inventory).why(allocation.request).message)
    replace_process(prepared, args.command)
