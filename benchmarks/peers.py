"""Ours beside its peers in one run: a fresh worker with a device, a live one, an actor, and tasks per second.

The peers are installed by their own command, ``pip install "ray==2.60.0" loky``; a peer that is not there is said to
be missing. Devices are simulated for us and logical for Ray, so that what is compared is launching, not hardware.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from measure import Row

MACHINE = "sim:H100:2"
CALLS, ROUNDS = 40, 5


class Answer:
    """An actor that does nothing."""

    def get(self) -> int:
        """Answer."""
        return 42


def nothing() -> int:
    """A task that does nothing."""
    return 42


def rows() -> list[Row]:
    """Measure everything, the floor first."""
    found = {"a bare fork and pipe round trip": _median(_fork_round_trip, CALLS)}
    pipe = _pipe_round_trip()
    found["a bare pipe round trip"] = pipe
    found |= _anyaccel()
    found |= _executor("ProcessPoolExecutor", ProcessPoolExecutor(max_workers=2))
    found |= _loky()
    found |= _ray()
    return [*_rows(found), *_verdicts(found)]


def _rows(found: dict[str, float]) -> Iterator[Row]:
    for what, seconds in found.items():
        yield Row(what=what, seconds=seconds)


def _verdicts(found: dict[str, float]) -> Iterator[Row]:
    """The ratios that have a budget."""
    budgets = [
        ("fresh worker, anyaccel", "a bare fork and pipe round trip", 4.0),
        ("live worker, anyaccel", "a bare pipe round trip", 3.0),
        ("actor call, anyaccel", "a bare pipe round trip", 3.0),
    ]
    for what, reference, limit in budgets:
        ratio = found[what] / found[reference]
        yield Row(
            what=what, seconds=found[what], ratio=ratio, reference=reference, budget=f"at most {limit:g}x {reference}",
            kept=ratio <= limit,
        )  # fmt: skip
    faster = [
        ("per task, anyaccel", "per task, ProcessPoolExecutor", 2.0),
        ("fresh worker, anyaccel", "fresh worker, Ray", 50.0),
        ("live worker, anyaccel", "live worker, Ray", 8.0),
        ("actor call, anyaccel", "actor call, Ray", 8.0),
    ]
    for what, peer, limit in faster:
        if peer in found:
            ratio = found[peer] / found[what]
            yield Row(
                what=f"{what} against {peer.rpartition(', ')[2]}", seconds=found[what], ratio=ratio, reference=peer,
                budget=f"at least {limit:g}x faster", kept=ratio >= limit,
            )  # fmt: skip


def _anyaccel() -> dict[str, float]:
    import anyaccel

    with _state(), anyaccel.Pool("GPU:1", machine=MACHINE, preload=[__name__]) as fresh:
        first = _median(lambda: fresh.submit(nothing).result(), CALLS)
        live_pool = fresh.options(max_calls=0)
        live = _median(lambda: live_pool.submit(nothing).result(), CALLS)
        per_task = _throughput(live_pool)
        start = time.perf_counter()
        actor = fresh.actor(Answer)
        actor.get().result()
        started = time.perf_counter() - start
        call = _median(lambda: actor.get().result(), CALLS)
        actor.close()
    return {
        "fresh worker, anyaccel": first,
        "live worker, anyaccel": live,
        "per task, anyaccel": per_task,
        "actor start, anyaccel": started,
        "actor call, anyaccel": call,
    }


def _executor(name: str, executor: Executor) -> dict[str, float]:
    with executor:
        executor.submit(nothing).result()
        live = _median(lambda: executor.submit(nothing).result(), CALLS)
        return {f"live worker, {name}": live, f"per task, {name}": _throughput(executor)}


def _loky() -> dict[str, float]:
    try:
        import loky
    except ImportError:
        print("loky is not installed: pip install loky", file=sys.stderr)
        return {}
    return _executor("loky", loky.get_reusable_executor(max_workers=2))


def _ray() -> dict[str, float]:
    try:
        import ray
    except ImportError:
        print('Ray is not installed: pip install "ray==2.60.0"', file=sys.stderr)
        return {}
    print(f"Ray {ray.__version__}", file=sys.stderr)
    ray.init(
        address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    try:
        gpu = ray.remote(num_gpus=1)(nothing)
        cpu = ray.remote(nothing)
        ray.get([gpu.remote(), cpu.remote()])
        fresh = _median(lambda: ray.get(gpu.remote()), 12)
        live = _median(lambda: ray.get(cpu.remote()), CALLS)
        start = time.perf_counter()
        actor = ray.remote(num_gpus=1)(Answer).remote()
        ray.get(actor.get.remote())
        started = time.perf_counter() - start
        call = _median(lambda: ray.get(actor.get.remote()), CALLS)
        start = time.perf_counter()
        ray.get([cpu.remote() for _ in range(500)])
        per_task = (time.perf_counter() - start) / 500
    finally:
        ray.shutdown()
    return {
        "fresh worker, Ray": fresh,
        "live worker, Ray": live,
        "per task, Ray": per_task,
        "actor start, Ray": started,
        "actor call, Ray": call,
    }


def _throughput(executor: Any) -> float:
    """Seconds per task when many are submitted at once."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        futures = [executor.submit(nothing) for _ in range(500)]
        for future in futures:
            future.result()
        best = min(best, (time.perf_counter() - start) / 500)
    return best


def _median(call: Callable[[], object], calls: int) -> float:
    call()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


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


def _pipe_round_trip() -> float:
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

    seconds = _median(call, 500)
    os.write(from_parent, b".")
    os.waitpid(pid, 0)
    return seconds


@contextmanager
def _state() -> Iterator[None]:
    """Leases of our own, so that a busy machine changes nothing."""
    with tempfile.TemporaryDirectory() as directory:
        before = os.environ.get("ANYACCEL_STATE_DIR")
        os.environ["ANYACCEL_STATE_DIR"] = directory
        try:
            yield
        finally:
            if before is None:
                del os.environ["ANYACCEL_STATE_DIR"]
            else:
                os.environ["ANYACCEL_STATE_DIR"] = before
