"""Bind workers to the processors of the NUMA node nearest to their devices.

A distant processor reaches a device, and the memory beside the device, over a shared link. Memory needs no rule of its
own: by default, the kernel gives a process pages of the node on which it runs while there are some
(Documentation/admin-guide/mm/numa_memory_policy.rst). A policy that the user has set stays.
"""

from __future__ import annotations

import os

from anyaccel.model import Allocation, Inventory
from anyaccel.probe import HOST
from anyaccel.probe.processors import by_node

Bind = bool | None
"""Whether workers run near their devices; None to bind only workers with whole devices of this host."""


def find_processors(allocation: Allocation, inventory: Inventory, bind: Bind) -> tuple[int, ...]:
    """Return the processors on the NUMA nodes of all devices of an allocation, in ascending order; binds nothing.

    Args:
        allocation: The devices of the worker.
        inventory: The machine. With ``bind`` True, a simulated or recorded machine counts as this host.
        bind: Whether to bind the worker; None for whole devices of this host only.

    Returns:
        Numbers of processors that this thread may use; empty if the worker is not to be bound, if there is no device,
        if the node of a device is unknown, or if this thread may use no processor there.
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
