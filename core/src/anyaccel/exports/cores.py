"""The cores of this host by NUMA node, numbered as Slurm numbers them."""

from __future__ import annotations

import os
import re

SYSTEM = "/sys/devices/system"


def cores_by_node(system: str = SYSTEM) -> dict[int, tuple[int, ...]]:
    """Number the cores of each NUMA node from 0, socket by socket, whatever the kernel calls their threads.

    Slurm takes the logical order of hwloc: sockets, in them NUMA nodes, in them cores, each by its first thread.

    Args:
        system: Where sysfs shows ``cpu`` and ``node``; see the kernel's Documentation/ABI/stable/sysfs-devices-node
            and Documentation/admin-guide/cputopology.rst.

    Returns:
        Numbers of cores by node; empty where the kernel shows no nodes.
    """
    node_of: dict[int, int] = {}
    for name in _listed(f"{system}/node", r"node\d+"):
        cpus = _read(f"{system}/node/{name}/cpulist")
        node_of |= dict.fromkeys(_numbers(cpus), int(name[len("node") :]))
    sockets: dict[str, list[int]] = {}
    for cpu in sorted(node_of):
        threads = _numbers(_read(f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list"))
        if threads and cpu == min(threads):
            socket = _read(f"{system}/cpu/cpu{cpu}/topology/physical_package_id")
            sockets.setdefault(socket, []).append(cpu)
    first = {node: min(cpu for cpu in node_of if node_of[cpu] == node) for node in set(node_of.values())}
    ordered = [cpu for cores in sockets.values() for cpu in sorted(cores, key=lambda cpu: (first[node_of[cpu]], cpu))]
    found: dict[int, tuple[int, ...]] = {}
    for number, cpu in enumerate(ordered):
        found[node_of[cpu]] = (*found.get(node_of[cpu], ()), number)
    return found


def _listed(folder: str, pattern: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if re.fullmatch(pattern, name)]
    except OSError:
        return []


def _read(path: str) -> str:
    """The text of a file of sysfs, or nothing: CPUs that are offline have no topology."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _numbers(text: str) -> list[int]:
    """Read a list of the kernel's, such as ``0-3,8``."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found
