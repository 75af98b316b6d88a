"""The Dask engine: calls are tasks of Dask, whose workers host workers of our own."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from itertools import count
from typing import TYPE_CHECKING, Any

from anyaccel.errors import UsageError, WorkerStartError
from anyaccel.model import UNITS_PER_DEVICE, Inventory, Request, field
from anyaccel.pool import Options, Pickled, PoolSettings, loads
from anyaccel.scheduler import Choice, serves
from anyaccel.vendors import KnownNames, validate
from anyaccel_cluster import (
    Answer,
    Cluster,
    Driver,
    Order,
    Plan,
    Started,
    describe_nodes,
    find_fitting,
    get_outcome,
    last_line,
)

from anyaccel_dask import HOLD, NODES_TOPIC, PREFIX, topic
from anyaccel_dask.connection import connect

if TYPE_CHECKING:
    from anyaccel.pool import GangFuture

LARGE = 1 << 20
"""Size in bytes from which arguments are scattered to workers instead of passing through the scheduler."""


def open_engine(settings: PoolSettings) -> Driver:
    """Make the engine of a pool on Dask.

    Raises:
        UsageError: When Dask is not installed, there is no cluster, or a setting is for the local engine.
    """
    settings.check_cluster("Dask")
    return Driver(DaskCluster(settings.address), settings)


class DaskPlan(Plan):
    """The plan of a request on Dask.

    Attributes:
        place: Id of the plan in the dispatcher.
        wanted: Quantities of resources by digest of a node's inventory.
    """

    place: str = ""
    wanted: dict[str, dict[str, float]] = field(default_factory=dict)


class DaskCluster(Cluster[DaskPlan]):
    """A Dask cluster in use by a pool."""

    title = "Dask"

    def __init__(self, address: str | None) -> None:
        super().__init__()
        self._connection = connect(address)
        self._client: Any = self._connection.client
        self._inventories: dict[str, Inventory] = {}
        self._nodes: list[tuple[str, str]] = []
        self._numbers = count()
        self._futures: dict[str, Any] = {}
        self._hosted: dict[str, DaskHost] = {}

    @property
    def connected(self) -> bool:
        return bool(self._client.status == "running")

    def open(self, driver: Driver, spec: bytes) -> None:
        from anyaccel_dask import node

        self._node = node
        self._driver = driver
        self._spec = spec
        self._topic = topic(driver.name)
        self._client.subscribe_topic(self._topic, self._on_news)
        self._client.subscribe_topic(NODES_TOPIC, self._on_node)
        self._ask("add_pool", pool=driver.name, client=self._client.id)

    def refresh(self) -> None:
        """Fetch the list of nodes; if it has changed, tell the dispatcher where the calls of each plan may run."""
        nodes, more = self._ask("nodes", known=list(self._inventories))
        self._inventories |= {digest: pickle.loads(data) for digest, data in more.items()}  # noqa: S301 - of our node
        if (nodes := sorted(map(tuple, nodes))) == self._nodes:
            return
        self._nodes = nodes
        for request, plan in list(self._plans.items()):
            with contextlib.suppress(Exception):  # its only node has gone, and may come back
                found = self._quantities(request)
                if found and plan.place:
                    plan.wanted.update(found)
                    self._ask("place", place=plan.place, wanted=plan.wanted)
                else:
                    del self._plans[request]

    def _quantities(self, request: Request) -> dict[str, dict[str, float]]:
        """Return the quantities on each node that can serve a request, by digest; empty for the CPU."""
        names: dict[str, list[str]] = {}
        for name, digest in self._nodes:
            names.setdefault(digest, []).append(name)
        digests = list(names)
        kinds = [(describe_nodes(names[digest]), self._inventories[digest]) for digest in digests]
        found = find_fitting(request, kinds, lambda number: (_wanted(request, kinds[number][1]), ""))
        if not found.served:
            found.refuse(request)
        return {digests[number]: quantities for number, quantities in found.served.items()}

    def check_nodes(self, request: Request) -> None:
        with self._lock:  # not the plan, which is kept when its nodes have gone
            self.refresh()
            self._quantities(request)

    def find_plan(self, request: Request) -> DaskPlan:
        wanted = self._quantities(request)
        if not wanted:
            return DaskPlan()
        plan = DaskPlan(request=request, place=f"{self._driver.name}/{next(self._numbers)}", wanted=wanted)
        self._ask("place", place=plan.place, wanted=wanted)
        return plan

    def place(self, order: Order, plan: DaskPlan, *, actor: bool) -> dict[str, Any]:  # noqa: ARG002
        told: dict[str, Any] = {"pure": False, "priority": 1 if actor else 0}
        if plan.request is not None:
            told["resources"] = {f"{HOLD}{plan.place}": 1}
        return told

    def run(self, place: dict[str, Any], order: bytes, key: str, log: str | None, body: Pickled) -> Future[Any]:
        buffers: Any = tuple(map(bytes, body.buffers))
        data: Any = body.data
        if body.size > LARGE:
            data, buffers = self._client.scatter([data, buffers], hash=False)
        return self._submit(key, place, self._node.run, self._spec, (order, key, log), data, buffers)

    def host(self, place: dict[str, Any], order: bytes, key: str) -> DaskHost:
        self._hosted[key] = host = DaskHost(self, key)
        host.follow(self._submit(key, place, self._node.hold, self._spec, order, key))
        return host

    def _submit(self, key: str, told: dict[str, Any], function: Callable[..., bytes], *arguments: Any) -> Future[Any]:
        future = self._client.submit(function, *arguments, key=f"{PREFIX}{key}", **told)
        self._futures[key] = future
        return self._spawn(_value(future))

    def cancel(self, key: str, ref: Any) -> None:  # noqa: ARG002
        """Cancel the task of a call: Dask tells its worker, which stops the call."""
        future = self._futures.get(key)
        if future is not None and self.connected:
            self._spawn(self._cancel(future))

    async def _cancel(self, future: Any) -> None:
        await self._client.cancel([future], force=True, asynchronous=True)

    def remove_call(self, key: str, *, left: bool) -> None:  # noqa: ARG002
        self._futures.pop(key, None)  # the last reference: Dask forgets the task, too
        self._hosted.pop(key, None)

    def explain_loss(self, error: BaseException) -> str:
        from distributed import KilledWorker
        from distributed.comm.core import CommClosedError

        died = (self._node.LostError, KilledWorker, CommClosedError, CancelledError, asyncio.CancelledError, OSError)
        if isinstance(error, died):
            return ""
        return last_line(error)

    def gang(self, driver: Driver, options: Options, hosts: int, name: str, work: bytes) -> GangFuture[Any]:  # noqa: ARG002
        raise UsageError(
            f"engine='dask' has no gangs, since Dask reserves nothing on several workers at once (got {hosts} hosts)",
            hint="use engine='ray', or engine='local' for a gang of one",
        )

    def call_actor(self, key: str, address: str, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the host of an actor; return a future of the answer."""
        return self._spawn(self._call_actor(key, address, method, *arguments))

    async def _call_actor(self, key: str, address: str, method: str, *arguments: Any) -> Any:
        found = await self._client.run(self._node.on_actor, key, method, *arguments, workers=[address])
        return found[address]

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the cluster may be shutting down
            if self.connected:
                self._client.unsubscribe_topic(self._topic)
                self._client.run(self._node.end, self._driver.name, on_error="ignore")
                self._ask("remove_pool", pool=self._driver.name)
        self._connection.close()

    def _on_news(self, event: tuple[float, dict[str, Any]]) -> None:
        """Handle the notice of a call or an actor that runs."""
        _, news = event
        if "hosted" in news:
            host = self._hosted.get(news["key"])
            if host is not None:
                host.on_hosted(loads(news["hosted"]), news["worker"])
        else:
            self._driver.on_started(news["key"], loads(news["started"]))

    def _on_node(self, _: object) -> None:
        """Refresh the plans, because calls that wait may run on a new node."""
        threading.Thread(target=self._refresh_now, name="anyaccel dask", daemon=True).start()

    def _refresh_now(self) -> None:
        with self._lock, contextlib.suppress(Exception):  # the next plan() tries again
            if self.connected:
                self.refresh()

    def _ask(self, what: str, **arguments: Any) -> Any:
        """Call a handler of the dispatcher.

        Raises:
            WorkerStartError: When the scheduler does not answer.
        """
        if (scheduler := self._client.scheduler) is None:  # Dask's client has closed
            raise WorkerStartError(
                f"the Dask scheduler at {self._connection.address} has gone",
                hint="make a new pool once it is there again",
            )
        try:
            return self._client.sync(getattr(scheduler, f"anyaccel_{what}"), **arguments)
        except OSError as error:
            raise WorkerStartError(
                f"the Dask scheduler at {self._connection.address} does not answer: {error}"
            ) from error

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._client.loop.asyncio_loop)


class DaskHost:
    """A task with the host of an actor; see :class:`~anyaccel_cluster.cluster.RemoteHost`."""

    def __init__(self, cluster: DaskCluster, key: str) -> None:
        self._cluster = cluster
        self._key = key
        self._address = ""
        self._started: Future[Started | Answer] = Future()
        self._ended: Future[Answer] = Future()

    def follow(self, task: Future[Any]) -> None:
        """Handle the end of the task."""
        task.add_done_callback(self._on_end)

    def _on_end(self, task: Future[Any]) -> None:
        value, error = get_outcome(task)
        answer = None if error is not None else loads(value)
        for each in (self._started, self._ended):
            if each.done():
                continue
            if error is not None:
                each.set_exception(error)
            else:
                each.set_result(answer)  # type: ignore[arg-type]

    def on_hosted(self, started: Started | Answer, address: str) -> None:
        """Handle the notice that the host has started at an address."""
        self._address = address
        if not self._started.done():
            self._started.set_result(started)

    def started(self) -> Any:
        return self._started

    def ended(self) -> Any:
        return self._ended

    def call(self, method: str, log: str | None, data: bytes, *buffers: bytes) -> Any:
        return self._cluster.call_actor(self._key, self._address, "call", method, log, data, *buffers)

    def close(self) -> None:
        self._tell("close")

    def stop(self, grace: float) -> None:
        self._tell("stop", grace)

    def kill(self) -> None:
        self._cluster.cancel(self._key, None)

    def _tell(self, method: str, *arguments: object) -> None:
        if self._address and self._cluster.connected:
            self._cluster.call_actor(self._key, self._address, method, *arguments)


async def _value(future: Any) -> Any:
    return await future


def _wanted(request: Request, inventory: Inventory) -> dict[str, float] | None:
    """Return the quantities of resources for a request; also of types, if the request has a single type."""
    grants = Choice(inventory, request, validate, KnownNames()).choose({})
    if grants is None:
        return None
    units: dict[str, int] = {}
    for grant in grants:
        types = {device.type for device in inventory.usable if serves(device, grant.term, inventory)}
        for share in grant.shares:
            for name in {share.device.resource, *(types if len(types) == 1 else ())}:
                units[name] = units.get(name, 0) + share.units
    # Multiples of 2**-20, which Dask's sums of floats keep exact.
    return {name: (own * 2**20 // UNITS_PER_DEVICE) / 2**20 for name, own in units.items()}
