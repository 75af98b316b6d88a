"""Four Parsl workers on a mixed machine; each prints the masks that it sees.

docs/how-to/under-your-scheduler.md says how to run it.
"""

import parsl
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider

WORKERS = [
    "H100:1",
    "H100:1",
    "TPU-V4:1",
    "TPU-V4:1",
]  # a request for each worker, where Parsl expects a number of a GPU


@parsl.python_app
def masks(directory: str, number: int) -> str:
    """Wait until each worker runs such a task, and return the masks of this one."""
    import os
    import pathlib
    import time

    (pathlib.Path(directory) / str(os.getpid())).touch()
    while len(os.listdir(directory)) < number:
        time.sleep(0.05)
    names = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")
    return ", ".join(f"{name}={os.environ.get(name)!r}" for name in names)


if __name__ == "__main__":
    import tempfile

    executor = HighThroughputExecutor(
        available_accelerators=WORKERS,
        max_workers_per_node=len(WORKERS),
        cores_per_worker=0.1,
        address="127.0.0.1",
        encrypted=False,
        provider=LocalProvider(init_blocks=1, max_blocks=1),
    )
    with tempfile.TemporaryDirectory() as directory, parsl.load(Config(executors=[executor], run_dir="parsl-runs")):
        futures = [masks(directory, len(WORKERS)) for _ in WORKERS]
        print(*sorted(future.result() for future in futures), sep="\n")
