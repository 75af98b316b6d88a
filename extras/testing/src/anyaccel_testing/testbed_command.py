"""Run a vendor's own software on the machine of a recording, with the recorded files in /sys, /dev and elsewhere.

Nothing changes on this host: the files lie in a mount namespace of the command, for which root or a user namespace is
needed. An installed tool runs unchanged; in place of a missing tool, a script prints the recorded output.
"""

from __future__ import annotations

import argparse
import os

from anyaccel.cli import output
from anyaccel.errors import UsageError

EXAMPLES = (
    ("anyaccel testbed recordings/two-devices -- anyaccel", "what detection finds live"),
    ("anyaccel testbed recordings/two-devices -- acme-smi", "what the vendor's own tool finds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("recording", metavar="RECORDING", help="directory that 'anyaccel record' wrote")
    parser.add_argument("cmd", nargs="*", default=[], metavar="-- CMD", help="the command to run, and its arguments")


def main(args: argparse.Namespace) -> int:
    """Run the command in place of this process."""
    from anyaccel.launcher import become

    from anyaccel_testing.machines import load_recording
    from anyaccel_testing.testbed import enter_testbed

    if not args.command:
        raise UsageError("'anyaccel testbed' needs a command behind '--', such as: -- anyaccel")
    for gap in enter_testbed(load_recording(args.recording)):
        output.say(gap)
    # The command shall detect live: a machine that was chosen for this shell would be replayed instead.
    environ = {name: text for name, text in os.environ.items() if name != "ANYACCEL_MACHINE"}
    become(args.command, environ)
