"""List the jobs that 'anyaccel run --detach' and 'sweep --detach' started: those that live or ended within a day."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyaccel
from anyaccel.cli import Column, output, print_table
from anyaccel.errors import AnyaccelError
from anyaccel.model import format_slots
from anyaccel.text import elapsed

from anyaccel_jobs import supervisor
from anyaccel_jobs.jobs import Job, jobs
from anyaccel_jobs.supervisor import Supervisor

_RECENT_SECONDS = 86400.0
_COLUMNS = (
    Column(heading="JOB", turn=0),
    Column(heading="STATE", turn=1),
    Column(heading="REQUEST", turn=4, least=8),
    Column(heading="DEVICES", turn=5, least=8),
    Column(heading="STARTED", turn=6),
    Column(heading="TOOK", turn=7),
    Column(heading="EXIT", turn=3),
    Column(heading="COMMAND", turn=2, least=16),
)


EXAMPLES = (
    ("anyaccel jobs", "those that wait or run, and those that ended lately"),
    ("anyaccel jobs --json", "the same for programs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--all", action="store_true", help="also those that ended more than a day ago")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    since = 0.0 if args.all else time.time() - _RECENT_SECONDS
    found = [job for job in jobs() if job.live or (job.ended or job.started or job.created) >= since]
    if args.json:
        output.print_json("jobs/1", {"jobs": [describe(job) for job in found]})
    elif found:
        print_table(_COLUMNS, [_row(job) for job in found])
    else:
        output.print_line(
            "No jobs." if args.all else "No jobs of the last day; 'anyaccel jobs --all' lists older ones."
        )
    return 0


def describe(job: Job) -> dict[str, Any]:
    """Return a job as JSON."""
    times = {
        name: None if moment is None else output.moment(moment)
        for name, moment in (("created", job.created), ("started", job.started), ("ended", job.ended))
    }
    took = job.took
    return {
        "job": job.id,
        **output.take_fields(job, "state", "request", "note", "command"),
        "directory": job.directory,
        **output.take_fields(job, "devices", "lease"),
        **times,
        "took_seconds": None if took is None else round(took, 3),
        "exit_status": job.status,
        "time_limit_seconds": job.time_limit,
        "pid": job.pid if job.live and job.here else None,
        "host": job.host,
        "log": job.log,
    }


def detach(args: argparse.Namespace, command: Sequence[str], body: Callable[[Supervisor], int]) -> int:
    """Start a job, and print its number.

    Args:
        args: The arguments; their request and note are recorded.
        command: The command to record.
        body: Called in the job's process, with its supervisor; returns its exit status.
    """

    def tell(error: AnyaccelError, begun: bool) -> None:
        output.report_error(error, as_json=args.json and not begun)

    request = str(anyaccel.parse_request(args.request))
    job, status = supervisor.detach(body, tell, request=request, command=command, note=args.note)
    if job is None:
        return status
    if args.json:
        output.print_json("job/1", describe(job))
        return status
    output.print_line(job.id)
    if job.state == "waiting":
        how = "waits for its devices"
    else:
        how = f"runs with {', '.join(job.devices)}" if job.devices else "runs"
    output.say_folded(f"job {job.id} {how}; see 'anyaccel logs -f {job.id}', end it with 'anyaccel cancel {job.id}'")
    return status


def _row(job: Job) -> tuple[str, ...]:
    took = job.took
    return (
        job.id,
        job.state if job.here else f"{job.state} on {job.host}",
        job.request or "-",
        written_devices(job.devices),
        output.clock(job.started),
        "-" if took is None else elapsed(took),
        "-" if job.status is None else str(job.status),
        written_job(job),
    )


def written_devices(names: tuple[str, ...]) -> str:
    """Format devices as a request names them: ``acme/0-3,6``; ``-`` for none."""
    by_vendor: dict[str, list[int]] = {}
    for name in names:
        vendor, _, index = name.rpartition("/")
        if not vendor or not index.isdecimal():
            return ",".join(names) or "-"
        by_vendor.setdefault(vendor, []).append(int(index))
    return " ".join(f"{vendor}/{format_slots(numbers)}" for vendor, numbers in by_vendor.items()) or "-"


def written_job(job: Job) -> str:
    """Format the note and the command of a job."""
    return f"[{job.note}] " * bool(job.note) + (shlex.join(job.command) or "-")
