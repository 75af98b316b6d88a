"""Arguments that several commands share: types of their values, declarations, and the calls that take them."""

from __future__ import annotations

import contextlib
import os

import anyaccel
from anyaccel.cli import output
from anyaccel.errors import AnyaccelError
from anyaccel.model import Inventory, VendorState, describe_parts
from anyaccel.text import duration as parse_duration
from anyaccel.text import elapsed, span
from anyaccel.vendors import close as close_vendors
from anyaccel.vendors import do_meanwhile

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable
    from typing import Any

    from anyaccel.launcher import AcquireOptions, StartOptions, TimeLimit
    from anyaccel.model import Request

    Options = argparse.ArgumentParser | argparse._ArgumentGroup  # noqa: SLF001 - argparse has no public name for it
    """A parser, or a group of its options with a heading in the help."""


class BareSeconds(float):
    """A duration that was given without a unit, which people may have meant in minutes."""


def duration(text: str) -> float:
    """Turn a duration such as 90s, 15m, 2h, 1h30m, 90 or 1:30:00 into seconds; a number alone becomes BareSeconds.

    Raises:
        argparse.ArgumentTypeError: When the text is not a duration.
    """
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise _refused(str(error)) from None
    return BareSeconds(seconds) if text[-1:].isdecimal() and ":" not in text else seconds


def seconds(least: float, most: float) -> Callable[[str], float]:
    """Return a parser of a duration between two bounds, in seconds."""

    def kind(text: str) -> float:
        value = duration(text)
        if not least <= value <= most:
            raise _refused(f"must be from {span(least)} to {span(most)} (got {text!r:.40})")
        return value

    return kind


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of a whole number between two bounds."""

    def kind(text: str) -> int:
        # int() takes underscores, blanks and digits of all scripts.
        digits = text.removeprefix("-")
        known = digits.isascii() and digits.isdecimal() and len(digits) <= len(str(most))
        number = int(text) if known else least - 1
        if not least <= number <= most:
            raise _refused(f"must be a whole number from {least} to {most} (got {text!r:.40})")
        return number

    return kind


def priority(text: str) -> int:
    """Parse a priority.

    Raises:
        argparse.ArgumentTypeError: When the text is no whole number, or the number is out of range.
    """
    from anyaccel.ledger.entries import MAX_PRIORITY  # few command lines have one

    return whole(-MAX_PRIORITY, MAX_PRIORITY)(text)


def _refused(message: str) -> argparse.ArgumentTypeError:
    import argparse

    return argparse.ArgumentTypeError(message)


def add_request(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Declare the request of a command, of at least one term unless it is optional."""
    parser.add_argument(
        "request",
        nargs="+" if required else "*",
        metavar="REQUEST",
        help="a term such as GPU, GPU:2, GPU:0.5, 'H100|A100:4,linked' or GPU:1,mem=40GiB; several are served together",
    )


def add_command(parser: argparse.ArgumentParser, help: str) -> None:  # noqa: A002 - as argparse calls it
    """Declare the command to run for the help. It is split off before the arguments are parsed."""
    # argparse would take the options of the command for its own.
    parser.add_argument("cmd", nargs="*", default=[], metavar="-- CMD", help=help)


def add_launch(parser: Options) -> None:
    """Declare the options for the environment of a worker."""
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
        help="vendors of which nothing was asked for (default: hide)",
    )


def add_wait(parser: Options) -> None:
    """Declare the options for waiting: how long, the priority, the note, the devices to avoid."""
    from argparse import BooleanOptionalAction

    group = parser.add_mutually_exclusive_group()
    group.add_argument("--wait", metavar="DURATION", type=duration, help="longest wait (default: no limit)")
    group.add_argument("--no-wait", action="store_true", help="fail at once, with exit status 4, if devices are in use")
    parser.add_argument(
        "--priority",
        metavar="N",
        type=priority,
        default=0,
        help="higher ones are served first (default: 0)",
    )
    add_note(parser)
    parser.add_argument(
        "--avoid-busy",
        action=BooleanOptionalAction,
        default=False,
        help="leave devices out that are used without a lease",
    )


def add_note(parser: Options) -> None:
    """Declare the note of a lease, a job, a drain or a reservation."""
    parser.add_argument("--note", metavar="TEXT", default="", help="purpose, which all users see")


def add_terms(parser: argparse.ArgumentParser) -> None:
    """Declare the terms under which a command that holds nothing considers a request."""
    parser.add_argument("--time", metavar="DURATION", type=duration, help="consider a request with this time limit")
    parser.add_argument(
        "--priority", metavar="N", type=priority, default=0, help="consider a request of this priority (default: 0)"
    )


def add_start(parser: Options) -> None:
    """Declare the options for starting a process with devices; :func:`start_options` reads these options."""
    from argparse import BooleanOptionalAction

    parser.add_argument(
        "--cap",
        action="store_const",
        const=True,
        help="cap PyTorch and TensorFlow at the share of memory, too",
    )
    parser.add_argument(
        "--bind",
        action=BooleanOptionalAction,
        default=None,
        help="run on the processors nearest to the devices (default: with whole devices)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="let the kernel end a command that takes more of the host's memory, such as 8GiB",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--enforce",
        action="store_const",
        const=True,
        help="let the kernel refuse all other devices to the command",
    )
    group.add_argument(
        "--try-enforce",
        action="store_const",
        const="try",
        dest="enforce",
        help="the same where the kernel can; else say so",
    )


def add_time(parser: Options, *forms: str, what: str = "the command") -> None:
    """Declare the time limit.

    Args:
        parser: The parser.
        forms: Further forms of the option.
        what: The thing that the limit ends, for the help.
    """
    parser.add_argument(
        *forms,
        "--time",
        dest="time",
        metavar="DURATION",
        type=duration,
        help=f"time limit of {what}: 90 (seconds), 10m or 1:30:00; a request with one may start earlier (backfill)",
    )


def add_signal(parser: Options) -> None:
    """Declare the signal that is sent before the time limit; the command reads the text."""
    parser.add_argument(
        "--signal",
        metavar="NAME@DURATION",
        help="send a signal before the limit, such as USR1@60s, to processes that catch it",
    )


def add_grace(parser: Options, default: float | None = 10.0, *, of: str = "10s") -> None:
    """Declare the time between SIGTERM and SIGKILL.

    Args:
        parser: The parser.
        default: Its value if the option is not given.
        of: Description of the default, for the help.
    """
    parser.add_argument(
        "--grace", metavar="DURATION", type=duration, default=default, help=f"time to end after SIGTERM (default: {of})"
    )


def acquire(
    args: argparse.Namespace,
    start: StartOptions,
    *,
    waits: Callable[[], object] = lambda: None,
    program: str,
    stays: bool = False,
    runs: bool = False,
) -> anyaccel.DeviceLease:
    """Acquire the devices of a command line, with progress messages and warnings on standard error.

    A process beside this one writes the use of the devices to the journal and enforces the time limit, unless this
    process stays to do so.

    Args:
        args: The arguments.
        start: Options for the start of the command.
        waits: Called once when the wait has begun, before a message about it.
        program: Name of the program that will use the devices.
        stays: Whether this process stays until the program has ended; otherwise it becomes the program.
        runs: Whether this starts a command of the user: in a cgroup of its own if one was made, and with the time
            limit, grace and early signal of the arguments.
    """
    request = anyaccel.parse_request(args.request)
    inventory = survey(args, meanwhile=_prepare_lease, request=request)
    from anyaccel.launcher.hold import take
    from anyaccel.launcher.monitor import start_monitor
    from anyaccel.linux.mark import draw_for_process

    line = output.StatusLine()

    def show(sentence: str) -> None:
        if not line.used:
            waits()
        line.show(sentence)

    try:
        # A mark of this process: the command that it becomes carries the lease on.
        options: AcquireOptions = {**start, **wait_options(args), "inventory": inventory}
        hold = take(request, draw_for_process, tell=show, grouped=runs, **options)
    finally:
        line.clear()
    limit = "" if args.time is None or not runs else f"time limit {span(args.time)}"
    # A command that got its devices at once says nothing, unless its limit has no unit: 20 is minutes in Slurm.
    if line.used:
        output.say(", ".join(filter(None, [f"got {describe_devices(hold)} after {elapsed(hold.waited)}", limit])))
    elif limit and isinstance(args.time, BareSeconds) and hold.lease is not None and not stays:
        output.say(limit)
    if hold.lease is not None and inventory.machine == "host":
        _tell_once_of_others()
    if not stays:
        close_vendors(wait=False)  # they end while the monitor starts
    start_monitor(hold, program, stays=stays, limit=time_limit(args, hold) if runs else None)
    return hold.mark_process()


def _prepare_lease() -> None:
    """Import the modules for a lease with its monitor, and read the facts about the kernel that a ledger needs.

    An error of the ledger is left to the acquisition.
    """
    import anyaccel.launcher.hold
    import anyaccel.launcher.monitor
    import anyaccel.probe.processors  # noqa: F401
    from anyaccel.ledger import Ledger

    with contextlib.suppress(AnyaccelError):
        Ledger.open()


def describe_devices(hold: anyaccel.DeviceLease) -> str:
    """Return what a lease has, see :func:`anyaccel.model.describe_parts`; ``-`` for no device."""
    allocation = hold.allocation
    return describe_parts(((share.device, share.units) for share in allocation.shares), str(allocation.request)) or "-"


def time_limit(args: argparse.Namespace, hold: anyaccel.DeviceLease) -> TimeLimit | None:
    """Return the time limit of a command: that of the command line, or of the machine's configuration."""
    from anyaccel.launcher.time_limit import TimeLimit

    return TimeLimit.for_lease(hold.lease, args.time, args.grace, args.signal)


def _tell_once_of_others() -> None:
    """Warn a user, once, that leases of other users are not visible."""
    from anyaccel.configuration import user_directory
    from anyaccel.ledger import Ledger

    directory = user_directory("XDG_STATE_HOME", ".local/state")
    if os.environ.get("ANYACCEL_STATE_DIR") or not directory or Ledger.open().shared:
        return
    with contextlib.suppress(OSError):  # a user without a home directory is not warned at all, rather than each time
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # O_EXCL: of two commands at the same time one prints the message.
        os.close(os.open(f"{directory}/told-of-others", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        output.say(
            "leases of other users are not seen on this machine; 'sudo anyaccel setup' shares them (this is said once)"
        )


def wait_options(args: argparse.Namespace) -> AcquireOptions:
    """Return the arguments of :func:`anyaccel.acquire` that :func:`add_wait` and :func:`add_time` declare."""
    return {
        "wait": 0 if args.no_wait else args.wait,
        "priority": args.priority,
        "note": args.note,
        "avoid_busy": args.avoid_busy,
        "time": args.time,
    }


def start_options(args: argparse.Namespace) -> StartOptions:
    """Return the arguments of :func:`anyaccel.acquire` that :func:`add_launch` and :func:`add_start` declare."""
    names = ("mask", "unallocated", "cap", "bind", "memory", "enforce")
    given: Any = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    found: StartOptions = given
    return found


def _import_verdicts() -> None:
    import anyaccel.launcher.verdicts  # noqa: F401


def survey(
    args: argparse.Namespace, *, meanwhile: Callable[[], object] = _import_verdicts, request: Request | None = None
) -> Inventory:
    """Detect the devices of a command line's machine, and print the remarks of detection.

    Args:
        args: The arguments.
        meanwhile: Called while the vendors' processes answer: it imports what the command needs next, by default the
            modules for a look at leases.
        request: The command's request, to report unknown names among its alternatives.
    """
    do_meanwhile(meanwhile)
    inventory = anyaccel.detect(**machine_options(args))
    for report in inventory.vendors:
        if args.verbose:
            driver = f", driver {report.driver_version}" if report.driver_version else ""
            took = f" in {report.seconds:.3f} s" if report.state is not VendorState.NOT_ASKED else ""
            output.say(f"{report.vendor}: {report.state.value}{took}{driver}")
        for note in report.notes:
            output.say(note)
        if report.problem is not None:
            output.say(str(report.problem))
    if request is not None and (unknown := _find_unknown(request, inventory)):
        output.say(f"unknown in {request}: {', '.join(unknown)}; no device and no installed plug-in has such a name")
    return inventory


def _find_unknown(request: Request, inventory: Inventory) -> list[str]:
    """Return the alternatives of a request's terms that neither a device nor the data beside a plug-in names.

    The list is empty if a plug-in has no such data: each name may be a product of its vendor.
    """
    names = [name for term in request.terms if len(term.names) > 1 for name in term.names]
    known = {name.lower() for device in inventory.devices for name in device.names}
    if known.issuperset(map(str.lower, names)):  # most requests: nothing is read for them
        return []
    from anyaccel.vendors.discovery import installed
    from anyaccel.vendors.presence import read_presences

    for vendor, signs in read_presences(installed()[0]).items():
        if signs is None or signs.names is None:
            return []
        known |= signs.list_names(vendor)
    return [name for name in dict.fromkeys(names) if name.lower() not in known]


def name_devices(devices: Iterable[str], inventory: Inventory) -> str:
    """Return the names of devices, given by their keys in the ledger; a device that was not detected keeps its id."""
    from anyaccel.launcher.scope import Scope
    from anyaccel.ledger.entries import without_scope

    ids, names = Scope.make(inventory, os.environ).ids, {device.id: device.name for device in inventory.devices}
    return output.device_names(sorted({names[ids[key]] if key in ids else without_scope(key) for key in devices}))


def machine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`anyaccel.detect` that the command line gives."""
    options = {"machine": args.machine, "timeout": args.probe_timeout}
    # Few declare devices: the module is imported for them alone.
    if args.declare:
        from anyaccel.inventory.declared import parse_declaration

        options["declare"] = dict(parse_declaration(text) for text in args.declare)
    return options
