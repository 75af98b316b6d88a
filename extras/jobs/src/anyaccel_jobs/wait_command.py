"""Wait until jobs have ended; the exit status is that of the first failed job, in the order given.

For a job that its time limit ended it is 124, whatever its command returned.
"""

from __future__ import annotations

import argparse

from anyaccel.cli import output
from anyaccel.launcher import time_limit
from anyaccel.text import span

from anyaccel_jobs.jobs import Job, find, list_ids, wait
from anyaccel_jobs.jobs_command import describe

EXAMPLES = (
    ("anyaccel wait 3", "until it has ended, with its exit status"),
    ("anyaccel wait 3 4", "until both have"),
)


COMPLETERS = {"job": list_ids}
"""Completers of arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", nargs="+", metavar="ID", help="number of a job, as 'anyaccel jobs' shows it")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    # All numbers are checked before the first wait.
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
    """Describe an end without a telling exit status; empty for other ends."""
    if job.state == "timeout":
        return f"reached its time limit of {span(job.time_limit or 0)}"
    return {"cancelled": "was cancelled", "lost": f"is lost: {job.reason}"}.get(job.state, "")


def _status(job: Job) -> int:
    """Return the exit status for a failed job; a lost job has no status, and counts as 1."""
    return time_limit.STATUS if job.state == "timeout" else job.status or 1
