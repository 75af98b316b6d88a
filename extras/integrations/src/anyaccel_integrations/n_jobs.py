"""Count how many calls of a framework run at the same time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from anyaccel import detect
from anyaccel.errors import UsageError
from anyaccel.launcher import count_capacity
from anyaccel.scheduler import RequestLike, parse_request


def count_jobs(n_jobs: object, needs: RequestLike | None, options: Mapping[str, Any]) -> int:
    """Compute how many calls run at the same time.

    Args:
        n_jobs: The number that the caller asks for: None or -1 for as many as the devices allow, -2 for one less, and
            so on.
        needs: The request of each call; None for a processor.
        options: Options of the pool, of which ``machine``, ``declare`` and ``engine`` are read.

    Returns:
        At least 1, and no more than the devices allow.

    Raises:
        UsageError: If ``n_jobs`` is not a whole number other than 0, or is negative with an engine of several machines.
        UnknownNameError, NeverFitsError: If the machine can serve no such call.
    """
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int | None) or n_jobs == 0:
        raise UsageError(f"n_jobs must be a whole number other than 0, -1 for as many as fit (got {n_jobs!r:.60})")
    if options.get("engine", "local") != "local":
        if n_jobs is None or n_jobs < 0:
            raise UsageError("an engine on several machines needs a number of its own: n_jobs=8, for example")
        return n_jobs
    if needs is None:
        most = len(os.sched_getaffinity(0))
    else:
        request = parse_request(needs)
        most = count_capacity(detect(options.get("machine"), declare=options.get("declare")), request)
    wanted = most if n_jobs is None else n_jobs if n_jobs > 0 else most + 1 + n_jobs
    return max(1, min(wanted, most))
