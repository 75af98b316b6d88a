"""Processes of ours that are forked: children, helpers that report, and those that outlive the terminal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from anyaccel.errors import AnyaccelError
from anyaccel.linux import process

JOB_NAME = "anyaccel-job"
"""Name, in lists of processes, of a process that supervises a command; the command is its only child."""


def fork_child(body: Callable[[], int]) -> int:
    """Run a function in a child of this process, and return its process id; no other code of the caller runs there.

    Args:
        body: Called there. Returns the exit status of the child; what it raises is told on standard error.

    Raises:
        OSError: When no process can be made.
    """
    child = os.fork()
    if not child:
        os._exit(_status(body))
    return child


def start_helper(body: Callable[[int], int]) -> tuple[int, int]:
    """Start a process that works for this one and dies with it, until it calls :func:`process.live_on`.

    Args:
        body: As of :func:`fork_child`, called with the descriptor to which it writes its report.

    Returns:
        Its process id, and the descriptor from which the report is read.

    Raises:
        OSError: When no process can be made.
    """
    parent = os.getpid()
    report, reporting = os.pipe()

    def run() -> int:
        os.close(report)
        process.die_with_parent(parent)
        return body(reporting)

    try:
        return fork_child(run), report
    except OSError:
        os.close(report)
        raise
    finally:
        os.close(reporting)


def start_detached(body: Callable[[int], int]) -> tuple[bytes, int]:
    """Start a helper in a session of its own, and wait until it reports something or has ended.

    Args:
        body: As of :func:`start_helper`.

    Returns:
        The report and 0; nothing and the exit status where it ended without one.

    Raises:
        OSError: When no process can be made.
    """

    def run(reporting: int) -> int:
        os.setsid()  # no terminal ends or stops it any more
        return body(reporting)

    child, report = start_helper(run)
    told = os.read(report, 64)
    os.close(report)
    return (told, 0) if told else (b"", process.reap(child))


def _status(body: Callable[[], int]) -> int:
    """The exit status of a child that does this; what it raises is told on standard error."""
    try:
        return body()
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
