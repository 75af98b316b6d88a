"""The Ray engine: Ray places calls on nodes, where workers of our own run them."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from anyaccel.errors import WorkerStartError
from anyaccel.model import Request
from anyaccel.pool import Options, Pickled, PoolSettings
from anyaccel_cluster import Cluster, Driver, Order, last_line
from anyaccel_export.ray import PREDEFINED

from anyaccel_ray import node
from anyaccel_ray.cluster import Nodes
from anyaccel_ray.notices import NoticePoller, remove
from anyaccel_ray.plan import RayPlan

if TYPE_CHECKING:
    from anyaccel.pool import GangFuture

LARGE = 1 << 15
"""Size in bytes from which the pool's specification is stored once in Ray's object store."""
THREADS = 4
"""Threads of an actor's host: for one call, for ended(), for stop() and close(); one more for each concurrent call."""


def open_engine(settings: PoolSettings) -> Driver:
    """Make the engine of a pool on Ray.

    Raises:
        UsageError: When Ray is not installed, there is no cluster, or a setting is for the local engine.
    """
    settings.check_cluster("Ray")
    return Driver(RayCluster(settings.address), settings)


class RayCluster(Cluster[RayPlan]):
    """A Ray cluster in use by a pool.

    Attributes:
        ray: The module.
        nodes: The nodes.
    """

    title = "Ray"

    def __init__(self, address: str | None) -> None:
        super().__init__()
        self.nodes = Nodes(address)
        self.ray = self.nodes.ray
        # Ray must not retry: the pool retries calls itself, as often as its options say.
        self._run = self.ray.remote(max_calls=0, max_retries=0)(node.run)
        self._actors = self.ray.remote(max_restarts=0, max_task_retries=0)(node.RayActorHost)

    @property
    def connected(self) -> bool:
        return bool(self.ray.is_initialized())

    def open(self, driver: Driver, spec: bytes) -> None:
        self._watch = NoticePoller(driver, self.ray)
        self._spec = spec if len(spec) < LARGE else self.ray.put(spec)

    def find_plan(self, request: Request) -> RayPlan:
        self._check_connected()
        return self.nodes.find(request)

    def place(self, order: Order, plan: RayPlan, *, actor: bool, bundle: Any = None) -> Any:
        """Return our task, or the class of our actors, with its resources as options.

        Args:
            order: The order.
            plan: The plan of its request.
            actor: Whether it is an actor.
            bundle: The bundle of a placement group in which it runs, or None.

        Raises:
            WorkerStartError: When this process has left the cluster.
        """
        self._check_connected()
        # Actors and calls with devices ask for no processor: they are idle, or wait for a device, most of the time.
        wanted: dict[str, Any] = {"num_cpus": 0 if actor or plan.request is not None else 1}
        if plan.request is not None:
            resources = dict(plan.resources)
            wanted |= {"num_gpus": resources.pop(PREDEFINED, 0), "resources": resources}
            if plan.selector and bundle is None:
                wanted["label_selector"] = dict(plan.selector)
        if bundle is not None:
            wanted["scheduling_strategy"] = bundle
        if actor:
            return self._actors.options(max_concurrency=THREADS + order.concurrency - 1, **wanted)
        return self._run.options(name=order.name, **wanted)

    def run(self, place: Any, order: bytes, key: str, log: str | None, body: Pickled) -> Any:
        ref = place.remote(self._spec, pickle.dumps((order, key, log)), body.data, *map(bytes, body.buffers))
        self._watch.begin()
        return ref

    def host(self, place: Any, order: bytes, key: str) -> RayHost:  # noqa: ARG002
        host = RayHost(self, place.remote(self._spec, order))
        self._watch.begin()
        return host

    def future(self, ref: Any) -> Future[Any]:
        found: Future[Any] = ref.future()
        return found

    def cancel(self, key: str, ref: Any) -> None:  # noqa: ARG002
        if self.connected:
            self.ray.cancel(ref)

    def remove_call(self, key: str, *, left: bool) -> None:
        if left:
            remove(key)

    def explain_loss(self, error: BaseException) -> str:
        return last_line(error) if isinstance(error, self.ray.exceptions.RayTaskError) else ""

    def _check_connected(self) -> None:
        """Check that this process is connected: otherwise, Ray would start a cluster for the next call.

        Raises:
            WorkerStartError: When this process has left the cluster.
        """
        if not self.connected:
            raise WorkerStartError("this process has left the Ray cluster of the pool", hint="make a new pool")

    def tell(self, method: Any, *arguments: object) -> None:
        """Call a method of an actor of Ray without waiting for the answer."""
        if self.connected:  # else Ray would start a cluster for the call
            method.remote(*arguments)

    def kill(self, actor: Any) -> None:
        """Kill an actor of Ray."""
        if self.connected:
            self.ray.kill(actor)

    def gang(self, driver: Driver, options: Options, hosts: int, name: str, work: bytes) -> GangFuture[Any]:
        from anyaccel_ray.gangs import RayGang

        self._check_connected()
        gang = RayGang(driver, self, options, hosts, name)
        driver.add(gang.calls)
        gang.start(work)
        return gang.future

    def close(self) -> None:
        """Do nothing: idle hosts exit by themselves, and the connection belongs to the whole process."""


class RayHost:
    """An actor of Ray, host of an actor of the pool; see :class:`~anyaccel_cluster.cluster.RemoteHost`."""

    def __init__(self, cluster: RayCluster, actor: Any) -> None:
        self._cluster = cluster
        self._actor = actor
        self.started, self.ended = actor.started.remote, actor.ended.remote
        self.call = actor.call.remote

    def close(self) -> None:
        self._cluster.tell(self._actor.close)

    def stop(self, grace: float) -> None:
        self._cluster.tell(self._actor.stop, grace)

    def kill(self) -> None:
        self._cluster.kill(self._actor)
