"""Waiting for what should happen soon, on a machine that does much else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 90.0
"""Seconds after which what should happen at once has not happened."""

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Wait for something to become true; what it returned."""
    deadline = time.monotonic() + seconds
    pause = 0.005
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(pause)
        pause = min(pause * 1.2, 0.1)  # to ask takes processor time, from what is waited for as well
    return found
