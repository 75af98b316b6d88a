"""Observe devices in use without a lease."""

from __future__ import annotations

import time
from collections.abc import Mapping

from anyaccel.inventory.observe import stats
from anyaccel.model import Extent, Inventory, Request, Stats
from anyaccel.scheduler.filters import asked_memory

FRESH_SECONDS = 2.0
"""Maximum age of an observation while a request waits."""


class UnleasedUse:
    """Finds devices unavailable to a request because of processes without a lease.

    Args:
        inventory: The machine.
        request: The request.
        environ: The environment of the plug-ins.
        avoid_busy: Whether a device with a process on it counts as taken.
    """

    def __init__(self, inventory: Inventory, request: Request, environ: Mapping[str, str], *, avoid_busy: bool) -> None:
        self._inventory = inventory
        self._environ = environ
        self._avoid_busy = avoid_busy
        self._memory = max((asked_memory(term) for term in request.terms if term.filters), default=0)
        self._observed: Mapping[str, Stats] = {}
        self._observed_at = float("-inf")

    def find_taken(self, leased: Mapping[str, Extent]) -> dict[str, Extent]:
        """Return the whole of each device without a lease and unavailable to the request, by id.

        A device is taken if a process runs on it (with ``avoid_busy``), or if it has less free memory than the largest
        memory filter of the request asks for. A device that cannot be observed counts as free. An observation starts
        processes, and serves for ``FRESH_SECONDS``.

        Args:
            leased: The leased part of each device, by id. These devices are left out of the result, even if leased in
                part.
        """
        if not (self._avoid_busy or self._memory):
            return {}
        # The ledger asks again after each change on the machine, and an observation starts processes.
        if time.monotonic() - self._observed_at > FRESH_SECONDS:
            self._observed, _ = stats(self._inventory, environ=self._environ)
            self._observed_at = time.monotonic()
        return {
            device.id: Extent(device.units)
            for device in self._inventory.devices
            if device.id not in leased  # the holder's own use is no obstacle: the lease is
            and device.id in self._observed
            and self._is_taken(device.memory_bytes, self._observed[device.id])
        }

    def _is_taken(self, memory_bytes: int | None, seen: Stats) -> bool:
        """Return whether an observed device is unavailable; unknown memory counts as free."""
        if self._avoid_busy and seen.processes:
            return True
        if not self._memory or memory_bytes is None or seen.memory_used_bytes is None:
            return False
        return memory_bytes - seen.memory_used_bytes < self._memory
