"""In Dask's scheduler: assign calls with devices to workers, first come, first served.

Dask sends a task to a worker at once, by its estimate of the workers' load. There the task waits for the worker's
resources, even when another worker has them free. So a call with devices is submitted with a resource that no worker
has, which keeps the task on the scheduler. The dispatcher releases the task to a worker whose devices are free, and
Dask counts the devices like any resource.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from time import time
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from anyaccel_dask import HOLD, NODES_TOPIC, PREFIX, topic

_LOOK_MILLISECONDS = 250
"""Interval of the check for events without a hook: a worker that resumes, a task of Dask's own that ends."""
_JOIN_SECONDS = 30.0
"""Seconds that a worker may take to report its inventory."""
_CLIENT_SECONDS = 600.0
"""Seconds that a client may be away until its pools count as dead: it may connect again."""
_PART = 2.0**-20
"""Tolerance of sums: smaller than any share of a device."""


class Dispatcher(SchedulerPlugin):
    """The dispatcher of all pools on a cluster, a plug-in of the scheduler."""

    name = "anyaccel"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Register the handlers for pools and workers."""
        self._scheduler: Any = scheduler
        self._inventories: dict[str, bytes] = {}
        self._nodes: dict[str, tuple[str, str, str]] = {}  # by address of the worker: name, machine, inventory's digest
        self._places: dict[str, Mapping[str, Mapping[str, float]]] = {}  # by place: quantities by digest
        self._held: dict[str, str] = {}  # by key of a task that waits, in order: its place
        self._placed: dict[str, str] = {}
        self._silent: set[str] = set()
        self._pools: dict[str, str] = {}  # by name of the pool: its client
        self._away: dict[str, float] = {}  # by client: since when it is away
        self._begun: set[str] = set()
        for name in ("join", "nodes", "add_pool", "remove_pool", "place", "begin"):
            self._scheduler.handlers[f"anyaccel_{name}"] = getattr(self, name)
        look = PeriodicCallback(self._serve, _LOOK_MILLISECONDS)
        self._scheduler.periodic_callbacks["anyaccel"] = look
        look.start()

    def join(self, worker: str, name: str, machine: str, digest: str, inventory: bytes) -> None:
        """Record the inventory of a worker's machine, and announce the worker to the pools."""
        self._inventories[digest] = inventory
        self._nodes[worker] = (name, machine, digest)
        self._scheduler.log_event(NODES_TOPIC, digest)

    async def nodes(self, known: Sequence[str]) -> Any:
        """Return name and digest of each node, and the inventories whose digests are not in ``known``.

        Waits for workers that have not reported theirs: another pool may have registered the plug-in just now.
        """
        end = time() + _JOIN_SECONDS
        while silent := self._scheduler.workers.keys() - self._nodes.keys() - self._silent:
            if time() > end:
                self._silent |= silent
            await asyncio.sleep(_JOIN_SECONDS / 500)
        there = [(name, digest) for name, _, digest in self._nodes.values()]
        digests = {digest for _, digest in there}
        return there, {digest: self._inventories[digest] for digest in digests - set(known)}

    def add_pool(self, pool: str, client: str) -> None:
        """Record a pool, and forget those whose programs have died."""
        self._pools[pool] = client
        end = time() - _CLIENT_SECONDS
        for name in [name for name, owner in self._pools.items() if self._away.get(owner, end) < end]:
            self._away.pop(self._pools[name], None)
            self.remove_pool(name)

    def remove_pool(self, pool: str) -> None:
        """Forget a pool: its places, and the events that the scheduler keeps of its calls."""
        self._pools.pop(pool, None)
        for place in [place for place in self._places if place.partition("/")[0] == pool]:
            del self._places[place]
        with contextlib.suppress(AttributeError):  # not public, and a matter of memory only
            self._scheduler._broker._topics.pop(topic(pool), None)  # noqa: SLF001

    def place(self, place: str, wanted: Mapping[str, Mapping[str, float]]) -> None:
        """Record where calls of a place may run: quantities by digest of the node's inventory."""
        self._places[place] = wanted
        self._soon()

    def begin(self, key: str) -> bool:
        """Return whether a worker may run a call: only the first time.

        Dask runs the tasks of a dead worker again. Only the pool may do that, as often as its ``retries`` say.
        """
        first = key not in self._begun
        self._begun.add(key)
        return first

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Record a task of ours that waits for devices, forget a task that is over, and have waiting tasks assigned.

        Dask calls this at each change of a task's state. The assignment follows a new task of ours, and the end of any
        task on a worker.
        """
        if finish == "no-worker" and isinstance(key, str) and key.startswith(PREFIX):
            restrictions = self._scheduler.tasks[key].resource_restrictions or {}
            for name in restrictions:
                if name.startswith(HOLD):
                    self._placed[key] = name.removeprefix(HOLD)
            if key in self._placed:  # a new task, or one whose worker has died
                self._held[key] = self._placed[key]
            self._soon()
        elif finish == "forgotten":
            self._held.pop(key, None)
            self._placed.pop(key, None)
            self._begun.discard(key)
        if start == "processing" and self._held:
            self._soon()

    def add_client(self, scheduler: Scheduler, client: str) -> None:  # noqa: ARG002
        """Note that a client is there, perhaps again."""
        self._away.pop(client, None)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:  # noqa: ARG002
        """Note that a client of pools is away."""
        if client in self._pools.values():
            self._away[client] = time()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:  # noqa: ARG002
        """Remove a departed worker."""
        self._nodes.pop(worker, None)
        self._silent.discard(worker)

    def _soon(self) -> None:
        """Assign tasks once the scheduler has finished the current event."""
        self._scheduler.loop.add_callback(self._serve)

    def _serve(self) -> None:
        """Release tasks with free devices to a worker, the fullest that fits.

        A waiting task reserves the resources against later tasks. A task that has begun before goes to any worker,
        where :meth:`begin` refuses it.
        """
        kept: set[tuple[str, str]] = set()
        for key, place in list(self._held.items()):
            task = self._scheduler.tasks.get(key)
            if task is None or task.state != "no-worker":
                del self._held[key]
                continue
            if (
                key in self._begun and self._scheduler.running
            ):  # it must not run again, and begin() says so on any worker
                del self._held[key]
                task.resource_restrictions, task.worker_restrictions = {}, set()
                self._scheduler.transitions({key: "processing"}, stimulus_id=f"anyaccel-{time()}")
                continue
            wanted = self._places.get(place, {})
            able = [worker for worker in self._scheduler.running if self._digest(worker) in wanted]
            left = {}
            for worker in able:
                quantities = wanted[self._digest(worker)]
                if not any((worker.address, name) in kept for name in quantities):
                    rest = [self._free(worker, name) - quantity for name, quantity in quantities.items()]
                    if min(rest, default=0) > -_PART:
                        left[worker] = sum(rest)
            if not left:
                kept |= {(worker.address, name) for worker in able for name in wanted[self._digest(worker)]}
                continue
            best = min(left, key=lambda worker: left[worker])  # best fit: keeps whole machines free
            del self._held[key]
            task.resource_restrictions = dict(wanted[self._digest(best)])
            task.worker_restrictions = {best.address}
            self._scheduler.transitions({key: "processing"}, stimulus_id=f"anyaccel-{time()}")

    def _digest(self, worker: Any) -> str:
        return self._nodes.get(worker.address, ("", "", ""))[2]

    def _free(self, worker: Any, name: str) -> float:
        """Return the free quantity of a worker's resource. Workers of a machine share the same devices."""
        found = self._nodes[worker.address][1:]
        same = (
            each for address, each in self._scheduler.workers.items() if self._nodes.get(address, ("",))[1:] == found
        )
        used = sum(each.used_resources.get(name, 0) for each in same)
        return float(worker.resources.get(name, 0) - used)
