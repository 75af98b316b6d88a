"""Warm actors on eight devices serve 10,000 small requests, beside Ray's ActorPool and ProcessPoolExecutor in one run.

All of them live at the same time and take turns, so that ratios hold while the machine's speed drifts. Devices are
simulated for us and logical for Ray. Ray is installed by its own command, ``pip install "ray==2.60.0"``; when it is not
there, that is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from measure import Row, interleaved, state

DEVICES = 8
REQUESTS, BATCH = 10_000, 32
ROUNDS = 3
SINGLE, BATCHED = "request of a warm worker", f"request of a warm worker, {BATCH} in a message"
Serve = Callable[[range], Iterable[int]]
"""Serves a request for each number; returns the results."""


class Model:
    """What is made once in each worker, and small enough that the way there is what is measured."""

    def __init__(self, weight: int) -> None:
        self.weight = weight

    def score(self, x: int) -> int:
        """Serve one request."""
        return self.weight * x

    def score_each(self, batch: list[int]) -> list[int]:
        """Serve several."""
        return [self.weight * x for x in batch]


_model: list[Model] = []


def load() -> None:
    """Make the model of a worker of ProcessPoolExecutor."""
    _model.append(Model(2))


def score(x: int) -> int:
    """Serve one request there."""
    return _model[0].score(x)


def rows(rounds: int = ROUNDS) -> list[Row]:
    """Measure; each time is that of one request. To see that it works takes a tenth of the requests."""
    numbers = range(REQUESTS if rounds > 1 else REQUESTS // 10)
    serves: dict[tuple[str, str], Serve] = {}
    with ExitStack() as living:
        for who in (_executor, _anyaccel, _ray):  # the one first that forks us, before there are threads
            serves |= living.enter_context(who())
        calls = {" by ".join(key): _checked(serve, numbers) for key, serve in serves.items()}
        times = interleaved(calls, rounds)
    return [
        Row(
            what=f"{group}, {who}", seconds=(taken := times[f"{group} by {who}"]) / len(numbers),
            ratio=taken / times[f"{group} by anyaccel"], reference=f"{group}, anyaccel", group=group, who=who,
        )
        for group, who in sorted(serves, key=lambda key: (key[0], key[1] != "anyaccel"))
    ]  # fmt: skip


def _checked(serve: Serve, numbers: range) -> Callable[[], None]:
    """Serve all requests, and see to it that the results are right: who loses some is quick."""

    def call() -> None:
        found, wanted = sum(serve(numbers)), 2 * sum(numbers)
        if found != wanted:
            raise RuntimeError(f"the results of {len(numbers)} requests must add up to {wanted} (got {found})")

    return call


@contextmanager
def _executor() -> Iterator[dict[tuple[str, str], Serve]]:
    who = "ProcessPoolExecutor"
    with ProcessPoolExecutor(max_workers=DEVICES, initializer=load) as executor:
        yield {
            (SINGLE, who): lambda numbers: executor.map(score, numbers),
            (BATCHED, who): lambda numbers: executor.map(score, numbers, chunksize=BATCH),
        }


@contextmanager
def _anyaccel() -> Iterator[dict[tuple[str, str], Serve]]:
    import anyaccel

    with state(), anyaccel.Pool("GPU:1", machine=f"sim:H100:{DEVICES}", preload=[__name__]) as pool:
        actors = pool.actors(Model, DEVICES, 2)
        actors.ready.result()
        yield {
            (SINGLE, "anyaccel"): lambda numbers: actors.map("score", numbers),
            (BATCHED, "anyaccel"): lambda numbers: actors.map("score", numbers, batch=BATCH),
        }


@contextmanager
def _ray() -> Iterator[dict[tuple[str, str], Serve]]:
    try:
        import ray
        from ray.util import ActorPool
    except ImportError:
        print('Ray is not installed: pip install "ray==2.60.0"')
        yield {}
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local", num_cpus=DEVICES, num_gpus=DEVICES, include_dashboard=False, log_to_driver=False,
        logging_level="error",
    )  # fmt: skip
    try:
        actors = [ray.remote(num_gpus=1)(Model).remote(2) for _ in range(DEVICES)]
        pool: Any = ActorPool(actors)

        def single(numbers: range) -> Iterable[int]:
            found: Iterable[int] = pool.map(lambda actor, x: actor.score.remote(x), numbers)
            return found

        def batched(numbers: range) -> Iterable[int]:
            batches = [list(numbers[start : start + BATCH]) for start in range(0, len(numbers), BATCH)]
            return (x for found in pool.map(lambda actor, xs: actor.score_each.remote(xs), batches) for x in found)

        yield {(SINGLE, "Ray"): single, (BATCHED, "Ray"): batched}
    finally:
        ray.shutdown()
