"""The cores of this host by NUMA node, numbered as Slurm numbers them."""

from __future__ import annotations

from anyaccel.probe import processors


def cores_by_node(system: str = processors.SYSTEM) -> dict[int, tuple[int, ...]]:
    """Number the cores of each NUMA node from 0, socket by socket, independent of the kernel's numbers of threads.

    Slurm takes the logical order of hwloc: sockets, in them NUMA nodes, in them cores, each by its first thread.

    Args:
        system: Directory of ``cpu`` and ``node`` in sysfs.

    Returns:
        Numbers of cores by node; empty without nodes in sysfs.
    """
    node_of = {cpu: node for node, cpus in processors.by_node(system).items() for cpu in cpus}
    sockets: dict[str, list[int]] = {}
    for cpu in sorted(node_of):
        threads = processors.siblings(cpu, system)
        if threads and cpu == min(threads):  # a core goes by its first thread
            socket = processors.read(f"{system}/cpu/cpu{cpu}/topology/physical_package_id")
            sockets.setdefault(socket, []).append(cpu)
    first = {node: min(cpu for cpu in node_of if node_of[cpu] == node) for node in set(node_of.values())}
    ordered = [cpu for cores in sockets.values() for cpu in sorted(cores, key=lambda cpu: (first[node_of[cpu]], cpu))]
    found: dict[int, tuple[int, ...]] = {}
    for number, cpu in enumerate(ordered):
        found[node_of[cpu]] = (*found.get(node_of[cpu], ()), number)
    return found
