"""Find the holders of a device: the processes with a device node open, by ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from anyaccel.kit.files import try_query
from anyaccel.plugin import DeviceProcess, ProbeContext

QUESTION = "proc/holders"
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""``PROC_PID_INIT_INO`` in the kernel's ``include/linux/proc_ns.h``."""


class Holders:
    """Processes with device nodes open, found by one scan of ``/proc`` for every node.

    Opening a node would show a holder too, and take the device; a vendor's tool often shows holders to root alone.
    """

    def __init__(self, ctx: ProbeContext, nodes: Iterable[str]) -> None:
        """Scan every process.

        Args:
            ctx: The machine.
            nodes: Paths of the device nodes to look for.
        """
        wanted = frozenset(nodes)
        answer: Mapping[str, Any] = try_query(ctx, QUESTION, lambda: scan(wanted)) or {}
        self._pids: Mapping[str, list[int]] = answer.get("holders", {})
        self.complete: bool = answer.get("complete") is True
        """Whether the open files of every process on the machine were readable."""

    def find(self, nodes: Iterable[str]) -> tuple[DeviceProcess, ...] | None:
        """Return the processes with any of ``nodes`` open; None if there may be further, invisible holders."""
        paths = tuple(nodes)
        # A process may have several of the nodes open.
        pids = sorted({pid for path in paths for pid in self._pids.get(path, ())})
        # No holder among visible processes does not mean a free device.
        if not paths or not (pids or self.complete):
            return None
        return tuple(DeviceProcess(pid=pid) for pid in pids)


def scan(nodes: frozenset[str], proc: str = "/proc") -> dict[str, Any]:
    """Find the processes with a device node open.

    Args:
        nodes: Paths of device nodes.
        proc: Where the process file system is mounted.

    Returns:
        ``holders``: process ids by node. ``complete``: whether the scan saw every process of the machine.
    """
    holders: dict[str, list[int]] = {}
    try:
        # In another pid namespace, processes of the host are invisible, however readable /proc is.
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
    """Yield the targets of a process's open files; nothing for a file or process that ends during the scan."""
    try:
        numbers = os.listdir(directory)
    except (FileNotFoundError, ProcessLookupError):
        return
    for each in numbers:
        try:
            yield os.readlink(f"{directory}/{each}")
        except (FileNotFoundError, ProcessLookupError):
            continue
