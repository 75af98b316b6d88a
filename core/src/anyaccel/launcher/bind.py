"""Run workers on the processors of the NUMA node that is nearest to their devices.

A processor that is far from a device reaches it, and the memory beside it, over a link that others use, too. Memory
needs no rule of its own: the kernel gives a process pages of the node on which it runs, as long as there are some
(Documentation/admin-guide/mm/numa_memory_policy.rst, the default policy), and a policy that somebody has set stays.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from anyaccel.model import Allocation, Inventory
from anyaccel.probe import HOST
from anyaccel.probe.processors import by_node, siblings

Bind = bool | None
"""Whether workers run near their devices; None for those of whole devices of this host."""


def near(allocation: Allocation, inventory: Inventory, bind: Bind) -> tuple[int, ...]:
    """Processors that are nearest to the devices of an allocation.

    Args:
        allocation: What the worker holds.
        inventory: The machine. Of one that is simulated or recorded the numbers of its nodes are taken, by wish only.
        bind: Whether it is to run near them.

    Returns:
        Numbers of processors, among those that this thread may use; empty where the machine does not tell, where none
        is left, or where nobody wants it.
    """
    if bind is None:
        bind = inventory.machine == HOST and all(share.whole for share in allocation.shares)
    nodes = {device.numa_node for device in allocation.devices} if bind else set()
    if not nodes or None in nodes:
        return ()
    processors = by_node()
    found = {processor for node in nodes if node is not None for processor in processors.get(node, ())}
    return tuple(sorted(found & os.sched_getaffinity(0)))


def divided(devices_nodes: Sequence[int | None], among: Collection[int]) -> list[tuple[int, ...]]:
    """Divide processors among the ranks of a job, by whole cores.

    Args:
        devices_nodes: The NUMA node of each rank's device, in the order of the ranks.
        among: The processors of the job; empty where it is not bound.

    Returns:
        The processors of each rank: its part of those of its node, or all of these where there are fewer cores than
        ranks.
    """
    of_node = {node: sorted({*processors} & {*among}) for node, processors in by_node().items()}
    found = []
    for rank, node in enumerate(devices_nodes):
        cores = _cores(of_node.get(node, []) if node is not None else [])
        ranks = [other for other, theirs in enumerate(devices_nodes) if theirs == node]
        place, count = ranks.index(rank), len(ranks)
        if len(cores) >= count:
            cores = cores[place * len(cores) // count : (place + 1) * len(cores) // count]
        found.append(tuple(sorted(processor for core in cores for processor in core)))
    return found


def _cores(processors: Sequence[int]) -> list[tuple[int, ...]]:
    """Processors by the core that they are threads of; each is its own where the kernel does not say."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for processor in processors:
        cores.setdefault(siblings(processor) or (processor,), []).append(processor)
    return [tuple(core) for core in cores.values()]
