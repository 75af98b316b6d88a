"""Quarantine: devices whose holder was killed are released once the vendor sees nothing of the process on them.

A process that exits closes its devices first. A process that is killed may leave memory behind for a while, and with
some drivers for ever. Such a device is kept in quarantine with the reason, because the next holder would run out of
memory at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from anyaccel.errors import AnyaccelError
from anyaccel.forkserver.client import Gone
from anyaccel.inventory.observe import stats
from anyaccel.model import Allocation, Inventory, Share, Stats
from anyaccel.pool.devices import WorkerLease
from anyaccel.pool.reactor import reactor
from anyaccel.probe.machine import parse_machine
from anyaccel.vendors.process import vendor_process

FIRST_LOOK_SECONDS = 0.1
LAST_LOOK_SECONDS = 10.0
ORPHANED = 16
"""A device without processes is clean if less than 1/16 of its memory is in use: drivers keep some for themselves."""


class Quarantine:
    """The devices of a pool that are kept although their holder was ended."""

    def __init__(self) -> None:
        self._kept: dict[WorkerLease, str] = {}

    def list(self) -> tuple[tuple[Allocation, str], ...]:
        """Return the devices with the reasons; any thread may ask."""
        return tuple((lease.allocation, reason) for lease, reason in tuple(self._kept.items()))

    def keep(self, lease: WorkerLease, reason: str) -> None:
        """Record devices as kept, with the reason; a new reason is written into the ledger."""
        if self._kept.get(lease) != reason:
            self._kept[lease] = reason
            lease.quarantine(reason)

    def release(self, inventory: Inventory, lease: WorkerLease, gone: Gone) -> None:
        """Release devices: at once after exit status 0, else when the vendor sees nothing of the process on them.

        Also at once if there was no process, or no vendor can tell. Else the devices are kept, and a thread polls the
        vendor; an observation that fails counts as nothing. Processes that carry the lease's mark hold the devices
        until they exit, even after the release.
        """

        def release() -> None:
            """Remove the record of the quarantine, if any, and release the lease; in the reactor's thread."""
            self._kept.pop(lease, None)
            lease.release(carried=gone.carried)

        def watch() -> None:
            """Poll the vendor at growing intervals until nothing is found, then release."""
            pause = FIRST_LOOK_SECONDS
            while reason := find_remains(inventory, lease.allocation, gone.pid):
                self.keep(lease, reason)
                time.sleep(pause)
                pause = min(2 * pause, LAST_LOOK_SECONDS)
            reactor().call_soon(release)

        if gone.status == 0 or not gone.forked or not can_tell(inventory, lease.allocation):
            release()
        else:
            self.keep(lease, "its holder was killed, and its vendor has not said yet that its memory is free")
            # In a thread of its own: a vendor may take seconds to answer, and the reactor serves all pools.
            threading.Thread(target=watch, name="anyaccel reclaim", daemon=True).start()


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


def find_remains(inventory: Inventory, allocation: Allocation, pid: int) -> str:
    """Observe the machine, which may take seconds, and return what is left of a process on devices, as clauses.

    Empty if nothing is left, or the vendor cannot tell.
    """
    try:
        observed, _ = stats(inventory)
    except AnyaccelError:
        return ""
    return "; ".join(filter(None, (_find_remains(share, pid, observed) for share in allocation.shares)))


def _find_remains(share: Share, pid: int, observed: Mapping[str, Stats]) -> str:
    """Return what is left of a process on one device, as a clause; empty if nothing is, or the vendor cannot tell.

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
