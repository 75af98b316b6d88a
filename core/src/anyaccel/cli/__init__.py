"""The command line: it parses arguments and prints results, on top of the public interface."""

from __future__ import annotations

import os
import sys

from anyaccel._faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from anyaccel.cli.arguments import Parser as Parser
    from anyaccel.cli.cancel import cancel_by_id as cancel_by_id
    from anyaccel.cli.devices_table import DeviceRow as DeviceRow
    from anyaccel.cli.devices_table import lay_out as lay_out
    from anyaccel.cli.devices_table import megahertz as megahertz
    from anyaccel.cli.devices_table import memory_use as memory_use
    from anyaccel.cli.devices_table import since as since
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
    from anyaccel.cli.parser import parse as parse
    from anyaccel.cli.quantities import BareSeconds as BareSeconds
    from anyaccel.cli.quantities import add_grace as add_grace
    from anyaccel.cli.quantities import duration as duration
    from anyaccel.cli.quantities import moment as moment
    from anyaccel.cli.quantities import whole as whole
    from anyaccel.cli.run import acquire_devices as acquire_devices
    from anyaccel.cli.status import INTERVAL as INTERVAL
    from anyaccel.cli.status import add_looks as add_looks
    from anyaccel.cli.table import Column as Column
    from anyaccel.cli.table import print_table as print_table
    from anyaccel.cli.table import table_lines as table_lines
else:
    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "anyaccel.cli.arguments": ("Parser",),
            "anyaccel.cli.cancel": ("cancel_by_id",),
            "anyaccel.cli.devices_table": ("DeviceRow", "lay_out", "megahertz", "memory_use", "since"),
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
            "anyaccel.cli.parser": ("parse",),
            "anyaccel.cli.quantities": ("BareSeconds", "add_grace", "duration", "moment", "whole"),
            "anyaccel.cli.run": ("acquire_devices",),
            "anyaccel.cli.status": ("INTERVAL", "add_looks"),
            "anyaccel.cli.table": ("Column", "print_table", "table_lines"),
        },
    )
    __all__ += ["main", "output", "program", "sample"]

ALLOCATIONS = 50_000
"""Allocations between two runs of the garbage collector. Imported modules are never garbage; a run after each 700, the
default of Python, takes a tenth of the processor time of ``anyaccel`` on a machine of eight devices.
"""


def program() -> NoReturn:
    """Run the command line of this process, and end the process.

    The interpreter is not finalized unless threads, exit handlers, a tracer or a profiler depend on that: finalizing
    takes a fifth of the time of an interpreter's start.
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
    ours = int(client is not None)  # its exit handler, which was called just now
    threading = sys.modules.get("threading")
    alone = threading is None or threading.active_count() == 1
    watched = sys.gettrace() or sys.getprofile() or sys.flags.inspect
    if alone and not watched and atexit._ncallbacks() == ours and _flush():  # noqa: SLF001 - atexit has no public count
        os._exit(status)
    sys.exit(status)


def _flush() -> bool:
    """Flush the standard streams. Returns False on failure: the usual exit then reports the error."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return False
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments after the program's name; None for those of this process.

    Returns:
        The exit status: see :data:`anyaccel.cli.help.EXIT_STATUSES`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments in (["--version"], ["-V"]) and sys.stdout is not None:
        from anyaccel._version import __version__

        # Before any import, and unbuffered. If this fails, the usual path below prints it or reports the error.
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
