"""Processes that outlive the terminal and the shell that started them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from anyaccel.errors import AnyaccelError
from anyaccel.linux import process

JOB_NAME = "anyaccel-job"
"""Name, in lists of processes, of a process that supervises a command; the command is its only child."""


def start_detached(body: Callable[[int], int]) -> tuple[bytes, int]:
    """Run a function in a process of its own, in a session of its own, until it reports something or has ended.

    The process dies with this one, until it calls :func:`anyaccel.linux.process.live_on`.

    Args:
        body: Called there, with the descriptor to which it writes its report; returns an exit status.

    Returns:
        The report and 0; nothing and the exit status where it ended without one.
    """
    parent = os.getpid()
    report, reporting = os.pipe()

    def run() -> int:
        os.close(report)
        process.die_with_parent(parent)
        os.setsid()  # no terminal ends or stops it any more
        return body(reporting)

    child = os.fork()
    if not child:
        os._exit(exit_status_of(run))
    os.close(reporting)
    told = os.read(report, 64)
    os.close(report)
    if told:
        return told, 0
    return b"", process.reap(child)


def exit_status_of(function: Callable[[], int]) -> int:
    """Call what a child is for; the exit status where that returns or raises, which is told on standard error."""
    try:
        return function()
    except KeyboardInterrupt:
        return 130
    except AnyaccelError as error:
        told = "".join(f"anyaccel: {line}\n" for line in (str(error), *error.hint.splitlines()))
        status = error.exit_code
    except BaseException:  # noqa: BLE001 - it must not go on as a second caller
        import traceback

        told, status = traceback.format_exc(), 1
    with contextlib.suppress(OSError):
        os.write(2, told.encode(errors="replace"))
    return status
