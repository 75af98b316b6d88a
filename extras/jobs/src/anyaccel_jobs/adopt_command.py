"""Hold the devices that a running process of yours has open, until it ends: anyaccel adopt PID."""

from __future__ import annotations

import argparse
import contextlib
import select

from anyaccel.cli import acquire, add_note, go_on_alone, output, report_errors, survey, whole
from anyaccel.launcher import start_detached

from anyaccel_jobs.adopted import AdoptedProcess

_LARGEST_PID = 1 << 22
_NAME = "anyaccel-adopt"
"""Process name of the holder of the lease."""

EXAMPLES = (
    ("anyaccel adopt 4711", "a training that was started without anyaccel"),
    ("anyaccel adopt 4711 --note evaluation", "with a note for other users"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("pid", metavar="PID", type=whole(1, _LARGEST_PID), help="the process; it must be your own")
    add_note(parser)
    # It has the devices already, so there is nothing to wait for, and no rule may take one away.
    parser.set_defaults(wait=None, no_wait=True, priority=0, avoid_busy=False, time=None)


def main(args: argparse.Namespace) -> int:
    """Run the command.

    A child acquires the devices, prints the lease and keeps it open; until then it dies with this process.
    """
    _, status = start_detached(lambda report: report_errors(lambda: _adopt(args, report), as_json=args.json))
    return status


def _adopt(args: argparse.Namespace, reporting: int) -> int:
    """Acquire the devices of the process, print the lease, and keep it until the process has ended."""
    adopted = AdoptedProcess(args.pid)
    args.request = [device.name for device in adopted.find_devices(survey(args))]
    args.note = args.note or f"adopted process {adopted.pid}, {adopted.name}"
    with acquire(args, {}, program=adopted.name) as lease:
        if args.json:
            output.print_json(
                "adopt/1", {"lease": lease.id, "pid": adopted.pid, "devices": [device.id for device in lease.devices]}
            )
        else:
            output.print_line(lease.id)
            names = output.device_names(device.name for device in lease.devices)
            output.say(f"{names} held until process {adopted.pid} ({adopted.name}) ends")
        go_on_alone(lease, _NAME, reporting)
        ended = select.poll()
        ended.register(adopted.pidfd, select.POLLIN)
        with contextlib.suppress(KeyboardInterrupt):
            ended.poll()
    return 0
