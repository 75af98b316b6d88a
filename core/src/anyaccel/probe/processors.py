"""The processors of this host, from sysfs.

See the kernel's Documentation/ABI/stable/sysfs-devices-node and Documentation/admin-guide/cputopology.rst.
"""

from __future__ import annotations

import os
import re
from functools import cache

SYSTEM = "/sys/devices/system"
"""The sysfs directory with ``cpu`` and ``node``."""


def by_node(system: str = "") -> dict[int, tuple[int, ...]]:
    """Return the processors of each NUMA node; empty where the kernel shows none. Read once."""
    return dict(_by_node(system or SYSTEM))


@cache
def _by_node(system: str) -> dict[int, tuple[int, ...]]:
    folder = f"{system}/node"
    try:
        names = [name for name in os.listdir(folder) if re.fullmatch(r"node\d+", name)]
    except OSError:
        return {}
    return {int(name[len("node") :]): tuple(numbers(read(f"{folder}/{name}/cpulist"))) for name in names}


def siblings(processor: int, system: str = "") -> tuple[int, ...]:
    """Return the threads of a processor's core, itself included; none when the processor is offline."""
    return tuple(numbers(read(f"{system or SYSTEM}/cpu/cpu{processor}/topology/thread_siblings_list")))


def read(path: str) -> str:
    """Return the text of a sysfs file; empty without the file: an offline processor has no topology."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def numbers(text: str) -> list[int]:
    """Parse a list of the kernel such as ``0-3,8``."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found
