"""Signals to what was started with devices: to a process group, and to all processes that carry a mark."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial

from anyaccel.ledger import mark as marks
from anyaccel.ledger import process
from anyaccel.ledger.mark import Mark

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


def signal_carriers(
    wanted: Iterable[Mark], number: signal.Signals | None, *, spare: Callable[[int], bool] = lambda _: False
) -> set[int] | None:
    """Send a signal to all living processes that carry one of some marks, but not to this one.

    Args:
        wanted: The marks; empty ones are carried by nobody.
        number: The signal; None to look only.
        spare: Whether a process is left alone, such as one that has got the signal already.

    Returns:
        The processes that there are, those left alone among them; None when processes start faster than it can look.
    """
    found = marks.carriers({mark for mark in wanted if mark})
    if found is None:
        return None
    left = set()
    for mark, pids in found.items():
        for pid in pids:
            if pid == os.getpid():
                continue
            left.add(pid)
            with contextlib.suppress(ProcessLookupError):  # it has gone when it is asked about
                if number is not None and not spare(pid):
                    process.send(pid, number, partial(marks.carries, pid, mark))
    return left


def reap(child: int) -> int:
    """Wait for a child; its exit status as a shell has it: 128 and the number of the signal that ended it."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status
