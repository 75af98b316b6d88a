"""Quarantine: devices whose holder was killed are released once the vendor sees nothing of the process on them.

A process that exits closes its devices first. A process that is killed may leave memory behind for a while, and with
some drivers for ever. Such a device is kept in quarantine with the reason, because the next holder would run out of
memory at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from anyaccel.errors import AnyaccelError
from anyaccel.inventory.observe import stats
from anyaccel.model import Allocation, Inventory, Share, Stats
from anyaccel.probe.machine import parse_machine
from anyaccel.vendors.process import vendor_process

FIRST_LOOK_SECONDS = 0.1
LAST_LOOK_SECONDS = 10.0
ORPHANED = 16
"""A device without processes is clean if less than 1/16 of its memory is in use: drivers keep some for themselves."""


def can_tell(inventory: Inventory, allocation: Allocation) -> bool:
    """Return whether a vendor of some of the devices reports processes and memory in use.

    False for declared devices, a simulated machine, and a vendor's process that cannot be asked.
    """
    vendors = {device.vendor for device in allocation.devices if not device.declared}
    if not vendors or parse_machine(inventory.machine).simulated:
        return False
    try:
        return any(vendor_process(vendor).implements("anyaccel_stats") for vendor in vendors)
    except AnyaccelError:
        return False


def release_when_free(
    inventory: Inventory,
    allocation: Allocation,
    pid: int,
    *,
    keep: Callable[[str], None],
    release: Callable[[], None],
) -> None:
    """Release devices once nothing of a dead process is left on them; polls the vendor in a thread of its own.

    Args:
        inventory: The machine.
        allocation: The devices.
        pid: Id of the dead process.
        keep: Called with the reason, first at once in this thread, then in the other after each poll that found
            something.
        release: Called in that thread once the devices are clean, or the vendor cannot tell any more.
    """
    keep("its holder was killed, and its vendor has not said yet that its memory is free")

    def watch() -> None:
        """Poll the vendor at growing intervals until nothing is found, then release."""
        pause = FIRST_LOOK_SECONDS
        while reason := find_remains(inventory, allocation, pid):
            keep(reason)
            time.sleep(pause)
            pause = min(2 * pause, LAST_LOOK_SECONDS)
        release()

    threading.Thread(target=watch, name="anyaccel reclaim", daemon=True).start()


def find_remains(inventory: Inventory, allocation: Allocation, pid: int) -> str:
    """Return what is left of a process on devices; empty if nothing is, or the vendor cannot tell."""
    try:
        observed, _ = stats(inventory)
    except AnyaccelError:
        return ""
    return "; ".join(filter(None, (_find_remains(share, pid, observed) for share in allocation.shares)))


def _find_remains(share: Share, pid: int, observed: Mapping[str, Stats]) -> str:
    """Return what is left of a process on one device; empty if nothing is, or the vendor cannot tell.

    A whole device without processes has remains if more than 1/16 of its memory is in use.
    """
    seen = observed.get(share.device.id)
    if seen is None:
        return ""
    if any(process.pid == pid for process in seen.processes or ()):
        return f"{share.device.id} is still in use by process {pid}, which has ended"
    memory, used = share.device.memory_bytes, seen.memory_used_bytes
    if share.whole and seen.processes == () and memory and used and used * ORPHANED > memory:
        return f"{share.device.id} has {used >> 20} MiB in use, and no process that uses them"
    return ""
