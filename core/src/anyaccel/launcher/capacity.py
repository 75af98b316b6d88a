"""How many of a request a machine can serve at the same time."""

from __future__ import annotations

import os

from anyaccel.errors import NotFreeError
from anyaccel.launcher.choosing import local_scheduler
from anyaccel.model import Inventory, Request

MOST = 1024
"""More is not counted: nobody wants more processes."""


def count_capacity(inventory: Inventory, request: Request, most: int = MOST) -> int:
    """Count how many of a request fit a machine at once when nobody holds anything.

    Args:
        inventory: The machine.
        request: The request.
        most: More is not counted.

    Returns:
        At least 1; the processors that this process may use for a request that falls back to the CPU.

    Raises:
        UnknownNameError, NeverFitsError: When not even one fits.
    """
    scheduler = local_scheduler(inventory)
    most = max(1, min(most, MOST))
    for count in range(most):
        try:
            if scheduler.allocate(request).cpu:
                return min(most, len(os.sched_getaffinity(0)))
        except NotFreeError:
            return count
    return most
