"""Hold devices without a command, until they are released or the time is over: anyaccel hold GPU:1 --for 2h."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Mapping

from anyaccel.cli import output
from anyaccel.cli.options import acquire, add_launch, add_request, add_time, add_wait, describe_devices, start_options
from anyaccel.cli.parser import report_errors
from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.inventory import ALLOCATION_VARIABLE, LEASE_VARIABLE
from anyaccel.launcher import start_detached
from anyaccel.linux import process
from anyaccel.shell import exports, shell_quote
from anyaccel.text import span
from anyaccel.vendors import close as close_vendors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.launcher import DeviceLease

_COVERED = (ALLOCATION_VARIABLE, LEASE_VARIABLE)
_PROGRAM = "sleep"
"""The program that keeps the lease open."""


EXAMPLES = (
    ("anyaccel hold GPU:1 --for 2h", "for a notebook: prints a lease and what to set"),
    ("anyaccel hold H100:2 --note evaluation --no-wait", "now or not at all, with a note for other users"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_request(parser)
    add_time(parser, "--for", what="the lease")
    parser.add_argument(
        "--export",
        action="store_true",
        help='print what a shell evaluates, bash, zsh or fish: eval "$(anyaccel hold GPU:1 --export)"',
    )
    add_wait(parser.add_argument_group("waiting"))
    add_launch(parser.add_argument_group("rare options"))


def main(args: argparse.Namespace) -> int:
    """Run the command.

    A child acquires the devices, prints the lease and becomes the process that keeps it open. Until then it dies with
    this process, and its devices are freed. So each held device has a lease that was printed.
    """
    _, status = start_detached(lambda report: report_errors(lambda: _hold(args, report), as_json=args.json))
    return status


def _hold(args: argparse.Namespace, reporting: int) -> int:
    """Acquire the devices, print the lease, and keep it until the end; return only if nothing is held."""
    hold = acquire(args, start_options(args), program=_PROGRAM)
    # A lease covers the processes that were started with it; a shell that sets these variables was not.
    variables = {name: value for name, value in hold.launch.environment.set.items() if name not in _COVERED}
    if hold.lease is None:
        output.say("nothing is held: the request falls back to the CPU")
        if args.export:
            output.print_document(exports(variables, _unset(hold)))
        return 0
    with hold:
        try:
            _print(args, hold, variables)
        except BrokenPipeError as error:
            raise AnyaccelError(
                "nothing is held: the reader of standard output has gone, so that the lease is not known",
                hint="let it read to the end, as L=$(anyaccel hold GPU:1) does",
            ) from error
        go_on_alone(hold, _PROGRAM, reporting)
        with contextlib.suppress(OSError):  # 'sleep' takes less memory than an interpreter
            os.execvp(_PROGRAM, [_PROGRAM, "infinity" if args.time is None else str(args.time)])
        # There is no program "sleep": this process stays.
        if args.time is None:
            signal.pause()
        else:
            time.sleep(args.time)
    return 0


def go_on_alone(lease: DeviceLease, name: str, reporting: int) -> None:
    """Let the caller of the command go on, and keep a lease in this process alone.

    Args:
        lease: The lease, which has been printed.
        name: Name of this process in lists of processes, such as that of 'status'.
        reporting: Descriptor that the caller waits for.
    """
    # Until here this process dies with the command that started it, and its lease with it.
    process.live_on()
    if lease.lease is not None:
        lease.lease.inherit()
    close_vendors()  # their processes would keep the terminal's descriptors open
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # A hold for days must not keep a file system of the current directory busy.
    os.chdir("/")
    process.set_name(name)
    with contextlib.suppress(BrokenPipeError):  # the caller was killed; its user has seen the lease
        os.write(reporting, b".")
    os.close(reporting)


def _print(args: argparse.Namespace, hold: DeviceLease, variables: Mapping[str, str]) -> None:
    """Print the lease and the variables to set, and flush them."""
    if args.json:
        devices = [device.id for device in hold.devices]
        output.print_json("hold/1", {"lease": hold.id, "pid": os.getpid(), "devices": devices, "set": dict(variables)})
    elif args.export:
        output.print_document(exports(variables, _unset(hold)))
        output.say(f"{_describe(args, hold)} by lease {hold.id}; release with: anyaccel release {hold.id}")
    else:
        output.print_line(hold.id)
        output.say(f"{_describe(args, hold)}; set in your shell, and release in the end:")
        for name, value in sorted(variables.items()):
            output.say_verbatim(_export(name, value))
        output.say_verbatim(f"anyaccel release {hold.id}")


def _describe(args: argparse.Namespace, hold: DeviceLease) -> str:
    return f"{describe_devices(hold)} held" + (f" for {span(args.time)}" if args.time is not None else "")


def _unset(hold: DeviceLease) -> list[str]:
    return [name for name in hold.launch.environment.unset if name not in _COVERED]


def _export(name: str, value: str) -> str:
    """Return the shell line that sets a variable, or a message if a shell cannot express its value."""
    try:
        return f"export {name}={shell_quote(value)}"
    except UsageError as error:
        return f"# set {name} yourself: {error}"
