"""Ours beside its peers in one run: a fresh worker with a device, a live one, an actor, tasks per second, fractions.

The peers are installed by their own command, ``pip install "ray==2.60.0" loky``; a peer that is not there is said to
be missing. Devices are simulated for us and logical for Ray, so that what is compared is launching, not hardware.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from typing import Any

from measure import Row, median, state

MACHINE = "sim:H100:2"
ROUNDS = 5
CALLS, TASKS, QUARTERS = 8, 500, 16

FRESH, LIVE, BUSY = "fresh worker with a device", "live worker, one call", "live workers, always busy"
START, CALL, FRACTION = "actor start", "actor call", "fresh workers on quarters of a device"
FASTER = {FRESH: 100.0, LIVE: 30.0, CALL: 30.0}
"""How many times faster than Ray we are to be at least."""

Times = dict[tuple[str, str], float]
"""Seconds by what was measured and who did it."""


class Answer:
    """An actor that does nothing."""

    def get(self) -> int:
        """Answer."""
        return 42


def nothing() -> int:
    """A task that does nothing."""
    return 42


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure everything, the floor first: it forks us, before there is more than one thread."""
    calls = CALLS * rounds
    times: Times = {(FRESH, "floor"): median(_fork_round_trip, calls)}
    times[LIVE, "floor"] = times[CALL, "floor"] = _pipe_round_trip(10 * calls)
    times |= _executor("ProcessPoolExecutor", ProcessPoolExecutor(max_workers=2), calls, rounds)
    times |= _anyaccel(calls, rounds)
    times |= _loky(calls, rounds)
    times |= _ray(calls, rounds)
    return list(_rows(times))


def _rows(times: Times) -> Iterator[Row]:
    for (group, who), seconds in times.items():
        ours = times[group, "anyaccel"]
        limit = FASTER.get(group) if who == "Ray" else None
        yield Row(
            what=f"{group}, {who}", seconds=seconds, ratio=seconds / ours, reference=f"{group}, anyaccel",
            budget="" if limit is None else f"at least {limit:g}x ours",
            kept=None if limit is None else seconds >= limit * ours, group=group, who=who,
        )  # fmt: skip


def _anyaccel(calls: int, rounds: int) -> Times:
    import anyaccel

    with state(), anyaccel.Pool("GPU:1", machine=MACHINE, preload=[__name__]) as pool:
        live = pool.options(max_calls=0)
        quarter = pool.options(needs="GPU:0.25")
        times = {
            FRESH: median(lambda: pool.submit(nothing).result(), calls),
            LIVE: median(lambda: live.submit(nothing).result(), calls),
            BUSY: _throughput(live, rounds, TASKS),
            FRACTION: _throughput(quarter, rounds, QUARTERS),
            START: median(lambda: _use(pool.actor(Answer)), rounds),
        }
        actor = pool.actor(Answer)
        times[CALL] = median(lambda: actor.get().result(), calls)
        actor.close()
    return {(group, "anyaccel"): seconds for group, seconds in times.items()}


def _use(actor: Any) -> None:
    """Call an actor, and let it go."""
    actor.get().result()
    actor.close()


def _executor(name: str, executor: Executor, calls: int, rounds: int) -> Times:
    with executor:
        executor.submit(nothing).result()
        return {
            (LIVE, name): median(lambda: executor.submit(nothing).result(), calls),
            (BUSY, name): _throughput(executor, rounds, TASKS),
        }


def _loky(calls: int, rounds: int) -> Times:
    try:
        import loky
    except ImportError:
        print("loky is not installed: pip install loky")
        return {}
    print(f"loky {loky.__version__}")
    return _executor("loky", loky.get_reusable_executor(max_workers=2), calls, rounds)


def _ray(calls: int, rounds: int) -> Times:
    try:
        import ray
    except ImportError:
        print('Ray is not installed: pip install "ray==2.60.0"')
        return {}
    print(f"Ray {ray.__version__}")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    try:
        gpu, quarter = ray.remote(num_gpus=1)(nothing), ray.remote(num_gpus=0.25)(nothing)
        cpu, kind = ray.remote(nothing), ray.remote(num_gpus=1)(Answer)
        ray.get([gpu.remote(), cpu.remote()])
        times = {
            FRESH: median(lambda: ray.get(gpu.remote()), 2 * rounds),
            LIVE: median(lambda: ray.get(cpu.remote()), calls),
            BUSY: _best(lambda: ray.get([cpu.remote() for _ in range(TASKS)]), rounds) / TASKS,
            FRACTION: _best(lambda: ray.get([quarter.remote() for _ in range(QUARTERS)]), 1) / QUARTERS,
            START: median(lambda: ray.get(kind.remote().get.remote()), rounds),
        }
        actor = kind.remote()
        times[CALL] = median(lambda: ray.get(actor.get.remote()), calls)
    finally:
        ray.shutdown()
    return {(group, "Ray"): seconds for group, seconds in times.items()}


def _throughput(executor: Any, rounds: int, tasks: int) -> float:
    """Seconds per task when many are submitted at once."""
    return _best(lambda: wait([executor.submit(nothing) for _ in range(tasks)]), rounds) / tasks


def _best(call: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _fork_round_trip() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"42")
        os._exit(0)
    os.close(write)
    os.read(read, 2)
    os.waitpid(pid, 0)
    os.close(read)


def _pipe_round_trip(calls: int) -> float:
    """One byte to a process that waits for it, and one back."""
    to_child, from_parent = os.pipe()
    to_parent, from_child = os.pipe()
    pid = os.fork()
    if pid == 0:
        while os.read(to_child, 1) == b"x":
            os.write(from_child, b"x")
        os._exit(0)

    def call() -> None:
        os.write(from_parent, b"x")
        os.read(to_parent, 1)

    seconds = median(call, calls)
    os.write(from_parent, b".")
    os.waitpid(pid, 0)
    for descriptor in (to_child, from_parent, to_parent, from_child):
        os.close(descriptor)
    return seconds
