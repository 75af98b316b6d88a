"""What a worker costs: a fresh process, one call of a live one, and how many calls a second, beside the bare floor.

The floor is a small interpreter that forks, sends one byte through a pipe and gets one back; and that sends a byte to
a child that lives already. The peer is ``concurrent.futures.ProcessPoolExecutor``. All of them take turns in one run,
so that ratios hold while the machine's speed drifts.

What is measured runs as a script of its own, this file: its functions are then what users write, functions of
``__main__``, which no worker can import. Beside them stands a function that every process has.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from itertools import chain
from typing import Any

import anyaccel as aa
from measure import Row, against, state

ROUNDS, CALLS, BATCH, FEW = 40, 60, 1_500, 16
PAUSE = 0.01
"""Seconds before a fresh worker: the next one is forked ahead meanwhile, as it is while a call does something."""
FRESH, LIVE, RATE = 4.0, 4.0, 3.0
"""At most so many forks for a fresh worker; so many times as fast as ProcessPoolExecutor, for one call and for many."""
FORK, PIPE, PEER = "bare fork and pipe round trip", "bare pipe round trip", "ProcessPoolExecutor"
SCRIPTS, BUSY = ", a script's function", ", always busy"

SCALE = 3
"""A global that the function of this script uses."""


def scaled(x: int) -> int:
    """What is called: next to no work."""
    return SCALE * x


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


def batch(executor: Executor, fn: Callable[..., object], *args: object, calls: int = BATCH) -> float:
    """Seconds per call when there is always another one to run."""
    start = time.perf_counter()
    futures = [executor.submit(fn, *args) for _ in range(calls)]
    for future in futures:
        future.result()
    return (time.perf_counter() - start) / calls


def measure(rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of everything, in turns."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(state())
        processors = os.cpu_count() or 1
        peer = stack.enter_context(ProcessPoolExecutor(processors))
        batch(peer, os.getppid)  # it forks us: before there is more than one thread
        spawn = multiprocessing.get_context("forkserver")
        fresh_peer = stack.enter_context(ProcessPoolExecutor(processors, mp_context=spawn, max_tasks_per_child=1))
        batch(fresh_peer, os.getppid, calls=FEW)
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

        def one(executor: Any, fn: Callable[..., object] = os.getppid, *args: object) -> Callable[[], float]:
            return timed(lambda: executor.submit(fn, *args).result())

        few: dict[str, Callable[[], float]] = {
            FORK: lambda: floor.measure("fork"),
            "fresh worker with a device": one(local),
            f"fresh worker with a device{SCRIPTS}": one(local, scaled, 2),
            "fresh worker with a machine-wide lease": one(pool),
            "fresh worker with a quarter of a device": one(quarter),
            "fresh workers back to back": lambda: batch(local, os.getppid, calls=FEW),
            "fresh workers, four to a device, back to back": lambda: batch(quarter, os.getppid, calls=FEW),
            f"fresh {PEER} back to back": lambda: batch(fresh_peer, os.getppid, calls=FEW),
        }
        many: dict[str, Callable[[], float]] = {
            PIPE: lambda: floor.measure("pipe"),
            PEER: one(peer),
            "live worker without devices": one(cpu),
            "live worker with a device": one(live),
            "actor": timed(lambda: actor.noop().result()),
            PEER + SCRIPTS: one(peer, scaled, 2),
            f"live worker with a device{SCRIPTS}": one(live, scaled, 2),
        }
        rates: dict[str, Callable[[], float]] = {
            PEER + BUSY: lambda: batch(peer, os.getppid),
            f"live workers without devices{BUSY}": lambda: batch(cpu, os.getppid),
            f"live workers with devices{BUSY}": lambda: batch(live, os.getppid),
            f"live workers with machine-wide leases{BUSY}": lambda: batch(shared_live, os.getppid),
            PEER + SCRIPTS + BUSY: lambda: batch(peer, scaled, 2),
            f"live workers with devices{SCRIPTS}{BUSY}": lambda: batch(live, scaled, 2),
        }
        times: dict[str, list[float]] = {name: [] for name in chain(few, many, rates)}
        for number in range(rounds + 1):
            for name, call in chain(few.items(), [pair for pair in many.items() for _ in range(calls)]):
                if name in few:
                    time.sleep(PAUSE)
                taken = call()
                if number:
                    times[name].append(taken)
            if number % 3 == 1:
                for name, call in rates.items():
                    times[name].append(call())
        return {name: statistics.median(taken) for name, taken in times.items()}


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure in a process of its own, and compare with the budgets."""
    command = [sys.executable, __file__, str(rounds)]
    times: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    beside_fork = {name: FRESH if " back to back" not in name else None for name in times if name.startswith("fresh ")}
    found = [*against(FORK, times, beside_fork), *against(PIPE, times, {})]
    for what, kind, limit in (("", "", LIVE), (SCRIPTS, "", LIVE), ("", BUSY, RATE), (SCRIPTS, BUSY, RATE)):
        ours = {
            name: 1 / limit
            for name in times
            if name.startswith(("live ", "actor")) and (BUSY in name) == bool(kind) and (SCRIPTS in name) == bool(what)
        }
        found += against(PEER + what + kind, times, ours)
    return found


if __name__ == "__main__":
    number = int(sys.argv[1])
    print(json.dumps(measure(number, min(CALLS, 2 * number))))
