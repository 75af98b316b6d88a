"""Arguments that several commands share, and what they mean."""

from __future__ import annotations

import contextlib
import os

import anyaccel
from anyaccel.cli import output
from anyaccel.cli.quantities import duration, early_signal
from anyaccel.model import Inventory
from anyaccel.text import elapsed
from anyaccel.vendors import import_meanwhile

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from anyaccel.launcher.options import AcquireOptions, StartOptions
    from anyaccel.launcher.time_limit import TimeLimit


def add_request(parser: argparse.ArgumentParser) -> None:
    """Let a command take a request."""
    parser.add_argument(
        "request",
        nargs="+",
        metavar="REQUEST",
        help="a term such as GPU, GPU:2, GPU:0.5, 'H100|A100:4,linked' or GPU:1,mem=40GiB; several are served together",
    )


def add_command(parser: argparse.ArgumentParser, help: str) -> None:  # noqa: A002 - as argparse calls it
    """Let the help say where the command to run stands; it is taken from the arguments before they are parsed."""
    parser.add_argument("cmd", nargs="*", default=[], metavar="-- CMD", help=help)


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
    from argparse import BooleanOptionalAction

    group = parser.add_mutually_exclusive_group()
    group.add_argument("--wait", metavar="DURATION", type=duration, help="wait this long at most (default: no limit)")
    group.add_argument("--no-wait", action="store_true", help="fail at once, with status 4, when devices are not free")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="the higher, the earlier (default: 0)")
    parser.add_argument("--note", metavar="TEXT", default="", help="what it is for; everybody sees it")
    parser.add_argument(
        "--avoid-busy",
        action=BooleanOptionalAction,
        default=False,
        help="leave devices alone that are used without a lease",
    )


def add_terms(parser: argparse.ArgumentParser) -> None:
    """Let a command that holds nothing say with which terms a request would be made."""
    parser.add_argument("--time", metavar="DURATION", type=duration, help="as if asked for with this time limit")
    parser.add_argument("--priority", metavar="N", type=int, default=0, help="as if asked for with it (default: 0)")


def add_start(parser: argparse.ArgumentParser) -> None:
    """Let a command say how what it runs is started with its devices; :func:`start_options` takes it."""
    from argparse import BooleanOptionalAction

    parser.add_argument(
        "--cap",
        action="store_const",
        const=True,
        help="cap PyTorch and TensorFlow at the share of memory as well, by PYTHONPATH, when a Python program imports"
        " them",
    )
    parser.add_argument(
        "--bind",
        action=BooleanOptionalAction,
        default=None,
        help="run the command on the processors of the NUMA node that is nearest to its devices (default: where it has"
        " whole devices and the machine tells)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="let the kernel end a command that takes more of the host's memory, such as 8GiB, with all that it starts;"
        " refused where no cgroup v2 can be made",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--enforce",
        action="store_const",
        const=True,
        help="let the kernel refuse the command the device nodes of all other devices",
    )
    group.add_argument(
        "--try-enforce",
        action="store_const",
        const="try",
        dest="enforce",
        help="the same where the kernel can, else run the command without it and say so",
    )


def add_time(parser: argparse.ArgumentParser, *forms: str, what: str = "it") -> None:
    """Let a command say for how long it needs the devices.

    Args:
        parser: Where to add it.
        forms: Further forms of the option.
        what: What is ended then.
    """
    parser.add_argument(
        *forms,
        "--time",
        dest="time",
        metavar="DURATION",
        type=duration,
        help=f"end {what}, and give the devices back, after so long; who is known to end in time may pass others who"
        " wait",
    )


def add_signal(parser: argparse.ArgumentParser) -> None:
    """Let a command say which signal what it starts gets before its time is over."""
    parser.add_argument(
        "--signal",
        metavar="NAME@DURATION",
        type=early_signal,
        help="with --time: send a signal so long before its end, such as USR1@60s, to each process that catches it",
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
    """Hold what the command line asks for, saying on the way what people should know.

    A process beside this one writes down the use of the devices, and ends what runs with them when the time is over,
    unless this process stays to do so.

    Args:
        args: The arguments.
        start: How the command is started.
        waits: Called once when the wait has begun, before anything is said of it.
        program: Name of the command that is going to use the devices.
        stays: Whether this process stays until that has ended, and does not become it.
        runs: Whether a command of the user's is started: in a cgroup of its own where one was made, and with a time
            limit that is told, and has the grace and the early signal of the arguments.
    """
    request = anyaccel.parse_request(args.request)
    inventory = survey(args)
    from anyaccel.launcher.hold import take
    from anyaccel.launcher.monitor import start_monitor
    from anyaccel.linux.mark import draw_for_process

    line = output.StatusLine()

    def show(sentence: str) -> None:
        nonlocal line
        if not line.used:
            waits()
            line = output.StatusLine()  # where standard error leads now
        line.show(sentence)

    try:
        options: AcquireOptions = {**start, **wait_options(args), "inventory": inventory}
        hold = take(request, draw_for_process, tell=show, grouped=runs, **options)
    finally:
        line.clear()
    if line.used:
        names = ", ".join(device.name for device in hold.devices)
        output.say(f"got {names} after {elapsed(hold.waited)}")
    if hold.lease is not None and inventory.machine == "host":
        _tell_once_of_others()
    start_monitor(hold, program, stays=stays, limit=time_limit(args, hold) if runs else None)
    return hold.mark_process()


def time_limit(args: argparse.Namespace, hold: anyaccel.DeviceLease) -> TimeLimit | None:
    """The time limit of a command that runs with a hold, as the command line or the machine gives it."""
    from anyaccel.launcher.time_limit import TimeLimit, check_early

    return TimeLimit.for_lease(hold.lease, args.time, args.grace, check_early(args.signal, args.time))


def _tell_once_of_others() -> None:
    """Say, once for a user, that leases of other users are not seen."""
    from anyaccel.configuration import user_directory
    from anyaccel.ledger import Ledger

    directory = user_directory("XDG_STATE_HOME", ".local/state")
    if os.environ.get("ANYACCEL_STATE_DIR") or not directory or Ledger.open().shared:
        return
    with contextlib.suppress(OSError):  # who has no place for the note is told nothing, rather than every time
        os.makedirs(directory, mode=0o700, exist_ok=True)
        os.close(os.open(f"{directory}/told-of-others", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        output.say("leases of other users are not seen on this machine; 'sudo anyaccel setup' shares them (said once)")


def wait_options(args: argparse.Namespace) -> AcquireOptions:
    """The keyword arguments of :func:`anyaccel.acquire` that :func:`add_wait` and :func:`add_time` declare."""
    return {
        "wait": 0 if args.no_wait else args.wait,
        "priority": args.priority,
        "note": args.note,
        "avoid_busy": args.avoid_busy,
        "time": args.time,
    }


def start_options(args: argparse.Namespace) -> StartOptions:
    """The keyword arguments of :func:`anyaccel.acquire` that :func:`add_launch` and :func:`add_start` declare.

    Without those that were not given.
    """
    names = ("mask", "unallocated", "cap", "bind", "memory", "enforce")
    given: Any = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    found: StartOptions = given
    return found


def survey(args: argparse.Namespace) -> Inventory:
    """Detect what the command line names, with a word about what people should know of it."""
    import_meanwhile("anyaccel.launcher.hold")
    inventory = anyaccel.detect(**machine_options(args))
    for report in inventory.vendors:
        if args.verbose:
            driver = f", driver {report.driver_version}" if report.driver_version else ""
            output.say(f"{report.vendor}: {report.state.value} in {report.seconds:.3f} s{driver}")
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
