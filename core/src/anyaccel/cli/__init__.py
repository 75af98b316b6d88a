"""The command line: parsing and printing only, on top of the public interface."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

VERSION = (["--version"], ["-V"])
"""Arguments that ask for the version, and stand alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of this process when None.

    Returns:
        The exit status: 0 when all is well, 2 when the request or an argument is wrong, 3 when the request can never
        fit on this machine, 4 when it is not free now, 126 and 127 as in the shell; ``run`` returns the command's own.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments in VERSION and sys.stdout is not None:
        from anyaccel._version import __version__

        # Without the imports of all other commands, and unbuffered: what fails here is tried, and told, below.
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), f"anyaccel {__version__}\n".encode())
            return 0
    from anyaccel.cli import output
    from anyaccel.cli.parser import dispatch

    output.prepare_streams()

    return dispatch(arguments)
