"""Reserve whole devices for a user or a group and a time, as for a course; list and remove reservations.

Requests of other users get a reserved device only if their time limit ends before. A device can be reserved only from
the time on at which its leases have ended.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import anyaccel
from anyaccel.cli import add_note, name_devices, output, survey
from anyaccel.errors import UsageError
from anyaccel.ledger import DeviceBlock, Ledger, without_scope
from anyaccel.linux import users

from anyaccel_jobs.moments import moment, read_moment
from anyaccel_jobs.withhold import remove, reserve

EXAMPLES = (
    ("sudo anyaccel reserve GPU:4 --from '2026-12-01 09:00' --to 12:00 --for carol", "four devices for a morning"),
    ("sudo anyaccel reserve GPU:2 --from now --to 4h --for @students", "two devices for the members of a group"),
    ("anyaccel reserve", "list drains and reservations"),
    ("sudo anyaccel reserve --remove 1a2b3c4d", "remove one"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("request", nargs="*", metavar="REQUEST", help="the devices, such as GPU:4; none to list")
    parser.add_argument(
        "--from",
        dest="begin",
        metavar="TIME",
        type=moment(ahead=True),
        help="start: now, 14:30, '2026-12-01 14:30', or 2h from now",
    )
    parser.add_argument("--to", dest="end", metavar="TIME", type=_end_moment, help="end: a time, or a duration: 4h")
    parser.add_argument("--for", dest="user", metavar="USER|@GROUP", help="a user or a group, by name or number")
    add_note(parser)
    parser.add_argument("--remove", metavar="ID", action="append", help="remove a reservation")


def _end_moment(text: str) -> Callable[[float], float]:
    """Turn the end of a period into a function of its start: a time after the start, or a duration such as 4h.

    Raises:
        argparse.ArgumentTypeError: When the text is neither.
    """
    read_moment(text, time.time(), ahead=True)
    return lambda begin: read_moment(text, begin, ahead=True)


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.remove:
        args.remove += args.request  # --remove ID ID
        remove(args.remove)
        found: tuple[DeviceBlock, ...] = ()
    elif args.request:
        found = (_reserve(args),)
    else:
        found = Ledger.open().blocks()
    if args.json:
        output.print_json("reserve/1", {"removed": args.remove or [], "blocks": [_as_json(block) for block in found]})
    elif args.remove:
        output.say(f"removed: {', '.join(args.remove)}")
    elif not found:
        output.print_line("No device is drained or reserved.")
    else:
        inventory = survey(args)  # for the names of the devices
        for block in found:
            output.print_folded(f"{block.id}  {name_devices(block.devices, inventory)}: {block.describe()}")
    return 0


def _reserve(args: argparse.Namespace) -> DeviceBlock:
    missing = [
        name for name, value in (("--from", args.begin), ("--to", args.end), ("--for", args.user)) if value is None
    ]
    if missing:
        raise UsageError(f"a reservation must have {' and '.join(missing)}", hint="see 'anyaccel reserve --help'")
    request = anyaccel.parse_request(args.request)
    return reserve(survey(args), request, args.begin, args.end(args.begin), args.user, args.note)


def _as_json(block: DeviceBlock) -> dict[str, object]:
    return {
        "id": block.id,
        "kind": "drain" if block.drains else "reservation",
        "devices": [without_scope(device) for device in block.devices],
        "reason": block.reason,
        "by": block.by,
        "from": output.moment(block.begin),
        "to": output.moment(block.end),
        "user": None if block.user is None else users.user_name(block.user),
        "group": None if block.group is None else users.group_name(block.group),
        "request": block.request,
    }
