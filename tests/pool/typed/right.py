"""Calls of a pool as a type checker wants them; mistakes.py has one mistake in each of ten of them."""

from collections.abc import Iterator
from concurrent.futures import as_completed

import anyaccel


def train(rate: float, steps: int = 1) -> float:
    return rate * steps


async def fetch(name: str) -> int:
    return len(name)


def tokens(text: str) -> Iterator[str]:
    yield from text.split()


class Model:
    def __init__(self, name: str) -> None:
        self.name = name

    def score(self, value: int) -> int:
        return 2 * value

    async def answer(self, question: str) -> str:
        return question.upper()


def main() -> None:
    limit: anyaccel.Duration = "10m"
    with anyaccel.Pool("A1:1", machine="sim:A1:8", max_workers=8, timeout="90m", enforce="try") as pool:
        several = pool.options(needs="A1:2", retries=2, timeout="1:30:00")
        loss: float = several.submit(train, 0.1, steps=3).result()
        length: int = pool.submit(fetch, "name").result("1h")
        losses: list[float] = list(pool.map(train, [0.1, 0.2], [1, 2], progress=True, timeout=limit))
        lengths: list[int] = sorted(pool.map_unordered(fetch, ["a", "b"], batch=2))
        words: list[str] = list(pool.stream(tokens, "to be"))
        ranked: list[float] = pool.gang(1, train, 0.1).result()
        future: anyaccel.CallFuture[float] = pool.submit(train, 0.3)
        finished: list[float] = [each.result() for each in as_completed([future, pool.submit(train, 0.4)])]
        model = pool.actor(Model, "small")
        score: int = model.call(Model.score, 21).result()
        answer: str = model.call(Model.answer, "why").result()
        models = pool.actors(Model, 2, "small")
        scores: list[int] = list(models.map(Model.score, [1, 2]))
        print(loss, length, losses, lengths, words, ranked, future.result(), sorted(finished), score, answer, scores)
        print(model.score(1).result(), pool.starmap(train, [(0.1, 2)]), list(models.map("score", [3])))
