"""The command line: parsing and printing only, on top of the public interface."""

from __future__ import annotations

import os
import sys

from anyaccel._faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from anyaccel.cli.cancel import cancel_by_id as cancel_by_id
    from anyaccel.cli.devices_table import DeviceRow as DeviceRow
    from anyaccel.cli.devices_table import laid_out as laid_out
    from anyaccel.cli.devices_table import megahertz as megahertz
    from anyaccel.cli.devices_table import since as since
    from anyaccel.cli.devices_table import used_of as used_of
    from anyaccel.cli.options import add_command as add_command
    from anyaccel.cli.options import add_launch as add_launch
    from anyaccel.cli.options import add_request as add_request
    from anyaccel.cli.options import add_signal as add_signal
    from anyaccel.cli.options import add_start as add_start
    from anyaccel.cli.options import add_time as add_time
    from anyaccel.cli.options import add_wait as add_wait
    from anyaccel.cli.options import machine_options as machine_options
    from anyaccel.cli.options import start_options as start_options
    from anyaccel.cli.options import survey as survey
    from anyaccel.cli.options import time_limit as time_limit
    from anyaccel.cli.options import wait_options as wait_options
    from anyaccel.cli.quantities import add_grace as add_grace
    from anyaccel.cli.quantities import duration as duration
    from anyaccel.cli.quantities import whole as whole
    from anyaccel.cli.run import acquire_devices as acquire_devices
    from anyaccel.cli.run import become_command as become_command
    from anyaccel.cli.status import INTERVAL as INTERVAL
    from anyaccel.cli.status import add_looks as add_looks
else:
    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "anyaccel.cli.cancel": ("cancel_by_id",),
            "anyaccel.cli.devices_table": ("DeviceRow", "laid_out", "megahertz", "since", "used_of"),
            "anyaccel.cli.options": (
                "add_command",
                "add_launch",
                "add_request",
                "add_signal",
                "add_start",
                "add_time",
                "add_wait",
                "machine_options",
                "start_options",
                "survey",
                "time_limit",
                "wait_options",
            ),
            "anyaccel.cli.quantities": ("add_grace", "duration", "whole"),
            "anyaccel.cli.run": ("acquire_devices", "become_command"),
            "anyaccel.cli.status": ("INTERVAL", "add_looks"),
        },
    )
    __all__ += ["main", "output", "program", "sample"]

VERSION = (["--version"], ["-V"])
"""Arguments that ask for the version, and stand alone."""
ALLOCATIONS = 50_000
"""Objects after which the garbage collector looks for garbage. What a command imports is none, and after each 700
objects, as is usual, the collector would write to the memory that the command shares with its fork server, which the
kernel copies then: a quarter of the processor time of ``anyaccel`` on a machine of eight devices."""


def program() -> NoReturn:
    """Run the command that this process was started for, and end the process.

    Nothing is taken apart before the end where nobody has asked for that, neither a thread that runs nor a function
    that is to be called at exit: it takes as long as a fifth of an interpreter's start.
    """
    import gc

    from anyaccel.forkserver.start import allow_fork

    gc.set_threshold(ALLOCATIONS)
    allow_fork()
    status = main()
    import atexit

    client = sys.modules.get("anyaccel.forkserver.client")
    if client:
        client.close_all(client.ForkServer, seconds=0.0)
    ours = int(client is not None)  # its one function that is to be called at exit
    threading = sys.modules.get("threading")
    alone = threading is None or threading.active_count() == 1
    watched = sys.gettrace() or sys.getprofile() or sys.flags.inspect
    if alone and not watched and atexit._ncallbacks() == ours and _flush():  # noqa: SLF001 - there is no other way to know
        os._exit(status)
    sys.exit(status)


def _flush() -> bool:
    """Whether all that was printed has been written; what is left is tried again, and told, at a usual exit."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return False
    return True


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
        try:
            os.write(sys.stdout.fileno(), f"anyaccel {__version__}\n".encode())
        except OSError:
            pass
        else:
            return 0
    if "_ARGCOMPLETE" in os.environ:
        from anyaccel.cli._completer import complete

        complete()
    from anyaccel.cli import output
    from anyaccel.cli.parser import dispatch

    output.prepare_streams()

    return dispatch(arguments)
