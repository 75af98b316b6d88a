"""Gangs: a call on each of several nodes, reserved together by a placement group of Ray."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.errors import NeverFitsError, WorkerStartError
from anyaccel.launcher import Rendezvous
from anyaccel.model import Request, Value
from anyaccel.pool import Call, GangFuture, Options, dumps, make_ranked_call
from anyaccel.scheduler import Verdict
from anyaccel_cluster import Driver, RemoteCall, last_line, make_order
from anyaccel_export.ray import slice_label

from anyaccel_ray.connection import import_ray
from anyaccel_ray.plan import RayPlan, among, has, satisfies

if TYPE_CHECKING:
    from anyaccel_ray.cluster import Nodes
    from anyaccel_ray.engine import RayCluster

_POLL_SECONDS = 1
"""Interval in seconds between two checks whether a gang that waits for Ray was cancelled."""
_NODE = "ray.io/node-id"
RayNodeInfo = Mapping[str, Any]
"""An entry of ``ray.nodes()``."""


class GangCall(RemoteCall):
    """A call of a gang."""

    def __init__(self, driver: Driver, cluster: RayCluster, call: Call, plan: RayPlan) -> None:
        super().__init__(driver, call)
        self._cluster = cluster
        self._plan = plan
        self.bundle: Any = None  # its bundle of the placement group, once that is reserved
        self.over = threading.Event()

    def place(self, call: Call) -> tuple[Any, bytes]:
        """Return our task in the bundle of this rank, and the pickled order."""
        order = make_order(call.name, call.options, self._plan)
        return self._cluster.place(order, self._plan, actor=False, bundle=self.bundle), pickle.dumps(order)

    def stop(self, grace: float) -> None:
        """Stop the call. A call not yet submitted to Ray never will be."""
        super().stop(grace)
        if self.bundle is None:
            self.call.future.cancel()

    def end(self, *, left: bool) -> None:
        """Remove the call from the pool after the exit of the worker."""
        super().end(left=left)
        self.over.set()


class RayGang:
    """The calls of a gang, from the request for their nodes to the end of the last.

    Args:
        driver: The engine.
        cluster: The cluster.
        options: Options of each call.
        hosts: Number of calls, and of nodes.
        name: Name of the calls in messages.

    Raises:
        NeverFitsError: When the cluster has too few nodes, and no autoscaler can add any.
    """

    def __init__(self, driver: Driver, cluster: RayCluster, options: Options, hosts: int, name: str) -> None:
        plan = RayPlan() if options.needs is None else cluster.plan(options.needs)
        self._spread = spread(cluster.nodes, plan, options.needs, hosts)
        self._cluster = cluster
        self._ray: Any = cluster.ray
        self._calls = [Call(name, options, driver.on_cancel) for _ in range(hosts)]
        self.calls = [GangCall(driver, cluster, call, plan) for call in self._calls]
        self.future = GangFuture([call.future for call in self._calls])

    def start(self, work: bytes) -> None:
        """Run the pickled call on every node after the reservation by Ray."""
        threading.Thread(target=self._run, args=(work,), name="anyaccel gang", daemon=True).start()

    def _run(self, work: bytes) -> None:
        try:
            with self._reserved() as bundles, self._rendezvous(bundles) as rendezvous:
                for rank, (each, call, bundle) in enumerate(zip(self.calls, self._calls, bundles, strict=True)):
                    each.bundle = bundle
                    call.body = dumps(make_ranked_call(rank, len(self.calls), rendezvous, work))
                    each.launch(call)
                for each in self.calls:
                    each.over.wait()  # Ray kills everything in a placement group that is removed
        except _NotWantedError:
            pass  # the caller has cancelled the future, which tells the calls
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds
            for call in self._calls:
                call.fail(WorkerStartError(f"no gang can be started for {call.name}: {last_line(error)}"))
        finally:
            for each in self.calls:
                if not each.over.is_set():
                    each.end(left=False)

    @contextlib.contextmanager
    def _reserved(self) -> Iterator[Sequence[Any]]:
        """Context that reserves the nodes; yields the scheduling strategy of each rank."""
        util = self._ray.util
        # Ray reserves all bundles of a group or none, so two gangs never wait for each other's half.
        group = util.placement_group(**self._spread.arguments)
        try:
            while not group.wait(_POLL_SECONDS):
                self._check_wanted()
            nodes = util.placement_group_table(group)["bundles_to_node_id"]
            place = partial(util.scheduling_strategies.PlacementGroupSchedulingStrategy, group)
            yield [place(index) for index in self._spread.by_rank(nodes)]
        finally:
            if self._ray.is_initialized():
                util.remove_placement_group(group)

    @contextlib.contextmanager
    def _rendezvous(self, bundles: Sequence[Any]) -> Iterator[Mapping[str, str]]:
        """Reserve a port on the node of rank 0 for the context; yield the variables with the address."""
        made = self._ray.remote(num_cpus=0)(Meeting).options(scheduling_strategy=bundles[0]).remote()
        try:
            ref = made.variables.remote()
            while not self._ray.wait([ref], timeout=_POLL_SECONDS)[0]:
                self._check_wanted()
            variables: Mapping[str, str] = self._ray.get(ref)
            self._check_wanted()
            yield variables
        finally:
            self._cluster.kill(made)

    def _check_wanted(self) -> None:
        if self.future.done():
            raise _NotWantedError


class _NotWantedError(Exception):
    """Raised when the gang was cancelled before it started."""


class Meeting:
    """Keeps a port of a node reserved for a gang; the class of an actor of Ray."""

    def __init__(self) -> None:
        self._rendezvous = Rendezvous(import_ray().util.get_node_ip_address())

    def variables(self) -> dict[str, str]:
        """Return the variables with the address of the port."""
        return self._rendezvous.variables


class Spread(Value):
    """The placement group of a gang.

    Attributes:
        bundle: Quantities of resources on each node.
        hosts: Number of nodes.
        selector: Values that labels of each node must have.
        kind: Kind of the devices whose nodes form a slice; empty if the gang does not use a slice.
        workers: Number of each node in its slice, by node id.
    """

    bundle: Mapping[str, float]
    hosts: int
    selector: Mapping[str, str]
    kind: str
    workers: Mapping[str, int]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``ray.util.placement_group``."""
        together = {slice_label(self.kind, "slice_name"): "STRICT_PACK"} if self.kind else {}
        return {
            "bundles": [dict(self.bundle)] * self.hosts,
            "bundle_label_selector": [dict(self.selector)] * self.hosts,
            "topology_strategy": {_NODE: "STRICT_SPREAD", **together},
        }

    def by_rank(self, nodes: Mapping[int, str]) -> Sequence[int]:
        """Return the indices of the bundles by rank, which is the number of the node in its slice.

        Args:
            nodes: The node of each bundle, by index.
        """
        return sorted(nodes, key=lambda index: (self.workers.get(nodes[index], index), index))


def spread(cluster: Nodes, plan: RayPlan, request: Request | None, hosts: int) -> Spread:
    """Find nodes for a gang.

    Args:
        cluster: The nodes of the cluster.
        plan: The plan of each call.
        request: The request of each call, for messages.
        hosts: Number of nodes.

    Raises:
        NeverFitsError: When the cluster has too few nodes, and no autoscaler can add any.
    """
    resources = dict(plan.resources) or {"CPU": 1.0}
    selector = dict(plan.selector)
    nodes = [
        node
        for node in cluster.ray.nodes()
        if node["Alive"] and has(node["Resources"], resources) and satisfies(node["Labels"], selector)
    ]
    kind, slices = _slices(nodes, {each.kind for each in cluster.devices if each.resource in resources})
    whole = sorted(name for name, own in slices.items() if len(own) == hosts)
    label = slice_label(kind, "slice_name")
    alone = sum(label not in node["Labels"] for node in nodes)
    if whole:
        selector[label] = among(whole)
    elif alone < hosts and not cluster.grows:
        raise _never(request, hosts, alone, slices)
    elif slices and alone >= hosts:
        selector[label] = f"!in({','.join(sorted(slices))})"
    return Spread(
        bundle=resources,
        hosts=hosts,
        selector=selector,
        kind=kind if whole else "",
        workers={node["NodeID"]: _number(node, kind) for node in nodes} if whole else {},
    )


def _slices(nodes: Iterable[RayNodeInfo], kinds: Iterable[str]) -> tuple[str, dict[str, list[RayNodeInfo]]]:
    """Return the kind of devices in slices, and the nodes of each slice by name."""
    nodes = list(nodes)
    for kind in sorted(kinds):
        found: dict[str, list[RayNodeInfo]] = {}
        for node in nodes:
            if name := node["Labels"].get(slice_label(kind, "slice_name")):
                found.setdefault(name, []).append(node)
        if found:
            return kind, found
    return "", {}


def _number(node: RayNodeInfo, kind: str) -> int:
    text = node["Labels"].get(slice_label(kind, "worker_id"), "")
    return int(text) if text.isdecimal() else 0


def _never(
    request: Request | None, hosts: int, alone: int, slices: Mapping[str, Sequence[RayNodeInfo]]
) -> NeverFitsError:
    wanted = request if request is not None else Request(terms=())
    there = [str(alone), *(f"{len(own)} in slice {name}" for name, own in sorted(slices.items()))]
    needs = f"that can serve {request}" if request is not None else "with a processor"
    whole = "; a slice is of use only as a whole" if slices else ""
    return NeverFitsError(
        f"a gang of {hosts} needs as many nodes {needs}, and the cluster has {' and '.join(there)}{whole}",
        verdict=Verdict(request=wanted, fits_now=False, ever_fits=False),
    )
