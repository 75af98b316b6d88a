"""Wait until jobs have ended; the exit status is that of the first that failed, in the order given."""

from __future__ import annotations

import argparse

from anyaccel.cli import output

from anyaccel_jobs.jobs import find, list_ids, wait
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
            if job.state in ("cancelled", "lost"):
                output.say(f"job {job.id} {'was cancelled' if job.state == 'cancelled' else 'is lost'}")
    # A job that is lost has no exit status; nor has it done what it should.
    return next((job.status or 1 for job in ended if job.state != "done"), 0)
