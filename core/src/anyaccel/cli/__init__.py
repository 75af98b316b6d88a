"""The command line: parsing and printing only, on top of the public interface."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of this process when None.

    Returns:
        The exit status: 0 when all is well, 2 when the request or an argument is wrong, 3 when the request can never
        fit on this machine, 4 when it is not free now, 126 and 127 as in the shell; ``run`` returns the command's own.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments in (["--version"], ["-V"]):
        from anyaccel._version import __version__

        print(f"anyaccel {__version__}")
        return 0
    from anyaccel.cli.parser import dispatch

    return dispatch(arguments)
