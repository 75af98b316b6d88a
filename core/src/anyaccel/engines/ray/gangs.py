"""Gangs: one call on each of several nodes, which Ray reserves for them all at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from anyaccel.engines.ray.connection import import_ray
from anyaccel.engines.ray.plan import Plan
from anyaccel.engines.ray.spread import spread
from anyaccel.engines.remote.cluster import last_line
from anyaccel.engines.remote.driver import Driver, RemoteCall
from anyaccel.errors import WorkerStartError
from anyaccel.launcher.rendezvous import Rendezvous
from anyaccel.pool.call import Call, Options
from anyaccel.pool.gang import GangFuture, ranked
from anyaccel.pool.payload import dumps

if TYPE_CHECKING:
    from anyaccel.engines.ray.engine import RayCluster

_LOOK_SECONDS = 1
"""How often to look whether somebody still wants what Ray cannot reserve yet."""


class GangCall(RemoteCall):
    """One call of a gang."""

    __slots__ = ("_cluster", "_plan", "bundle", "over")

    def __init__(self, driver: Driver, cluster: RayCluster, call: Call, plan: Plan) -> None:
        super().__init__(driver, call)
        self._cluster = cluster
        self._plan = plan
        self.bundle: Any = None  # where Ray is to run it, once that is reserved
        self.over = threading.Event()

    def place(self, call: Call) -> Any:
        """What to ask Ray for: a place in what is reserved."""
        wanted, order = self._cluster.wanted(call.name, call.options, self._plan, actor=False)
        return self._cluster.in_bundle(self.bundle, wanted, call.name), order

    def stop(self, grace: float) -> None:
        """End it; nobody asks Ray for it any more if nobody has."""
        super().stop(grace)
        self.recall()

    def recall(self) -> None:
        """Cancel the gang, if nothing is reserved for it."""
        if self.bundle is None and self.call is not None:
            self.call.future.cancel()

    def end(self, *, left: bool) -> None:
        """It is over, and its worker gone."""
        super().end(left=left)
        self.over.set()


class Gang:
    """Calls that run together.

    Args:
        driver: The pool.
        cluster: Ray.
        options: Of each call.
        hosts: How many there are.
        name: What to call them in messages.

    Raises:
        NeverFitsError: When there are not so many nodes for them, and none can come.
    """

    def __init__(self, driver: Driver, cluster: RayCluster, options: Options, hosts: int, name: str) -> None:
        plan = Plan() if options.needs is None else cluster.plan(options.needs)
        self._spread = spread(cluster.nodes, plan, options.needs, hosts)
        self._cluster = cluster
        self._ray: Any = cluster.ray
        self._calls = [Call(name, options, driver.on_cancel) for _ in range(hosts)]
        self.calls = [GangCall(driver, cluster, call, plan) for call in self._calls]
        self.future = GangFuture([call.future for call in self._calls])

    def start(self, work: bytes) -> None:
        """Have the pickled call run by all, as soon as Ray has reserved what they need."""
        threading.Thread(target=self._run, args=(work,), name="anyaccel gang", daemon=True).start()

    def _run(self, work: bytes) -> None:
        try:
            with self._reserved() as bundles, self._rendezvous(bundles) as rendezvous:
                for rank, (each, call, bundle) in enumerate(zip(self.calls, self._calls, bundles, strict=True)):
                    each.bundle = bundle
                    call.body = dumps(ranked(rank, len(self.calls), rendezvous, work))
                    each.launch(call)
                for each in self.calls:
                    each.over.wait()  # what is reserved goes with whatever still runs there
        except _NotWantedError:
            pass
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds
            for call in self._calls:
                call.fail(WorkerStartError(f"no gang can be started for {call.name}: {last_line(error)}"))
        finally:
            for each in self.calls:
                if not each.over.is_set():
                    each.end(left=False)

    @contextlib.contextmanager
    def _reserved(self) -> Iterator[Sequence[Any]]:
        """Where each of them runs, by rank; it is kept for them meanwhile."""
        util = self._ray.util
        group = util.placement_group(**self._spread.arguments)
        try:
            while not group.wait(_LOOK_SECONDS):
                self._check_wanted()
            nodes = util.placement_group_table(group)["bundles_to_node_id"]
            place = partial(util.scheduling_strategies.PlacementGroupSchedulingStrategy, group)
            yield [place(index) for index in self._spread.by_rank(nodes)]
        finally:
            if self._ray.is_initialized():
                util.remove_placement_group(group)

    @contextlib.contextmanager
    def _rendezvous(self, bundles: Sequence[Any]) -> Iterator[Mapping[str, str]]:
        """A port on the node of rank 0, that is kept for them meanwhile."""
        made = self._ray.remote(num_cpus=0)(Meeting).options(scheduling_strategy=bundles[0]).remote()
        try:
            ref = made.variables.remote()
            while not self._ray.wait([ref], timeout=_LOOK_SECONDS)[0]:
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
    """The gang was cancelled before it was begun."""


class Meeting:
    """Keeps a port for a gang: the class of an actor of Ray."""

    def __init__(self) -> None:
        self._rendezvous = Rendezvous(import_ray().util.get_node_ip_address())

    def variables(self) -> dict[str, str]:
        """How programs learn of it."""
        return self._rendezvous.variables
