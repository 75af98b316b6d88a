"""What a worker costs: a fresh process, one call of a live one, and how many calls a second, beside the bare floor.

The floor is a small interpreter that forks, sends one byte through a pipe and gets one back; and that sends a byte to
a child that lives already. The peer is ``concurrent.futures.ProcessPoolExecutor``. All of them take turns in one run,
so that ratios hold while the machine's speed drifts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import chain

import anyaccel as aa
from measure import Row, against, state

ROUNDS, CALLS, BATCH, FEW = 40, 60, 1_500, 16
PAUSE = 0.01
"""Seconds before a fresh worker: the next one is forked ahead meanwhile, as it is while a call does something."""
FRESH, LIVE, RATE = 4.0, 3.0, 2.0

BUSY = ("live workers without devices", "live workers with devices", "live workers with machine-wide leases")

FLOOR = """
import os, sys, time
def fork():
    start = time.perf_counter()
    a, b = os.pipe(); c, d = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(d, os.read(a, 1)); os._exit(0)
    os.write(b, b"x"); os.read(c, 1)
    taken = time.perf_counter() - start
    os.waitpid(pid, 0)
    for fd in (a, b, c, d): os.close(fd)
    return taken
a, b = os.pipe(); c, d = os.pipe()
if not os.fork():
    os.close(b)
    while data := os.read(a, 1): os.write(d, data)
    os._exit(0)
def pipe():
    start = time.perf_counter()
    os.write(b, b"x"); os.read(c, 1)
    return time.perf_counter() - start
for line in sys.stdin:
    print({"fork": fork, "pipe": pipe}[line.strip()](), flush=True)
"""


class Floor:
    """A bare interpreter that measures itself when asked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", FLOOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, what: str) -> float:
        """Seconds of one ``fork`` or ``pipe`` round trip."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it: its child sees the end of the pipe."""
        self._process.kill()
        self._process.communicate()


class Echo:
    """An actor with nothing to do."""

    def noop(self) -> None:
        """Do nothing."""


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """A call that says how long it took."""

    def measure() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return measure


def batch(executor: Executor, calls: int = BATCH) -> float:
    """Seconds per call when there is always another one to run."""
    start = time.perf_counter()
    futures = [executor.submit(os.getppid) for _ in range(calls)]
    for future in futures:
        future.result()
    return (time.perf_counter() - start) / calls


@contextlib.contextmanager
def measured(rounds: int, calls: int) -> Iterator[dict[str, float]]:
    """Median seconds of everything, in turns."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(state())
        processors = os.cpu_count() or 1
        peer = stack.enter_context(ProcessPoolExecutor(processors))
        batch(peer)  # it forks us: before there is more than one thread
        spawn = multiprocessing.get_context("forkserver")
        fresh_peer = stack.enter_context(ProcessPoolExecutor(processors, mp_context=spawn, max_tasks_per_child=1))
        batch(fresh_peer, FEW)
        pool = stack.enter_context(aa.Pool("GPU:1", declare={"GPU": 2 * processors}))
        local = stack.enter_context(aa.Pool("GPU:1", declare={"GPU": 2 * processors}, shared=False))
        # On devices of their own, as many as there are workers of the peer: a fresh worker would have to wait until one
        # that is kept has ended.
        kept = stack.enter_context(aa.Pool("GPU:1", declare={"GPU": processors}, shared=False))
        live = kept.options(max_calls=0)
        quarter = local.options(needs="GPU:0.25")
        shared_kept = stack.enter_context(aa.Pool("GPU:1", declare={"GPU": processors}))
        shared_live = shared_kept.options(max_calls=0)
        cpu = pool.options(needs=None)
        actor = local.actor(Echo)
        floor = Floor()
        stack.callback(floor.close)
        few: dict[str, Callable[[], float]] = {
            "bare fork and pipe round trip": lambda: floor.measure("fork"),
            "fresh worker with a device": timed(lambda: local.submit(os.getppid).result()),
            "fresh worker with a machine-wide lease": timed(lambda: pool.submit(os.getppid).result()),
            "fresh worker with a quarter of a device": timed(lambda: quarter.submit(os.getppid).result()),
            "fresh workers back to back": lambda: batch(local, FEW),
            "fresh ProcessPoolExecutor back to back": lambda: batch(fresh_peer, FEW),
            "fresh workers, four to a device, back to back": lambda: batch(quarter, FEW),
        }
        many: dict[str, Callable[[], float]] = {
            "bare pipe round trip": lambda: floor.measure("pipe"),
            "live worker without devices": timed(lambda: cpu.submit(os.getppid).result()),
            "live worker with a device": timed(lambda: live.submit(os.getppid).result()),
            "actor": timed(lambda: actor.noop().result()),
            "ProcessPoolExecutor": timed(lambda: peer.submit(os.getppid).result()),
        }
        rates: dict[str, Callable[[], float]] = {
            "ProcessPoolExecutor, always busy": lambda: batch(peer),
            f"{BUSY[0]}, always busy": lambda: batch(cpu),
            f"{BUSY[1]}, always busy": lambda: batch(live),
            f"{BUSY[2]}, always busy": lambda: batch(shared_live),
        }
        times: dict[str, list[float]] = {name: [] for name in chain(few, many, rates)}
        for number in range(rounds + 1):
            for name, call in chain(few.items(), [pair for pair in many.items() for _ in range(calls)]):
                if name in few:
                    time.sleep(PAUSE)
                taken = call()
                if number:
                    times[name].append(taken)
            if number % 10 == 1:
                for name, call in rates.items():
                    times[name].append(call())
        yield {name: statistics.median(taken) for name, taken in times.items()}


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure, and compare with the budgets."""
    fork, pipe, busy = "bare fork and pipe round trip", "bare pipe round trip", "ProcessPoolExecutor, always busy"
    with measured(rounds, min(CALLS, 2 * rounds)) as times:
        fresh: dict[str, float | None] = {
            "fresh worker with a device": FRESH,
            "fresh worker with a machine-wide lease": FRESH,
            "fresh worker with a quarter of a device": FRESH,
            "fresh workers back to back": None,
            "fresh workers, four to a device, back to back": None,
            "fresh ProcessPoolExecutor back to back": None,
        }
        live: dict[str, float | None] = {
            "live worker without devices": LIVE,
            "live worker with a device": LIVE,
            "actor": LIVE,
            "ProcessPoolExecutor": None,
        }
        rates: dict[str, float | None] = {f"{name}, always busy": 1 / RATE for name in BUSY}
        return [*against(fork, times, fresh), *against(pipe, times, live), *against(busy, times, rates)]
