"""Devices that somebody uses without a lease: shown, given out by the memory that is really free, or left alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import attrgetter

from anyaccel.inventory.observe import stats
from anyaccel.model import Extent, Inventory, Request, Stats
from anyaccel.scheduler.filters import asked_memory

_FILTERED = attrgetter("filters")
FRESH_SECONDS = 2.0
"""How old an observation may be while somebody waits."""


class Foreign:
    """What is used of a machine by those who hold no lease, as far as it matters to one request.

    Args:
        inventory: The machine.
        request: The request. Only where it asks for memory, or where busy devices are to be avoided, the machine is
            observed at all: that takes a moment.
        environ: The environment that the plug-ins see.
        avoid_busy: Whether a device with a process on it counts as taken.
    """

    def __init__(self, inventory: Inventory, request: Request, environ: Mapping[str, str], *, avoid_busy: bool) -> None:
        self._inventory = inventory
        self._environ = environ
        self._avoid_busy = avoid_busy
        self._memory = max(map(asked_memory, filter(_FILTERED, request.terms)), default=0)
        self._observed: Mapping[str, Stats] = {}
        self._at = float("-inf")

    def taken(self, leased: Mapping[str, Extent]) -> dict[str, Extent]:
        """Devices, beside those that are leased, that cannot be given out now: all of each, by device id."""
        if not (self._avoid_busy or self._memory):
            return {}
        if time.monotonic() - self._at > FRESH_SECONDS:
            self._observed, _ = stats(self._inventory, environ=self._environ)
            self._at = time.monotonic()
        return {
            device.id: Extent(device.units)
            for device in self._inventory.devices
            if device.id not in leased and device.id in self._observed and self._refused(device.memory_bytes, device.id)
        }

    def _refused(self, memory_bytes: int | None, device_id: str) -> bool:
        seen = self._observed[device_id]
        if self._avoid_busy and seen.processes:
            return True
        if not self._memory or memory_bytes is None or seen.memory_used_bytes is None:
            return False
        return memory_bytes - seen.memory_used_bytes < self._memory
