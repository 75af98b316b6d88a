"""Print the output of a job: anyaccel logs 3, or logs -f 3 until it ends."""

from __future__ import annotations

import argparse
import os
import stat

from anyaccel.cli import output
from anyaccel.errors import AnyaccelError, UsageError

from anyaccel_jobs.jobs import find, list_ids, wait

_LOOK_SECONDS = 0.2
_CHUNK = 1 << 16


EXAMPLES = (
    ("anyaccel logs 3", "what a job has printed"),
    ("anyaccel logs 3 --follow", "and what it prints from now on"),
)


COMPLETERS = {"job": list_ids}
"""Completers of arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", metavar="ID", help="number of a job, as 'anyaccel jobs' shows it")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    job = find(args.job)
    if args.json:
        if args.follow:
            raise UsageError("--json and --follow exclude each other: a document has an end")
        output.print_json("logs/1", {"job": job.id, "state": job.state, "log": job.log})
        return 0
    try:
        # The command may have replaced the log: a link is not followed, and a FIFO would be waited for.
        log = os.open(job.log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise AnyaccelError(f"the log of job {job.id} cannot be read: {job.log}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(log).st_mode):
        os.close(log)
        raise AnyaccelError(f"the log of job {job.id} is no regular file: {job.log}", hint="remove what has its name")
    with open(log, "rb", buffering=0) as file:
        while True:
            live = args.follow and wait(job, timeout=_LOOK_SECONDS).live  # asked before: no last word is missed
            while data := file.read(_CHUNK):
                output.print_raw(data)  # unchanged: it is of this user's command
            if not live:
                return 0
