"""On a worker of Dask: what is on its machine, and our tasks, which have workers of our own run the calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from anyaccel import detect
from anyaccel.engines.remote import (
    ActorHost,
    Answer,
    NodeAdapter,
    Order,
    PoolSpec,
    Started,
    close_host,
    load_cached,
    make_pickled,
    run_call,
    without_durations,
)
from anyaccel.ledger import find
from anyaccel.model import Allocation, Inventory, encode
from anyaccel.pool import CPU, Broker, Options, broker_of
from distributed import Worker, WorkerPlugin, get_worker
from distributed.utils import sync
from distributed.worker import secede as _secede

from anyaccel_dask import PREFIX

T = TypeVar("T")
secede: Any = _secede  # it has no types


class LostError(Exception):
    """A call was begun before, on a worker that has died."""


class RecalledError(Exception):
    """A call is not wanted any more, and nobody has begun with it."""


class Announcer(WorkerPlugin):
    """Tells Dask which devices a worker has, and us which tasks nobody wants any more."""

    name = "anyaccel"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Advertise what is on the machine."""
        inventory = await advertise(worker)
        data = pickle.dumps(inventory)
        told = json.dumps(encode(inventory), sort_keys=True)
        await worker.scheduler.anyaccel_join(
            worker=worker.address,
            name=name_of(worker),
            machine=await _in_thread(machine_name),
            digest=hashlib.sha256(told.encode()).hexdigest()[:16],
            inventory=data,
        )

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:  # noqa: ARG002
        """Hear what becomes of a task: Dask does not end what runs."""
        if finish in {"released", "cancelled", "forgotten"} and (ended := _unwanted.get(key)) is not None:
            ended.set()


async def advertise(worker: Worker) -> Inventory:
    """Tell Dask which devices a worker has, unless it was started with resources of these names."""
    inventory = await _in_thread(node_inventory)
    resources = quantities(inventory)
    if not resources.keys() <= worker.state.total_resources.keys():
        await worker.set_resources(**resources)
    return inventory


def node_inventory() -> Inventory:
    """What is on this machine, as far as this worker may use it."""
    return without_durations(detect())


def quantities(inventory: Inventory) -> dict[str, float]:
    """Devices by resource, and by type."""
    found: dict[str, float] = {}
    for device in inventory.usable:
        for name in {device.resource, device.type}:
            found[name] = found.get(name, 0) + 1
    return found


def name_of(worker: Worker) -> str:
    """What to call a worker in messages."""
    address = worker.address.partition("://")[2]
    return f"{worker.name} ({address})" if isinstance(worker.name, str) and worker.name != worker.address else address


def machine_name() -> str:
    """Equal for processes that share the devices of a machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {find(os.environ).path}"


class DaskNodeAdapter(NodeAdapter):
    """What Dask knows of this machine, for one pool."""

    def __init__(self, spec: PoolSpec) -> None:
        self.name = name_of(get_worker())
        self._shared = spec.settings.shared
        self._options: dict[Order, Options] = {}

    @property
    def broker(self) -> Broker:
        """That of the machine: of the devices that serve a call, it chooses."""
        return broker_of(None, None, shared=self._shared)

    def options(self, order: Order) -> Options:
        """How workers are to run a call."""
        if order not in self._options:
            self._options[order] = Options.make(needs=order.request, max_calls=order.max_calls, timeout=order.timeout)
        return self._options[order]

    def expected(self, options: Options) -> Allocation | None:
        """Nobody knows before it runs."""
        return CPU if options.needs is None else None


_unwanted: dict[str, threading.Event] = {}
"""By key of a task that runs here: set when nobody wants it any more."""
_actors: dict[str, ActorHost] = {}


class _Task:
    """A task of ours that runs in this thread.

    Args:
        key: Its key among those of its pool.
        devices: Whether it leaves the processors to others.
    """

    def __init__(self, key: str, *, devices: bool) -> None:
        self.key = key
        self.unwanted = threading.Event()
        self._devices = devices
        self._name = f"{PREFIX}{key}"
        self._worker = get_worker()

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """While it runs; nobody else runs it.

        Raises:
            LostError: When somebody has.
            RecalledError: When nobody wants it any more.
        """
        _unwanted[self._name] = self.unwanted
        try:
            word = sync(self._worker.loop, self._worker.scheduler.anyaccel_begin, key=self._name)
            if word != "run":
                raise (LostError if word == "again" else RecalledError)(self.key)
            if self._devices:
                secede()
            yield
        finally:
            del _unwanted[self._name]

    def tell(self, **news: object) -> None:
        """Tell the pool."""
        self._worker.log_event(topic(self.key), {"key": self.key, **news})

    @property
    def address(self) -> str:
        """Where it runs."""
        return str(self._worker.address)


def topic(key: str) -> str:
    """Of events for the pool of a key."""
    return f"anyaccel {key.partition('/')[0]}"


def run(spec: bytes, call: tuple[bytes, str, str | None], data: bytes, buffers: tuple[bytes, ...]) -> bytes:
    """Run one call: the body of our task.

    Args:
        spec: A pickled :class:`~anyaccel.engines.remote.messages.PoolSpec`.
        call: A pickled :class:`~anyaccel.engines.remote.messages.Order`; the key of the call in its pool; and where its
            output goes, or None.
        data: What to call, pickled, with
        buffers: what it refers to.

    Returns:
        A pickled :class:`~anyaccel.engines.remote.messages.Answer`.
    """
    order, key, log = call

    def begun(started: Started) -> None:
        task.tell(started=pickle.dumps(started))

    task = _Task(key, devices=load_cached(order).request is not None)
    with task.begun():
        body = make_pickled(data, buffers)
        return pickle.dumps(run_call(spec, DaskNodeAdapter, order, log, body, ended=task.unwanted.is_set, begun=begun))


def hold(spec: bytes, order: bytes, key: str) -> bytes:
    """Host an actor until it has gone: the body of our task. Returns a pickled answer that says why it has."""
    task = _Task(key, devices=True)
    with task.begun():
        host = ActorHost(spec, DaskNodeAdapter, order)
        _actors[key] = host
        try:
            task.tell(hosted=pickle.dumps(host.started()), worker=task.address)
            return pickle.dumps(host.ended(task.unwanted.is_set))
        finally:
            del _actors[key]


async def on_actor(key: str, method: str, *arguments: Any) -> Answer | None:
    """Call a method of the host of an actor."""
    if key not in _actors:
        raise LostError(key)
    answer: Answer | None = await _in_thread(partial(getattr(_actors[key], method), *arguments))
    return answer


async def end(pool: str) -> None:
    """A pool has ended: return when its workers here have."""
    await _in_thread(partial(close_host, pool))


async def _in_thread(function: Callable[[], T]) -> T:
    """Call a function beside the loop, also while the interpreter ends, when no executor takes anything."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)

    threading.Thread(target=run, name="anyaccel dask", daemon=True).start()
    return await asyncio.wrap_future(done)


async def dask_setup(worker: Worker) -> None:
    """Advertise the devices of a worker from its start: ``dask worker --preload anyaccel_dask.node``."""
    await advertise(worker)
