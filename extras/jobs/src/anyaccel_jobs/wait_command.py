"""Wait until jobs have ended; the exit status is that of the first that failed, in the order given.

It is 124 for a job that its time limit has ended, whatever its command made of that.
"""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.launcher import time_limit

from anyaccel_jobs.jobs import Job, find, list_ids, wait
from anyaccel_jobs.jobs_command import describe

EXAMPLES = (
    ("anyaccel wait 3", "until it has ended, with its exit status"),
    ("anyaccel wait 3 4", "until both have"),
)


COMPLETERS = {"job": list_ids}
"""What a shell offers for an argument."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", nargs="+", metavar="ID", help="number of a job, as 'anyaccel jobs' shows it")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    found = [find(number) for number in dict.fromkeys(args.job)]
    ended = [wait(job) for job in found]
    if args.json:
        output.print_json("wait/1", {"jobs": [describe(job) for job in ended]})
    else:
        for job in ended:
            if how := _how(job):
                output.say(f"job {job.id} {how}")
    return next((_status(job) for job in ended if job.state != "done"), 0)


def _how(job: Job) -> str:
    """Say what its exit status does not tell of a job; empty for nothing."""
    if job.state == "timeout":
        return f"reached its time limit of {time_limit.format_limit(job.time_limit or 0)}"
    return {"cancelled": "was cancelled", "lost": "is lost"}.get(job.state, "")


def _status(job: Job) -> int:
    """The exit status for a job that has not ended well: one that is lost has none of its own."""
    return time_limit.STATUS if job.state == "timeout" else job.status or 1
