"""Who holds a device: the processes that have one of its nodes open, as ``/proc`` shows them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anyaccel.kit.files import asked
from anyaccel.plugin import DeviceProcess, ProbeContext

QUESTION = "proc/holders"
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""``PROC_PID_INIT_INO`` in the kernel's ``include/linux/proc_ns.h``."""


class Holders:
    """Which processes hold which device nodes, asked once for all of them.

    Opening a node would tell too, and take the device; a vendor's tool often tells root alone.
    """

    def __init__(self, ctx: ProbeContext, nodes: Iterable[str]) -> None:
        """Look at every process.

        Args:
            ctx: The machine.
            nodes: Paths of the nodes that count.
        """
        wanted = frozenset(nodes)
        answer: Mapping[str, Any] = asked(ctx, QUESTION, lambda: scan(wanted)) or {}
        self._pids: Mapping[str, list[int]] = answer.get("holders", {})
        self.complete: bool = answer.get("complete") is True
        """Whether every process of the machine could be looked at."""

    def of(self, nodes: Iterable[str]) -> tuple[DeviceProcess, ...] | None:
        """The processes that hold one of some nodes; None, not nobody, where some processes could not be seen."""
        paths = tuple(nodes)
        pids = sorted({pid for path in paths for pid in self._pids.get(path, ())})
        if not paths or not (pids or self.complete):
            return None
        return tuple(DeviceProcess(pid=pid) for pid in pids)


def scan(nodes: frozenset[str], proc: str = "/proc") -> dict[str, Any]:
    """Look for processes that have a node open.

    Args:
        nodes: Paths of device nodes.
        proc: Where the process file system is mounted.

    Returns:
        ``holders``: process ids by node. ``complete``: whether every process of the machine was seen.
    """
    holders: dict[str, list[int]] = {}
    try:
        complete = os.readlink(f"{proc}/self/ns/pid") == FIRST_PID_NAMESPACE
    except OSError:
        complete = False
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        try:
            targets = set(_targets(f"{proc}/{pid}/fd"))
        except PermissionError:
            complete = False
            continue
        for node in sorted(targets & nodes):
            holders.setdefault(node, []).append(pid)
    return {"holders": holders, "complete": complete}


def _targets(directory: str) -> Iterator[str]:
    """What the open files of a process are; a file or a process that ends while we look is none."""
    try:
        numbers = os.listdir(directory)
    except (FileNotFoundError, ProcessLookupError):
        return
    for each in numbers:
        try:
            yield os.readlink(f"{directory}/{each}")
        except (FileNotFoundError, ProcessLookupError):
            continue
