"""Options of ``anyaccel run``: ``--ranks`` and ``--port`` for commands of several processes, ``--detach`` for a job."""

from __future__ import annotations

import os

from anyaccel.model import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from anyaccel.launcher import DeviceLease

    from anyaccel_jobs.supervisor import Supervisor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    ranks = parser.add_argument_group("several processes").add_mutually_exclusive_group()
    ranks.add_argument(
        "--ranks",
        action="store_true",
        help="run the command once for each device, with RANK, WORLD_SIZE and MASTER_PORT",
    )
    ranks.add_argument(
        "--port",
        action="store_true",
        help="set MASTER_ADDR and MASTER_PORT for a command that starts its own ranks",
    )
    add_job_options(parser)


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--detach`` and its further options."""
    group = parser.add_argument_group("jobs")
    group.add_argument(
        "--detach", action="store_true", help="wait and run without this terminal, as a job: see 'anyaccel jobs'"
    )
    group.add_argument("--after", metavar="JOB", action="append", default=[], help="start after the end of a job")
    group.add_argument(
        "--after-ok",
        metavar="JOB",
        action="append",
        default=[],
        help="start after the success of a job; cancelled if it fails",
    )
    group.add_argument(
        "--begin",
        metavar="TIME",
        type=_read_begin,
        help="start at a time: 18:00, 2026-11-30T18:00, or 2h from now",
    )
    group.add_argument(
        "--notify",
        metavar="COMMAND",
        default="",
        help="run COMMAND in a shell at the job's end, however it ended, with ANYACCEL_JOB_STATE and more set",
    )


def _read_begin(text: str) -> float:
    from anyaccel_jobs.moments import moment  # late: few jobs begin at a time

    return moment(ahead=True)(text)


def check_job_options(args: argparse.Namespace) -> None:
    """Check the options of a job.

    Raises:
        UsageError: When they are given without ``--detach``.
        JobNotFoundError: When a job of theirs does not exist.
        DependencyError: When a job that has to succeed has ended without success.
    """
    from anyaccel.errors import UsageError

    given = [name for name in ("after", "after_ok", "begin", "notify") if getattr(args, name)]
    if given and not args.detach:
        raise UsageError(f"--{given[0].replace('_', '-')} belongs to --detach", hint="add --detach")
    if args.after or args.after_ok:
        from anyaccel_jobs.jobs import check_here, check_success, find

        # What can never be met is refused now, not by a job hours later.
        for number in (*args.after, *args.after_ok):
            check_here(find(number))
        for number in args.after_ok:
            if not (job := find(number)).live:
                check_success(job)


def main(args: argparse.Namespace) -> int | None:
    """Run the command as ranks, with a port, or as a job, whose number is printed; return None without such an option.

    Raises:
        UsageError: When there is no command, or an option of a job without ``--detach``.
        JobNotFoundError: When there is no job to start after.
        CommandNotFoundError: When the command does not exist.
        CommandNotRunnableError: When the command cannot be run.
    """
    check_job_options(args)
    given = [name for name in ("detach", "ranks", "port") if getattr(args, name)]
    if not given:
        return None
    if not args.command:
        from anyaccel.errors import UsageError

        example = f"anyaccel run --{given[0]} GPU:1 -- python train.py"
        raise UsageError(f"a command to run must follow '--', as in: {example}")
    if not args.detach:
        from anyaccel.cli import acquire_devices

        return _start(args, acquire_devices(args))
    from anyaccel_jobs.jobs_command import detach

    return detach(args, args.command, lambda supervisor: _supervise(args, supervisor))


def _start(args: argparse.Namespace, hold: DeviceLease) -> int:
    """Replace this process by the command, or run the ranks of the command and return their exit status."""
    if hold.lease:
        hold.lease.inherit()  # from here on the command and its children carry the lease
    launch = hold.launch
    if args.ranks or args.port:
        from anyaccel.launcher import Rendezvous

        rendezvous = Rendezvous()
        if args.ranks:
            from anyaccel.cli import time_limit

            from anyaccel_jobs.ranks import run_ranks

            return run_ranks(launch, args.command, rendezvous, grace=args.grace, limit=time_limit(args, hold))
        rendezvous.inherit()  # the port stays reserved until the command has it
        # The default of torchrun's --nproc-per-node, by its own variable.
        variables = rendezvous.variables | {"PET_NPROC_PER_NODE": str(max(1, len(hold.devices)))}
        launch = replace(launch, environment=launch.environment.with_variables(variables))
    return launch.become(args.command)


def _supervise(args: argparse.Namespace, supervisor: Supervisor) -> int:
    """Wait for the devices, run the command, and record its states."""
    from anyaccel.cli import acquire_devices, time_limit
    from anyaccel.vendors import close

    supervisor.hold_back(args.grace)
    with acquire_devices(args, waits=lambda: supervisor.record("waiting", grace=args.grace), stays=True) as hold:
        limit = time_limit(args, hold)
        supervisor.record(
            "running", devices=tuple(device.name for device in hold.devices), lease=hold.id, grace=args.grace,
            time_limit=None if limit is None else limit.seconds,
        )  # fmt: skip
        close()
        mark = hold.mark
        status, state = supervisor.supervise(lambda: _start(args, hold), mark, limit)
        supervisor.finish(status, state=state)
        hold.finish_entry(status, timed_out=state == "timeout")
        hold.remove_group()
        os._exit(status)  # the devices go with this process, or with the last one that the command has left behind
