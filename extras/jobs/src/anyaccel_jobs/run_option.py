"""``anyaccel run --detach``: run a command as a job."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from anyaccel_jobs.supervisor import Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the option."""
    parser.add_argument(
        "--detach",
        action="store_true",
        help="wait and run without this terminal, and print the number of the job: see 'anyaccel jobs'",
    )


def main(args: argparse.Namespace) -> int | None:
    """Run the command as a job, and print its number; return None without ``--detach``.

    Raises:
        UsageError: When there is no command.
        CommandNotFoundError: When the command does not exist.
        CommandNotRunnableError: When the command cannot be run.
    """
    if not args.detach:
        return None
    from anyaccel.errors import UsageError
    from anyaccel.launcher import check_program, make_start_error

    from anyaccel_jobs.jobs_command import detach

    if not args.command:
        raise UsageError("a command to run must follow '--', as in: anyaccel run --detach GPU:1 -- python train.py")
    try:
        check_program(args.command[0])
    except OSError as error:
        raise make_start_error(args.command[0], error) from error
    return detach(args, args.command, lambda supervisor: _supervise(args, supervisor))


def _supervise(args: argparse.Namespace, supervisor: Supervisor) -> int:
    """Wait for the devices, run the command, and record its states."""
    from anyaccel.cli import acquire_devices, become_command, time_limit
    from anyaccel.vendors import close

    with acquire_devices(args, waits=lambda: supervisor.record("waiting", grace=args.grace), stays=True) as hold:
        limit = time_limit(args, hold)
        supervisor.record(
            "running", devices=tuple(device.name for device in hold.devices), lease=hold.id, grace=args.grace,
            time_limit=None if limit is None else limit.seconds,
        )  # fmt: skip
        close()
        mark = hold.lease.mark if hold.lease else ()
        status, state = supervisor.supervise(lambda: become_command(args, hold), mark, limit)
        supervisor.finish(status, state=state)
        hold.finish_entry(status, timed_out=state == "timeout")
        hold.remove_group()
        os._exit(status)  # the devices go with this process, or with the last one that the command has left behind
