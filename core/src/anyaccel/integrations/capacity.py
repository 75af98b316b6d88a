"""How many calls of a framework run at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from anyaccel.errors import UsageError
from anyaccel.inventory.detect import detect
from anyaccel.launcher.capacity import count_capacity
from anyaccel.scheduler import RequestLike, parse_request


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
    if options.get("engine", "local") != "local":
        if n_jobs is None or n_jobs < 0:
            raise UsageError("n_jobs must be said with an engine whose machines come and go: n_jobs=8, for example")
        return n_jobs
    if needs is None:
        most = len(os.sched_getaffinity(0))
    else:
        request = parse_request(needs)
        most = count_capacity(detect(options.get("machine"), declare=options.get("declare")), request)
    wanted = most if n_jobs is None else n_jobs if n_jobs > 0 else most + 1 + n_jobs
    return max(1, min(wanted, most))
