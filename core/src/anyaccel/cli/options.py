"""Arguments that several commands share, and what they mean."""

from __future__ import annotations

import argparse
from typing import Any

import anyaccel
from anyaccel.cli import output
from anyaccel.model import Inventory


def add_request(parser: argparse.ArgumentParser) -> None:
    """Let a command take a request."""
    parser.add_argument(
        "request",
        nargs="+",
        metavar="REQUEST",
        help="a term such as GPU, GPU:2, GPU:0.5, H100|A100:4,linked or GPU:1,mem=40GiB; several are served together",
    )


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Let a command say how a worker's environment is made."""
    parser.add_argument(
        "--mask",
        choices=("id", "index"),
        default="id",
        help="name devices in masks by stable id or by index (default: id)",
    )
    parser.add_argument(
        "--unallocated",
        choices=("hide", "inherit"),
        default="hide",
        help="hide vendors of which nothing was asked for, or leave them as they are (default: hide)",
    )


def launch(args: argparse.Namespace) -> anyaccel.Launch:
    """Prepare what the command line asks for, with a word about what people should know of the machine."""
    request = anyaccel.parse_request(args.request)
    return anyaccel.prepare(request, inventory=survey(args), mask=args.mask, unallocated=args.unallocated)


def survey(args: argparse.Namespace) -> Inventory:
    """Detect what the command line names, with a word about what people should know of it."""
    inventory = anyaccel.detect(**machine_options(args))
    for report in inventory.vendors:
        for note in report.notes:
            output.say(note)
        if report.problem is not None:
            output.say(str(report.problem))
    return inventory


def machine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of :func:`anyaccel.detect` that the command line gave."""
    options = {"machine": args.machine, "timeout": args.probe_timeout}
    if args.declare:
        from anyaccel.inventory.declared import parse_declaration

        options["declare"] = dict(parse_declaration(text) for text in args.declare)
    return options
