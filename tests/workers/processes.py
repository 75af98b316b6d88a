"""Processes as the kernel sees them, and patience."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from anyaccel.workers import client, tree
from anyaccel.workers.wire import NURSERY_VARIABLE

PATIENCE = 30.0
"""Seconds after which something that should happen at once has not happened."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something that should happen soon."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)
    return found


def left_of(marker: str | None = None) -> list[int]:
    """Living processes that a nursery has started, itself among them; of this process's nursery when None."""
    assert marker != "", "the caller did not come so far"
    value = marker or client.nursery().environ[NURSERY_VARIABLE]
    return [pid for pid, _ in tree.carriers(f"{NURSERY_VARIABLE}={value}")]


def gone(pid: int) -> bool:
    """Whether a process has left the kernel, or nearly so."""
    return tree.status_fields(pid)[:1] in ([], ["Z"], ["X"])
