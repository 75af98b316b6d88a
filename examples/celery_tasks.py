"""Celery tasks on devices: each process of a worker takes a device for its first task and keeps it until it ends.

pip install celery
cd examples
ANYACCEL_MACHINE=sim:H100:2 celery -A celery_tasks worker --concurrency 2
python -c 'from celery_tasks import score; print(score.delay(21).get(timeout=60))'

Without CELERY_BROKER_URL and CELERY_RESULT_BACKEND, messages and results are files in ./celery-data.
"""

import os
from functools import cache
from typing import Any

import anyaccel
from celery import Celery, Task

app = Celery("celery_tasks")
if "CELERY_BROKER_URL" not in os.environ:
    names = ("in", "out", "control", "results")
    folders = {name: os.path.abspath(f"celery-data/{'messages' if name in ('in', 'out') else name}") for name in names}
    for folder in folders.values():
        os.makedirs(folder, exist_ok=True)
    app.conf.update(
        broker_url="filesystem://",
        broker_transport_options={
            "data_folder_in": folders["in"],
            "data_folder_out": folders["out"],
            "control_folder": folders["control"],
        },
        result_backend=f"file://{folders['results']}",
    )


@cache  # once in each process of the worker
def devices() -> anyaccel.ProcessLease:
    """Hold a device, and make this process see no other; waits until one is free."""
    return anyaccel.use("GPU:1", note="celery")


class OnDevice(Task):
    """A task that runs in a process with a device of its own. Import frameworks inside of it, not above."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        devices()
        return super().__call__(*args, **kwargs)


@app.task(base=OnDevice)
def score(x: float) -> dict[str, object]:
    return {"score": 2 * x, "device": anyaccel.current().devices[0].id, "process": os.getpid()}
