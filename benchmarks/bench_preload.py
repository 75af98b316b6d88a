"""What a fresh worker costs whose call uses NumPy, SciPy or PyTorch: preloaded, imported by each, and in Ray's workers.

Each call takes a device and a fresh process, as is the default here and with Ray. It imports the library and
multiplies or solves something small. A library that is not installed is said to be missing, as is Ray. This file runs
as a script, so that its functions are those of users: no worker can import them.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from functools import partial
from typing import Any

from measure import Row, against, interleaved, state

ROUNDS, RAY_ROUNDS = 20, 3
PAUSE = 0.05
"""Seconds before each call: the next worker is forked ahead meanwhile, as it is while a call does something."""
BARE, TIMES = "fresh worker", 2.0
"""At most so many bare fresh workers for one whose library is preloaded."""


def nothing() -> float:
    """Use no library."""
    return 1.0


def multiply() -> float:
    """Multiply two matrices of ones with NumPy."""
    import numpy as np

    return float((np.ones((64, 64)) @ np.ones((64, 64)))[0, 0]) / 64


def solve() -> float:
    """Solve a system of equations with SciPy."""
    import numpy as np
    import scipy.linalg

    return float(scipy.linalg.solve(2 * np.eye(64), np.ones(64))[0]) * 2


def add() -> float:
    """Add up a matrix of ones with PyTorch. A product starts its threads first, which takes 1 to 15 ms here."""
    import torch

    return torch.ones(64, 64).sum().item() / 64**2


CALLS: dict[str, tuple[str, Callable[[], float]]] = {
    "NumPy": ("numpy", multiply),
    "SciPy": ("scipy.linalg", solve),
    "PyTorch": ("torch", add),
}


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure in a process of its own, and compare with the budget."""
    command = [sys.executable, __file__, str(rounds)]
    times: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    budgets = {name: TIMES if name.endswith(", preloaded") else None for name in times if name != BARE}
    return against(BARE, times, budgets)


def measure(rounds: int) -> dict[str, float]:
    """Median seconds of each call, in turns; those of Ray after them."""
    import anyaccel

    there = {}
    for name, (module, fn) in CALLS.items():
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            print(f"{name} is not installed: pip install {module.partition('.')[0]}", file=sys.stderr)
        else:
            there[name] = (module, fn)
    with state(), ExitStack() as pools:

        def pool(**options: Any) -> anyaccel.Pool:
            return pools.enter_context(anyaccel.Pool("GPU:1", machine="sim:H100:2", **options))

        bare = pool()
        calls = {BARE: _checked(partial(_result, bare, nothing))}
        for name, (module, fn) in there.items():
            ready = pool(preload=[module])
            calls[f"{BARE} with {name}, preloaded"] = _checked(partial(_result, ready, fn))
            calls[f"{BARE} with {name}"] = _checked(partial(_result, bare, fn))
        times = interleaved(calls, rounds, pause=PAUSE)
    return times | _ray({"": ("", nothing), **there}, min(rounds, RAY_ROUNDS))


def _result(executor: Executor, fn: Callable[[], float]) -> float:
    return executor.submit(fn).result()


def _checked(call: Callable[[], float]) -> Callable[[], None]:
    """A call whose result must be one: who computes nothing is quick."""

    def checked() -> None:
        found = call()
        if not math.isclose(found, 1):
            raise RuntimeError(f"the result of a call must be 1 (got {found})")

    return checked


def _ray(there: dict[str, tuple[str, Callable[[], float]]], rounds: int) -> dict[str, float]:
    try:
        import ray
    except ImportError:
        print('Ray is not installed: pip install "ray==2.60.0"', file=sys.stderr)
        return {}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="error"
    )
    try:
        calls = {}
        for name, (_, fn) in there.items():
            task = ray.remote(num_gpus=1)(fn)
            what = f"{BARE} of Ray" + (f" with {name}" if name else "")
            calls[what] = _checked(partial(_ray_result, ray, task))
        return interleaved(calls, rounds)
    finally:
        ray.shutdown()


def _ray_result(ray: Any, task: Any) -> float:
    found: float = ray.get(task.remote())
    return found


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
