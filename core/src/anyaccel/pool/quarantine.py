"""Devices whose holder was killed: they go back once the vendor says that nothing of it is left on them.

A process that ends by itself closes its devices first. One that is killed in the middle of something may leave memory
behind for a while, and some drivers do for ever: such a device is quarantined, with the reason, instead of being given
to somebody who would run out of memory at once.
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
"""A whole device that nobody uses must have less than one of so many parts of its memory in use: drivers keep some."""


def can_tell(inventory: Inventory, allocation: Allocation) -> bool:
    """Whether a vendor of some of the devices says what is in use on them."""
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
    """Give devices back once nothing of a dead process is left on them; looks in a thread of its own.

    Args:
        inventory: The machine.
        allocation: What the process held.
        pid: The process.
        keep: Called with the reason as long as they are kept.
        release: Called once they are free, or as soon as nobody can tell any more.
    """
    keep("its holder was killed, and its vendor has not said yet that its memory is free")

    def watch() -> None:
        pause = FIRST_LOOK_SECONDS
        while reason := in_use(inventory, allocation, pid):
            keep(reason)
            time.sleep(pause)
            pause = min(2 * pause, LAST_LOOK_SECONDS)
        release()

    threading.Thread(target=watch, name="anyaccel reclaim", daemon=True).start()


def in_use(inventory: Inventory, allocation: Allocation, pid: int) -> str:
    """Why devices cannot be given to the next one yet; empty when they can, or when the vendor cannot tell."""
    try:
        observed, _ = stats(inventory)
    except AnyaccelError:
        return ""
    return "; ".join(filter(None, (_in_use(share, pid, observed) for share in allocation.shares)))


def _in_use(share: Share, pid: int, observed: Mapping[str, Stats]) -> str:
    seen = observed.get(share.device.id)
    if seen is None:
        return ""
    if any(process.pid == pid for process in seen.processes or ()):
        return f"{share.device.id} is still in use by process {pid}, which has ended"
    memory, used = share.device.memory_bytes, seen.memory_used_bytes
    if share.whole and seen.processes == () and memory and used and used * ORPHANED > memory:
        return f"{share.device.id} has {used >> 20} MiB in use, and no process that uses them"
    return ""
