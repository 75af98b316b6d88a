"""Beside Dask's scheduler: says on which worker a call with devices runs, first come first served.

Dask sends a task to a worker at once, by how busy the workers seem, and it waits there for the worker's resources even
when another worker has them free. So a call with devices is submitted with a resource that no worker has, which keeps
it on the scheduler, and is released to a worker that has its devices free. Dask counts them like any resource.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import time
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from anyaccel_dask import HOLD, NODES_TOPIC, PREFIX

_LOOK_MILLISECONDS = 250
"""How often to look for what nothing tells: a worker that runs now, a task of Dask's own that has ended."""
_JOIN_SECONDS = 30.0
"""How long a worker may take to say what is on its machine."""
_PART = 2.0**-20
"""What counts as nothing: less than any part of a device that can be asked for."""


class Dispatcher(SchedulerPlugin):
    """The one for all pools on a cluster."""

    name = "anyaccel"
    idempotent = True

    async def start(self, scheduler: Scheduler) -> None:
        """Listen to pools and workers."""
        self._scheduler: Any = scheduler
        self._inventories: dict[str, bytes] = {}
        self._nodes: dict[str, tuple[str, str, str]] = {}  # by address: name, machine, and digest of its inventory
        self._places: dict[str, Mapping[str, Mapping[str, float]]] = {}  # by digest: quantities
        self._held: dict[str, str] = {}  # key and place, in order
        self._placed: dict[str, str] = {}
        self._silent: set[str] = set()
        self._begun: set[str] = set()
        self._recalled: set[str] = set()
        for name in ("join", "nodes", "place", "begin", "recall"):
            self._scheduler.handlers[f"anyaccel_{name}"] = getattr(self, name)
        look = PeriodicCallback(self._serve, _LOOK_MILLISECONDS)
        self._scheduler.periodic_callbacks["anyaccel"] = look
        look.start()

    def join(self, worker: str, name: str, machine: str, digest: str, inventory: bytes) -> None:
        """A worker says what is on its machine."""
        self._inventories[digest] = inventory
        self._nodes[worker] = (name, machine, digest)
        self._scheduler.log_event(NODES_TOPIC, digest)

    async def nodes(self, known: Sequence[str]) -> Any:
        """The name and the digest of each node, and the inventories that somebody does not know yet.

        Another pool may have asked the workers just now what they have: it is waited for those that have not said it.
        """
        end = time() + _JOIN_SECONDS
        while silent := self._scheduler.workers.keys() - self._nodes.keys() - self._silent:
            if time() > end:
                self._silent |= silent
            await asyncio.sleep(_JOIN_SECONDS / 500)
        there = [(name, digest) for name, _, digest in self._nodes.values()]
        digests = {digest for _, digest in there}
        return there, {digest: self._inventories[digest] for digest in digests - set(known)}

    def place(self, place: str, wanted: Mapping[str, Mapping[str, float]]) -> None:
        """Say where calls of a place may run: quantities by digest of the node's inventory."""
        self._places[place] = wanted
        self._soon()

    def begin(self, key: str) -> str:
        """Say whether a worker may run a call: ``run`` once, ``again`` when it was begun before, or ``recalled``.

        Dask runs what was on a worker that has died once more, elsewhere. A call is run again by its pool, or never.
        """
        if key in self._recalled:
            return "recalled"
        if key in self._begun:
            return "again"
        self._begun.add(key)
        return "run"

    def recall(self, key: str) -> bool:
        """Let a call not be begun; False when it was."""
        if key in self._begun:
            return False
        self._recalled.add(key)
        return True

    def transition(self, key: Any, start: str, finish: str, *_: Any, **__: Any) -> None:
        """Hear what becomes of a task."""
        if finish == "no-worker" and isinstance(key, str) and key.startswith(PREFIX):
            restrictions = self._scheduler.tasks[key].resource_restrictions or {}
            for name in restrictions:
                if name.startswith(HOLD):
                    self._placed[key] = name.removeprefix(HOLD)
            if key in self._placed:  # it is new, or its worker has died
                self._held[key] = self._placed[key]
            self._soon()
        elif finish == "forgotten":
            self._held.pop(key, None)
            self._placed.pop(key, None)
            self._begun.discard(key)
            self._recalled.discard(key)
        if start == "processing" and self._held:
            self._soon()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:  # noqa: ARG002
        """A worker has gone."""
        self._nodes.pop(worker, None)
        self._silent.discard(worker)

    def _soon(self) -> None:
        """Look once the scheduler has done what it is doing."""
        self._scheduler.loop.add_callback(self._serve)

    def _serve(self) -> None:
        """Release what can run now. A call that cannot keeps those behind it from what it waits for."""
        kept: set[tuple[str, str]] = set()
        for key, place in list(self._held.items()):
            task = self._scheduler.tasks.get(key)
            if task is None or task.state != "no-worker":
                del self._held[key]
                continue
            if key in self._begun and self._scheduler.running:  # any worker will say so
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
            best = min(left, key=lambda worker: left[worker])  # where least is left: whole machines stay whole
            del self._held[key]
            task.resource_restrictions = dict(wanted[self._digest(best)])
            task.worker_restrictions = {best.address}
            self._scheduler.transitions({key: "processing"}, stimulus_id=f"anyaccel-{time()}")

    def _digest(self, worker: Any) -> str:
        return self._nodes.get(worker.address, ("", "", ""))[2]

    def _free(self, worker: Any, name: str) -> float:
        """What is left of a resource. Workers on one machine that have the same devices have them once together."""
        found = self._nodes[worker.address][1:]
        same = (
            each for address, each in self._scheduler.workers.items() if self._nodes.get(address, ("",))[1:] == found
        )
        used = sum(each.used_resources.get(name, 0) for each in same)
        return float(worker.resources.get(name, 0) - used)
