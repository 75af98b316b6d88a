"""What one decision costs in process, on machines of 1 to 128 devices and with up to 1,000 requests that wait."""

from __future__ import annotations

import time

from anyaccel.model import Device, Inventory
from anyaccel.scheduler import Fleet, Scheduler
from measure import Row, at_most

BUDGETS = {1: None, 8: 20e-6, 64: None, 128: 50e-6}
WAITERS = (1, 10, 100, 1000)
ISLAND = 8
MACHINES, HOSTS = 2048, 4
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


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure the best of several rounds, since the rest is the machine's noise."""
    found = []
    for size, budget in BUDGETS.items():
        scheduler = Scheduler(machine(size))
        best = min(_round(scheduler, "GPU:1") for _ in range(rounds))
        where = f"{size:,} device{'s' if size > 1 else ''}"
        what = f"allocate and release, {where}"
        found.append(Row(what=what, seconds=best) if budget is None else at_most(what, best, budget))
        if size > ISLAND:
            best = min(_round(scheduler, "GPU:8,linked") for _ in range(rounds))
            found.append(Row(what=f"allocate and release 8 that are linked, {where}", seconds=best))
    fleet = Fleet({f"n{number}": machine(ISLAND) for number in range(MACHINES)})
    best = min(_round(fleet, "GPU:1") for _ in range(rounds))
    what = f"allocate and release, {MACHINES:,} machines of {ISLAND} devices"
    found.append(at_most(what, best, 200e-6))
    best = min(_round(fleet, f"GPU:{ISLAND}", hosts=HOSTS) for _ in range(rounds))
    what = f"allocate and release {ISLAND} on {HOSTS} at once, {MACHINES:,} machines of {ISLAND} devices"
    found.append(Row(what=what, seconds=best))
    for number in WAITERS:
        best = min(_drain(number) for _ in range(rounds))
        found.append(Row(what=f"release to the next of {number:,} in line", seconds=best))
    return found


def _round(scheduler: Scheduler | Fleet, request: str, hosts: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        scheduler.release(scheduler.allocate(request, hosts=hosts))
    return (time.perf_counter() - start) / CALLS


def _drain(number: int) -> float:
    """Seconds per request when so many wait for eight devices and each gives them to the next."""
    scheduler = Scheduler(machine(8))
    held = scheduler.allocate("GPU:8")
    tickets = [scheduler.submit("GPU:8") for _ in range(number)]
    start = time.perf_counter()
    scheduler.release(held)
    for ticket in tickets:
        if ticket.allocation is None:
            raise SystemExit("a request that comes next was not served")
        scheduler.release(ticket.allocation)
    return (time.perf_counter() - start) / number
