"""Processes as the kernel sees them."""

from __future__ import annotations

import contextlib
import os

from anyaccel.linux import process


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
    return process.state(pid) in ("", "Z", "X")
