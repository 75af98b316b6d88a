"""Arguments that several commands share, and what they mean."""

from __future__ import annotations

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.durations import duration
from anyaccel.model import Inventory

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from anyaccel.ledger import LeaseRecord


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


def add_wait(parser: argparse.ArgumentParser) -> None:
    """Let a command say how it waits for devices, and what for."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--wait", metavar="DURATION", type=duration, help="wait this long at most (default: no limit)")
    group.add_argument("--no-wait", action="store_true", help="fail at once, with status 4, when they are not free now")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="the higher, the earlier (default: 0)")
    parser.add_argument("--note", metavar="TEXT", default="", help="what it is for; everybody sees it")
    parser.add_argument(
        "--avoid-busy", action="store_true", help="leave devices alone that somebody uses without a lease"
    )


def acquire(args: argparse.Namespace, *, confined: bool = False) -> anyaccel.Hold:
    """Hold what the command line asks for, saying on the way what people should know."""
    request = anyaccel.parse_request(args.request)
    return anyaccel.acquire(
        request,
        inventory=survey(args),
        mask=args.mask,
        unallocated=args.unallocated,
        wait=0 if args.no_wait else args.wait,
        priority=args.priority,
        note=args.note,
        avoid_busy=args.avoid_busy,
        confined=confined,
        on_wait=_say_wait,
    )


def _say_wait(place: int, holders: tuple[LeaseRecord, ...]) -> None:
    from anyaccel.launcher.hold import holder

    who = "; ".join(f"{record.device} is held by {holder(record)}" for record in holders[:4]) or "others came first"
    more = f"; and {len(holders) - 4} more" if len(holders) > 4 else ""  # noqa: PLR2004
    output.say(f"waiting, place {place} in line: {who}{more}")


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
