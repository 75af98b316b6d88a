"""Bind workers to the processors of the NUMA node nearest to their devices.

A distant processor reaches a device, and the memory beside the device, over a shared link. Memory needs no rule of its
own: by default, the kernel gives a process pages of the node on which it runs while there are some
(Documentation/admin-guide/mm/numa_memory_policy.rst). A policy that the user has set stays.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from anyaccel.model import Allocation, Inventory
from anyaccel.probe import HOST
from anyaccel.probe.processors import by_node, siblings

Bind = bool | None
"""Whether workers run near their devices; None to bind only workers with whole devices of this host."""


def find_processors(allocation: Allocation, inventory: Inventory, bind: Bind) -> tuple[int, ...]:
    """Return the processors nearest to the devices of an allocation.

    Args:
        allocation: The devices of the worker.
        inventory: The machine. With ``bind`` True, a simulated or recorded machine counts as this host.
        bind: Whether to bind the worker.

    Returns:
        Numbers of processors that this thread may use; empty if the worker is not to be bound, if the node of a device
        is unknown, or if this thread may use no processor there.
    """
    if bind is None:
        bind = inventory.machine == HOST and all(share.whole for share in allocation.shares)
    # One device of unknown node: to bind to the nodes of the others could be the wrong half of the machine.
    nodes = {device.numa_node for device in allocation.devices} if bind else set()
    if not nodes or None in nodes:
        return ()
    processors = by_node()
    found = {processor for node in nodes if node is not None for processor in processors.get(node, ())}
    return tuple(sorted(found & os.sched_getaffinity(0)))


def divide_processors(devices_nodes: Sequence[int | None], among: Collection[int]) -> list[tuple[int, ...]]:
    """Divide processors among the ranks of a job, by whole cores.

    Args:
        devices_nodes: The NUMA node of each rank's device, in the order of the ranks; None if unknown.
        among: The processors of the job; empty if the job is not bound.

    Returns:
        The processors of each rank: its part of its node's processors, or all of them if the node has fewer cores than
        ranks. An empty tuple for a rank of an unknown node.
    """
    of_node = {node: sorted({*processors} & {*among}) for node, processors in by_node().items()}
    found = []
    for rank, node in enumerate(devices_nodes):
        cores = _group_by_core(of_node.get(node, []) if node is not None else [])
        ranks = [other for other, theirs in enumerate(devices_nodes) if theirs == node]
        place, count = ranks.index(rank), len(ranks)
        if len(cores) >= count:  # else a rank would get no core at all
            cores = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
        found.append(tuple(sorted(processor for core in cores for processor in core)))
    return found


def _group_by_core(processors: Sequence[int]) -> list[tuple[int, ...]]:
    """Group processors by core; a processor without known siblings is a core."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for processor in processors:
        cores.setdefault(siblings(processor) or (processor,), []).append(processor)
    return [tuple(core) for core in cores.values()]
