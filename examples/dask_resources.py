"""Tasks of Dask on devices of their own: workers say what their machine has, and each task runs with a part of it.

Dask counts; a shared scheduler in each worker chooses the devices, so that two workers of one machine, and whatever
else runs there, never give one device twice.

ANYACCEL_MACHINE=sim:H100:2 python examples/dask_resources.py
"""

import asyncio
import subprocess
import sys
from collections import Counter

import anyaccel
from dask.distributed import Client, LocalCluster, Worker, WorkerPlugin, get_worker


class Devices(WorkerPlugin):
    """What a worker knows of the devices of its machine."""

    name = "devices"

    async def setup(self, worker: Worker) -> None:
        """Say how many devices of each resource there are, as Dask counts them."""
        inventory = anyaccel.detect()
        self.scheduler = anyaccel.open_scheduler(inventory, shared=True)
        await worker.set_resources(**Counter(device.resource for device in inventory.devices if device.usable))


def resources(request: str) -> dict[str, float]:
    """What Dask must count for a request; each term names a resource."""
    counted: Counter[str] = Counter()
    for term in anyaccel.parse_request(request).terms:
        counted[term.names[0]] += term.units
    return {name: units / 10_000 for name, units in counted.items()}


def run(request: str, command: list[str]) -> str:
    """Run a command on devices that a worker chooses, once the machine has them free; returns what it prints."""
    scheduler = get_worker().plugins["devices"].scheduler
    allocation = asyncio.run(scheduler.acquire(request, note="a task of Dask"))
    try:
        environment = anyaccel.worker_environment(allocation, scheduler.inventory).values
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    finally:
        scheduler.release(allocation)


def main() -> None:
    """Run six tasks on two workers of one machine."""
    program = "import anyaccel; print(*(device.name for device in anyaccel.current().devices), end='')"
    command = [sys.executable, "-c", program]
    with LocalCluster(n_workers=2, threads_per_worker=4, dashboard_address=":0") as cluster, Client(cluster) as client:
        client.register_plugin(Devices())
        asked = ["GPU:2", *["GPU:1"] * 4, "GPU:0.5"]
        tasks = [client.submit(run, each, command, resources=resources(each), pure=False) for each in asked]
        for request, printed in zip(asked, client.gather(tasks), strict=True):
            print(f"{request} ran with {len(printed.split())}: {printed}")


if __name__ == "__main__":
    main()
