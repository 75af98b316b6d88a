"""Ten mistakes that a type checker finds, each on a line with this word as its comment."""

import anyaccel
from right import Model, fetch, tokens, train


def main() -> None:
    anyaccel.Pool("A1:1", max_worker=2)  # mistake
    with anyaccel.Pool("A1:1", mask="uuid") as pool:  # mistake
        pool.options(retry=2)  # mistake
        pool.submit(train, "fast")  # mistake
        pool.submit(train)  # mistake
        loss: str = pool.submit(train, 0.1).result()  # mistake
        length: str = pool.submit(fetch, "name").result()  # mistake
        pool.map(train, ["fast"])  # mistake
        model = pool.actor(Model, 3)  # mistake
        score: str = model.call(Model.score, 21).result()  # mistake
        print(loss, length, score, list(pool.stream(tokens, "to be")))
