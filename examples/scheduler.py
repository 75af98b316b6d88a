"""A scheduler of one's own: jobs are processes that wait for devices, also while the machine loses and gets some.

ANYACCEL_MACHINE=sim:H100:2 python examples/scheduler.py
"""

import asyncio
import os
import sys

import anyaccel


class ToyScheduler:
    """Runs each job as a process of its own, on devices of its own."""

    def __init__(self) -> None:
        self.devices = anyaccel.open_scheduler(anyaccel.detect(), shared=True)
        self.news: asyncio.Queue[str] = asyncio.Queue()

    async def follow(self) -> None:
        """Keep up with the machine."""
        async for change in anyaccel.watch(since=self.devices.inventory, every=0.1):
            self.devices.update(change.inventory)
            self.news.put_nowait(f"machine: {len(change.added)} added, {len(change.lost)} lost")

    async def run(self, name: str, request: str, stop: asyncio.Event, priority: int = 0) -> None:
        """Run a job until it is told to stop."""
        allocation = await self.devices.acquire(request, priority=priority, note=name)
        try:
            environment = anyaccel.worker_environment(allocation, self.devices.inventory).values
            command = [sys.executable, "-c", "input(); print(end='ended')"]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe)
            self.news.put_nowait(f"{name}: runs on device {allocation.devices[0].index}")
            await stop.wait()
            printed, _ = await process.communicate(b"\n")
            self.news.put_nowait(f"{name}: {printed.decode()}")
        finally:
            self.devices.release(allocation)


async def main() -> None:
    """Lose a device and add one, with jobs running."""
    scheduler, stop = ToyScheduler(), asyncio.Event()
    follower = asyncio.create_task(scheduler.follow())
    async with asyncio.TaskGroup() as jobs:
        for name in ("a", "b"):
            jobs.create_task(scheduler.run(name, "GPU", stop))
            print(await scheduler.news.get())
        waiting = jobs.create_task(scheduler.run("c", "GPU", stop))
        os.environ["ANYACCEL_MACHINE"] = "sim:H100:1"  # device 1 falls off the bus, with a job on it
        print(await scheduler.news.get())
        print("waiting:", *(ticket.note for ticket in scheduler.devices.pending()))
        os.environ["ANYACCEL_MACHINE"] = "sim:H100:3"  # it is back, still held, and there is one more
        print(*sorted([await scheduler.news.get(), await scheduler.news.get()]), sep="\n")
        stop.set()
        print(*sorted([await scheduler.news.get() for _ in range(3)]), sep="\n")
    follower.cancel()
    print("waiting:", len(scheduler.devices.pending()), "done:", waiting.done())


asyncio.run(main())
