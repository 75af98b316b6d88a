"""How many calls a machine can serve at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from anyaccel.errors import NotFreeError, UsageError
from anyaccel.inventory.detect import detect
from anyaccel.launcher.launch import local_scheduler
from anyaccel.model import Request
from anyaccel.probe.machine import Machine
from anyaccel.scheduler import RequestLike, parse_request

MOST = 1024
"""More is not counted: nobody wants more processes."""


def capacity(
    needs: Request | None, machine: str | Machine | None = None, declare: Mapping[str, int] | None = None
) -> int:
    """Count the calls with certain needs that a machine can serve at once when nobody else is on it.

    Args:
        needs: What each holds; None for the CPU alone.
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name.

    Raises:
        UnknownNameError, NeverFitsError: When it can serve none.
    """
    processors = len(os.sched_getaffinity(0))
    if needs is None:
        return processors
    scheduler = local_scheduler(detect(machine, declare=declare))
    if scheduler.allocate(needs).cpu:
        return processors
    count = 1
    while count < MOST:
        try:
            scheduler.allocate(needs)
        except NotFreeError:
            break
        count += 1
    return count


def count_jobs(n_jobs: object, needs: RequestLike | None, options: Mapping[str, Any]) -> int:
    """Decide how many calls run at the same time.

    Args:
        n_jobs: How many are wanted: None or -1 for as many as the devices allow, -2 for one less, and so on.
        needs: What each holds.
        options: Those of the pool, of which ``machine``, ``declare`` and ``engine`` count.

    Returns:
        At least 1, and no more than the devices allow.

    Raises:
        UsageError: When ``n_jobs`` makes no sense, or cannot be known.
        UnknownNameError, NeverFitsError: When the machine can serve none.
    """
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int | None) or n_jobs == 0:
        raise UsageError(f"n_jobs must be a whole number other than 0, -1 for as many as fit (got {n_jobs!r:.60})")
    request = None if needs is None else parse_request(needs)
    if options.get("engine", "local") != "local":
        if n_jobs is None or n_jobs < 0:
            raise UsageError("n_jobs must be said with an engine whose machines come and go: n_jobs=8, for example")
        return n_jobs
    most = capacity(request, options.get("machine"), options.get("declare"))
    wanted = most if n_jobs is None else n_jobs if n_jobs > 0 else most + 1 + n_jobs
    return max(1, min(wanted, most))
