"""On a worker of Dask: the inventory of its machine, and our tasks, which run calls in workers of our own."""

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
from anyaccel.ledger import find
from anyaccel.model import Allocation, Inventory, encode
from anyaccel.pool import CPU, Broker, Options, Pickled, broker_of
from anyaccel_cluster import (
    ActorHost,
    Answer,
    NodeAdapter,
    Order,
    PoolSpec,
    Started,
    close_host,
    load_cached,
    run_call,
    without_durations,
)
from distributed import Worker, WorkerPlugin, get_worker
from distributed.utils import sync
from distributed.worker import secede as _secede

from anyaccel_dask import PREFIX, topic

T = TypeVar("T")
secede: Any = _secede  # it has no types


class LostError(Exception):
    """Raised when a call has started before, on a worker that has died."""


class Announcer(WorkerPlugin):
    """A plug-in of workers: advertises devices, and stops calls whose task was cancelled."""

    name = "anyaccel"
    idempotent = True

    async def setup(self, worker: Worker) -> None:
        """Advertise the devices of the machine, and send the inventory to the dispatcher."""
        inventory = await advertise(worker)
        data = pickle.dumps(inventory)
        told = json.dumps(encode(inventory), sort_keys=True)
        await worker.scheduler.anyaccel_join(
            worker=worker.address,
            name=get_worker_name(worker),
            machine=await _in_thread(get_machine_name),
            digest=hashlib.sha256(told.encode()).hexdigest()[:16],
            inventory=data,
        )

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:  # noqa: ARG002
        """Mark a running call of a cancelled task as unwanted: Dask itself does not stop running calls."""
        if finish in {"released", "cancelled", "forgotten"} and (ended := _unwanted.get(key)) is not None:
            ended.set()


async def advertise(worker: Worker) -> Inventory:
    """Set the resources of a worker to the devices, unless set at the start of the worker."""
    inventory = await _in_thread(node_inventory)
    resources = quantities(inventory)
    if not resources.keys() <= worker.state.total_resources.keys():
        await worker.set_resources(**resources)
    return inventory


def node_inventory() -> Inventory:
    """Detect the devices of this worker."""
    return without_durations(detect())


def quantities(inventory: Inventory) -> dict[str, float]:
    """Return the number of usable devices by resource and by type."""
    found: dict[str, float] = {}
    for device in inventory.usable:
        for name in {device.resource, device.type}:
            found[name] = found.get(name, 0) + 1
    return found


def get_worker_name(worker: Worker) -> str:
    """Return the name of a worker in messages."""
    address = worker.address.partition("://")[2]
    return f"{worker.name} ({address})" if isinstance(worker.name, str) and worker.name != worker.address else address


def get_machine_name() -> str:
    """Return a name, equal for workers with the same devices and ledger of a machine."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {find(os.environ).path}"


class DaskNodeAdapter(NodeAdapter):
    """This machine, seen by a pool on Dask."""

    def __init__(self, spec: PoolSpec) -> None:
        self.name = get_worker_name(get_worker())
        self._shared = spec.settings.shared

    @property
    def broker(self) -> Broker:
        """The broker of the machine, which chooses the devices of a call."""
        return broker_of(None, None, shared=self._shared)

    def options(self, order: Order) -> Options:
        """Return the options of a call."""
        return Options(needs=order.request, max_calls=order.max_calls, timeout=order.timeout)

    def expected(self, options: Options) -> Allocation | None:
        """Return None for calls with devices, which are chosen when the call starts."""
        return CPU if options.needs is None else None


_unwanted: dict[str, threading.Event] = {}
"""Events by key of a running task, set when the task was cancelled."""
_actors: dict[str, ActorHost] = {}


class _Task:
    """A task of ours that runs in this thread.

    Args:
        key: Key of the call.
        devices: Whether the call has devices, so that its thread does not count as a busy processor.
    """

    def __init__(self, key: str, *, devices: bool) -> None:
        self.key = key
        self.unwanted = threading.Event()
        self._devices = devices
        self._name = f"{PREFIX}{key}"
        self._worker = get_worker()

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Context in which this worker owns the call.

        Raises:
            LostError: When the call has started before, on a worker that has died.
        """
        _unwanted[self._name] = self.unwanted
        try:
            if not sync(self._worker.loop, self._worker.scheduler.anyaccel_begin, key=self._name):
                raise LostError(self.key)
            if self._devices:
                secede()
            yield
        finally:
            del _unwanted[self._name]

    def tell(self, **news: object) -> None:
        """Send news about the call to its pool, as an event of Dask."""
        self._worker.log_event(topic(self.key), {"key": self.key, **news})

    @property
    def address(self) -> str:
        """Address of the worker."""
        return str(self._worker.address)


def run(spec: bytes, call: tuple[bytes, str, str | None], data: bytes, buffers: tuple[bytes, ...]) -> bytes:
    """Run a call: the function of our task.

    Args:
        spec: A pickled :class:`~anyaccel_cluster.cluster.PoolSpec`.
        call: A pickled :class:`~anyaccel_cluster.cluster.Order`, the key of the call, and the path of its log
            or None.
        data: The pickled function and arguments.
        buffers: Buffers that the pickle refers to.

    Returns:
        A pickled :class:`~anyaccel_cluster.cluster.Answer`.
    """
    order, key, log = call

    def begun(started: Started) -> None:
        task.tell(started=pickle.dumps(started))

    task = _Task(key, devices=load_cached(order).request is not None)
    with task.begun():
        body = Pickled(data, buffers)
        return pickle.dumps(run_call(spec, DaskNodeAdapter, order, log, body, ended=task.unwanted.is_set, begun=begun))


def hold(spec: bytes, order: bytes, key: str) -> bytes:
    """Host an actor until its end; return a pickled answer with the reason. The function of our task."""
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
    """Call a method of the host of an actor, in a thread of its own; return the answer.

    Raises:
        LostError: When the host is not on this worker.
    """
    if key not in _actors:
        raise LostError(key)
    answer: Answer | None = await _in_thread(partial(getattr(_actors[key], method), *arguments))
    return answer


async def end(pool: str) -> None:
    """Shut down the host of an ended pool; return after the exit of the workers."""
    await _in_thread(partial(close_host, pool))


async def _in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own: at exit of the interpreter, executors take no more work."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the future reports it
            done.set_exception(error)

    threading.Thread(target=run, name="anyaccel dask", daemon=True).start()
    return await asyncio.wrap_future(done)


async def dask_setup(worker: Worker) -> None:
    """Advertise the devices of a worker from its start: ``dask worker --preload anyaccel_dask.node``."""
    await advertise(worker)
