"""Signals to the process group of what was started with devices; what carries a mark is ended by a teardown."""

from __future__ import annotations

import contextlib
import os
import signal

GRACE_SECONDS = 10.0
"""Time between asking processes to end (SIGTERM) and killing them, where nobody says how long."""


def signal_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if there is one.

    Args:
        leader: Its leader, a child that is not reaped yet: until then nobody else has the number.
        number: The signal.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
        if number == signal.SIGTERM:
            os.killpg(leader, signal.SIGCONT)  # a stopped process hears only once it goes on


def reap(child: int) -> int:
    """Wait for a child; its exit status as a shell has it: 128 and the number of the signal that ended it."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status
