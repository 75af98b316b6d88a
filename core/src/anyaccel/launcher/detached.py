"""Fork processes of this package: children, reporting helpers, and processes without a terminal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from anyaccel.errors import AnyaccelError
from anyaccel.linux import process

JOB_NAME = "anyaccel-job"
"""Process name of the supervisor of a detached command; the command is its only child."""


def fork_child(body: Callable[[], int]) -> int:
    """Run a function in a forked child, and return the child's process id at once; the caller reaps the child.

    No other code of the caller runs there, exit handlers included.

    Args:
        body: The function; returns the exit status of the child. The child prints an exception on standard error.

    Raises:
        OSError: If no process can be made.
    """
    child = os.fork()
    if not child:
        os._exit(_run(body))
    return child


def start_helper(body: Callable[[int], int]) -> tuple[int, int]:
    """Start a child that the kernel kills with the calling thread, until the child calls :func:`process.live_on`.

    The caller reaps the child, and closes the descriptor.

    Args:
        body: As for :func:`fork_child`; called with the descriptor for a report.

    Returns:
        The process id, and the descriptor from which to read the report.

    Raises:
        OSError: If no process can be made, or no descriptor is free.
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
    """Start a helper in a new session, and wait for the report or the exit.

    A helper that has reported runs on, and is not reaped; without :func:`process.live_on`, the kernel kills the helper
    with the calling thread.

    Args:
        body: As for :func:`start_helper`; a report is one write of 64 bytes at most.

    Returns:
        The report and 0; if the helper exited without a report, nothing and the exit status: 128 plus the number of a
        signal that killed the helper.

    Raises:
        OSError: If no process can be made, or no descriptor is free.
    """

    def run(reporting: int) -> int:
        os.setsid()  # so that no terminal ends or stops the helper
        return body(reporting)

    child, report = start_helper(run)
    told = os.read(report, 64)  # returns at once if the helper dies: its end of the pipe is closed then
    os.close(report)
    return (told, 0) if told else (b"", process.reap(child))


def _run(body: Callable[[], int]) -> int:
    """Call the function of a child, and return the exit status; print an exception on standard error.

    Returns:
        The result of the function; 130 after an interrupt, without a message; the error's own status after an
        AnyaccelError; 1 after any other exception, SystemExit included, with the traceback as message.
    """
    try:
        return body()
    except KeyboardInterrupt:
        return 130
    except AnyaccelError as error:
        told = "".join(f"anyaccel: {line}\n" for line in (str(error), *error.hint.splitlines()))
        status = error.exit_code
    except BaseException:  # noqa: BLE001 - the child must not go on as a second copy of the caller
        import traceback

        told, status = traceback.format_exc(), 1
    with contextlib.suppress(OSError):
        os.write(2, told.encode(errors="replace"))
    return status
