"""Read facts of a machine that may be absent, unreadable or malformed, and find the holders of devices."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anyaccel.plugin import DeviceProcess, ProbeContext, QueryError

PCI_DEVICES = "/sys/bus/pci/devices"
"""Directory of the PCI functions, by address."""
KERNEL_LOG_SECONDS = 2.0
HOLDERS = "proc/holders"
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""``PROC_PID_INIT_INO`` in the kernel's ``include/linux/proc_ns.h``."""
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLES = ("container", "KUBERNETES_SERVICE_HOST")


def text(ctx: ProbeContext, path: str) -> str:
    """Read an optional file, stripped; empty if the file is absent or cannot be read."""
    try:
        return (ctx.read(path) or "").strip()
    except OSError:
        return ""


def number(ctx: ProbeContext, path: str) -> int | None:
    """Read a number, decimal or ``0x`` hexadecimal; None if the file is absent, unreadable or not a number."""
    try:
        return ctx.read_int(path)
    except OSError:
        return None


def host_memory(ctx: ProbeContext, key: str = "MemTotal") -> int | None:
    """Return a line of ``/proc/meminfo`` in bytes, or None: memory of devices without memory of their own."""
    match = re.search(rf"^{key}:\s*(\d+) kB", text(ctx, "/proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def total(ctx: ProbeContext, paths: Iterable[str]) -> int | None:
    """Add up the numbers in files; None without files, or if any file holds no number."""
    found = [number(ctx, path) for path in paths]
    return sum(filter(None, found)) if found and None not in found else None


def numbered(ctx: ProbeContext, start: str) -> dict[int, str]:
    """List the paths made of ``start`` and a number, in ascending order of the number."""
    found = ((path.removeprefix(start), path) for path in ctx.glob(f"{start}[0-9]*"))
    return dict(sorted((int(end), path) for end, path in found if re.fullmatch("[0-9]+", end)))


def try_query(ctx: ProbeContext, name: str, fn: Callable[[], Any]) -> Any | None:
    """Run an optional query; None if the query fails, or if this machine is a recording without the answer.

    Args:
        ctx: The machine.
        name: Name of the question in recordings.
        fn: Answers the question on this machine, in plain JSON data.
    """
    try:
        return ctx.query(name, fn)
    except QueryError:
        return None


def in_container(ctx: ProbeContext) -> bool:
    """Return True inside a container, where PCI and sysfs also show devices of other containers."""
    return any(map(ctx.exists, _CONTAINER_FILES)) or any(map(ctx.environ.get, _CONTAINER_VARIABLES))


def physical_function(ctx: ProbeContext, address: str) -> str | None:
    """Return the PCI address of the card to which a virtual function belongs; None for any other function."""
    link = ctx.readlink(f"{PCI_DEVICES}/{address}/physfn")
    return link.rpartition("/")[2].lower() if link else None


def kernel_log(ctx: ProbeContext, pattern: str) -> str:
    """Read the lines of the kernel log that match a pattern; empty if ``dmesg`` is missing or not permitted.

    Args:
        ctx: The machine.
        pattern: Regular expression of the lines that count. Then no other line gets into a recording: the log names
            hosts, users and serial numbers.
    """
    path, seconds = ctx.environ.get("PATH", os.defpath), min(KERNEL_LOG_SECONDS, ctx.remaining() / 2)
    return str(try_query(ctx, f"dmesg/{pattern}", lambda: _matching(pattern, path, seconds)) or "")


def _matching(pattern: str, path: str, seconds: float) -> str:
    """Run ``dmesg`` and keep the lines that match a pattern; empty if ``dmesg`` fails."""
    import shutil  # loaded on a host alone: a replay runs nothing
    import subprocess

    # The PATH of the probed machine's environment, not of this process.
    program = shutil.which("dmesg", path=path)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=seconds,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return "".join(line for line in done.stdout.splitlines(keepends=True) if re.search(pattern, line))


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
        answer: Mapping[str, Any] = try_query(ctx, HOLDERS, lambda: scan(wanted)) or {}
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
        targets: set[str] = set()
        try:
            targets.update(_link_target(f"{proc}/{pid}/fd/{each}") for each in os.listdir(f"{proc}/{pid}/fd"))
        except PermissionError:
            complete = False
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        for node in sorted(targets & nodes):
            holders.setdefault(node, []).append(pid)
    return {"holders": holders, "complete": complete}


def _link_target(path: str) -> str:
    """Return the target of a link in ``/proc``; empty for a file that was closed meanwhile."""
    try:
        return os.readlink(path)
    except (FileNotFoundError, ProcessLookupError):
        return ""
