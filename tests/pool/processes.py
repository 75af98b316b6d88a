"""Processes as the kernel sees them, and patience."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from anyaccel.pool import proc

PATIENCE = 60.0
"""Seconds after which something that should happen at once has not happened."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something that should happen soon."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)
    return found


def left_of(variable: str) -> list[int]:
    """Living processes that were started with ``NAME=value`` in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if variable.encode() in file.read().split(b"\0") and not gone(int(name)):
                found.append(int(name))
    return found


def gone(pid: int) -> bool:
    """Whether a process has left the kernel, or nearly so."""
    return proc.status_fields(pid)[:1] in ([], ["Z"], ["X"])
