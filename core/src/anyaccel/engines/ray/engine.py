"""The engine that has Ray place calls, which workers of our own then run on the nodes."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anyaccel.engines.ray import tasks
from anyaccel.engines.ray.cluster import Nodes
from anyaccel.engines.ray.notices import Watch, remove, spare, spare_no_more
from anyaccel.engines.ray.plan import Plan
from anyaccel.engines.remote.cluster import hand_over, last_line
from anyaccel.engines.remote.driver import Driver, order_of
from anyaccel.model import Request
from anyaccel.pool.call import Options
from anyaccel.pool.engine import Setting
from anyaccel.pool.payload import Pickled

if TYPE_CHECKING:
    from anyaccel.pool.gang import GangFuture

LARGE = 1 << 15
"""Bytes from which what each call needs is stored once."""
THREADS = 4
"""Of an actor's host: for a call, for word of its end, and for whatever ends it; one more for each further call."""
_LOOK_UP_SECONDS = 0.2
"""How often somebody who waits for Ray looks whether there still is a reason to."""


def open_engine(setting: Setting) -> Driver:
    """Make it.

    Raises:
        UsageError: When Ray is not installed or not there, or an argument is for one machine.
    """
    setting.check_cluster("Ray")
    return Driver(RayCluster(setting.address), setting)


class RayCluster:
    """Ray, as one pool uses it; see :class:`~anyaccel.engines.remote.driver.Cluster`.

    Attributes:
        ray: The module.
        nodes: What there is.
    """

    title = "Ray"

    def __init__(self, address: str | None) -> None:
        self.nodes = Nodes(address)
        self.ray = self.nodes.ray
        self.plan = self.nodes.plan
        # Whatever dies is told at once, and run again by us where that was asked for.
        self._run = self.ray.remote(max_calls=0, max_retries=0)(tasks.run)
        self._actors = self.ray.remote(max_restarts=0, max_task_retries=0)(tasks.RayActorHost)
        self._spared: set[str] = set()

    @property
    def connected(self) -> bool:
        """Whether this process still belongs to it."""
        return bool(self.ray.is_initialized())

    def check(self, request: Request) -> None:
        """Raise the error of a request that no node can ever serve."""
        self.plan(request)

    def open(self, driver: Driver, spec: bytes) -> None:
        """Begin for a pool."""
        self._watch = Watch(driver, self.ray)
        self._spec = spec if len(spec) < LARGE else self.ray.put(spec)

    def place(self, name: str, options: Options, plan: Plan | None, *, actor: bool) -> tuple[Any, bytes]:
        """What to ask Ray for, and what to tell the host."""
        wanted, order = self.wanted(name, options, plan, actor=actor)
        if actor:
            return self._actors.options(max_concurrency=THREADS + options.concurrency - 1, **wanted), order
        return self._run.options(name=name, **wanted), order

    @staticmethod
    def wanted(name: str, options: Options, plan: Plan | None, *, actor: bool) -> tuple[dict[str, Any], bytes]:
        """The options of what to ask Ray for, and what to tell the host."""
        if plan is None or plan.request is None:
            # Actors are idle for most of the time, as calls with devices leave the processors to others.
            return {"num_cpus": 0 if actor else 1}, pickle.dumps(order_of(name, options, None))
        resources = dict(plan.resources)
        wanted: dict[str, Any] = {"num_cpus": 0, "num_gpus": resources.pop("GPU", 0), "resources": resources}
        if plan.selector:
            wanted["label_selector"] = dict(plan.selector)
        return wanted, pickle.dumps(order_of(name, options, plan.request, plan.terms))

    def run(self, place: Any, key: str, log: str | None, body: Pickled) -> Any:
        """Have a call run."""
        remote, order = place
        ref = remote.remote(self._spec, pickle.dumps((order, key, log)), body.data, *map(bytes, body.buffers))
        self._watch.begin()
        return ref

    def in_bundle(self, bundle: Any, wanted: dict[str, Any], name: str) -> Any:
        """The same as a part of what Ray has reserved."""
        wanted.pop("label_selector", None)  # the node is chosen
        return self._run.options(name=name, scheduling_strategy=bundle, **wanted)

    def host(self, place: Any, key: str) -> RayHost:  # noqa: ARG002
        """Have an actor hosted."""
        remote, order = place
        return RayHost(self, remote.remote(self._spec, order))

    def follow(self, ref: Any, hear: Callable[[Any, BaseException | None], None], wanted: Callable[[], bool]) -> None:
        """Have a value handed over in the thread of the reactor."""
        hand_over(ref.future(), hear, wanted)

    def attend(self, ref: Any, pending: Callable[[], bool], seconds: float | None) -> tuple[Any, Any] | None:
        """Wait for a value in this thread."""
        end = float("inf") if seconds is None else time.monotonic() + seconds
        while pending() and self.connected and (left := end - time.monotonic()) > 0:
            try:
                return self.ray.get(ref, timeout=min(left, _LOOK_UP_SECONDS)), None
            except self.ray.exceptions.GetTimeoutError:
                continue
            except Exception as error:  # noqa: BLE001 - Ray raises many kinds
                return None, error
        return None

    def cancel(self, key: str, ref: Any) -> None:
        """End a call."""
        if key in self._spared:
            spare_no_more(key)
        if self.connected:
            self.ray.cancel(ref)

    def recall(self, key: str, ref: Any) -> None:
        """End a call unless it runs."""
        self._spared.add(key)
        spare(key)
        if self.connected:
            self.ray.cancel(ref)

    def recalled(self, error: BaseException) -> bool:
        """Whether a call has ended because it was recalled."""
        return isinstance(error, self.ray.exceptions.TaskCancelledError)

    def forget(self, key: str, *, left: bool) -> None:
        """A call is over."""
        if key in self._spared:
            self._spared.discard(key)
            spare_no_more(key)
        if left:
            remove(key)

    def lost(self, error: BaseException) -> str:
        """Why Ray has no answer: the last line of what failed in our code there, or empty."""
        return last_line(error) if isinstance(error, self.ray.exceptions.RayTaskError) else ""

    def tell(self, method: Any, *arguments: object) -> None:
        """Call a method of an actor of Ray, and expect no answer."""
        if self.connected:  # else Ray would start a cluster to do that
            method.remote(*arguments)

    def kill(self, actor: Any) -> None:
        """End an actor of Ray."""
        if self.connected:
            self.ray.kill(actor)

    def gang(self, driver: Driver, options: Options, hosts: int, name: str, work: bytes) -> GangFuture:
        """Run a pickled call on several nodes at once."""
        from anyaccel.engines.ray.gangs import Gang

        gang = Gang(driver, self, options, hosts, name)
        driver.add(gang.calls)
        gang.start(work)
        return gang.future

    def close(self) -> None:
        """Hosts end by themselves, and the connection is of the whole process."""


class RayHost:
    """An actor of Ray that hosts one of ours; see :class:`~anyaccel.engines.remote.driver.RemoteHost`."""

    def __init__(self, cluster: RayCluster, actor: Any) -> None:
        self._cluster = cluster
        self._actor = actor
        self.started, self.ended = actor.started.remote, actor.ended.remote
        self.construct, self.call = actor.construct.remote, actor.call.remote

    def close(self) -> None:
        """Let the object's process end by itself."""
        self._cluster.tell(self._actor.close)

    def stop(self, grace: float) -> None:
        """End the object's process."""
        self._cluster.tell(self._actor.stop, grace)

    def kill(self) -> None:
        """End Ray's process."""
        self._cluster.kill(self._actor)
