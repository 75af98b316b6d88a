"""Submit jobs again: anyaccel redo 3 runs the command of job 3, with its options, in its directory."""

from __future__ import annotations

import argparse
import os

from anyaccel.cli import main as run_command_line
from anyaccel.errors import AnyaccelError

from anyaccel_jobs.jobs import find, list_ids

EXAMPLES = (
    ("anyaccel redo 3", "the command of job 3 once more, as a new job"),
    ("anyaccel redo 3 4", "those of two jobs"),
)
COMPLETERS = {"job": list_ids}
"""Completers of arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("job", nargs="+", metavar="ID", help="number of a job, as 'anyaccel jobs --all' shows it")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    # All numbers are checked before the first job is submitted.
    found = [find(number) for number in dict.fromkeys(args.job)]
    for job in found:
        try:
            os.chdir(job.directory)
        except OSError as error:
            raise AnyaccelError(
                f"the directory {job.directory!r} of job {job.id} cannot be entered: {error.strerror}",
                hint="make it again, or submit the command in another one",
            ) from error
        if status := run_command_line([*job.arguments[:1], *["--json"] * args.json, *job.arguments[1:]]):
            return status
    return 0
