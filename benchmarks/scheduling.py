"""What one decision costs in process: a device allocated and released, on machines of 8 and of 1,024 devices."""

from __future__ import annotations

import time

from anyaccel.model import Device, Inventory
from anyaccel.scheduler import Scheduler
from measure import Row

BUDGETS = {8: 20e-6, 1024: 200e-6}
ISLAND = 8
ROUNDS, CALLS = 7, 300


def machine(size: int) -> Inventory:
    """Devices in islands of eight that are linked to each other, two NUMA nodes each."""
    devices = []
    for index in range(size):
        start = index - index % ISLAND
        links = {f"d{peer}": 9 for peer in range(start, min(start + ISLAND, size)) if peer != index}
        devices.append(
            Device(
                id=f"d{index}", index=index, order=index, model="D", links=links, numa_node=index * 2 // size,
                vendor="bench", resource="GPU", tags=("D",),
            )
        )  # fmt: skip
    return Inventory(machine="benchmark", devices=tuple(devices))


def rows() -> list[Row]:
    """Measure one device allocated and released, the best of several rounds, since the rest is the machine's noise."""
    found = []
    for size, budget in BUDGETS.items():
        scheduler = Scheduler(machine(size))
        best = min(_round(scheduler) for _ in range(ROUNDS))
        found.append(
            Row(
                what=f"allocate and release, {size} devices",
                seconds=best,
                budget=f"at most {budget * 1e6:g} us",
                kept=best <= budget,
            )
        )
    return found


def _round(scheduler: Scheduler) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        scheduler.release(scheduler.allocate("GPU:1"))
    return (time.perf_counter() - start) / CALLS
