"""A Prefect flow whose tasks run on devices: each waits until one is free, also beside other programs.

pip install prefect
ANYACCEL_MACHINE=sim:H100:2 python examples/prefect_flow.py
"""

import anyaccel
from prefect import flow, task


def fit(rate: float) -> float:
    """Stands for hours on a device; runs in a fresh process that sees no other."""
    return (rate - 0.2) ** 2


@task(retries=2)
def train(rate: float) -> float:
    with anyaccel.Pool("GPU:1", timeout=3600) as pool:
        return pool.submit(fit, rate).result()


@flow
def search(rates: list[float]) -> float:
    losses = train.map(rates).result()
    return rates[losses.index(min(losses))]


if __name__ == "__main__":
    print("best rate:", search([1.0, 0.1, 0.5, 0.01]))
