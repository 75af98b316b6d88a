"""The nodes of a Ray cluster as the caller sees them: what they are, and whether they can ever serve a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from anyaccel.engines.ray.autoscaler import grows
from anyaccel.engines.ray.connection import connect, import_ray
from anyaccel.engines.ray.labels import PREFIX
from anyaccel.engines.ray.plan import Kind, Plan, find_plan
from anyaccel.engines.remote.cluster import last_line
from anyaccel.errors import WorkerStartError
from anyaccel.model import Device, Inventory, PluginInfo, Product, Request
from anyaccel.model.wire import decode
from anyaccel.probe.machine import Machine
from anyaccel.vendors.process import ask

FRESH_SECONDS = 5.0
"""How long what was found out about the nodes holds."""
SURVEY_SECONDS = 60.0
_inventories: dict[str, dict[object, Inventory]] = {}
"""By address of the cluster, what is on nodes of each kind: the same for all pools."""


class Nodes:
    """A connection to Ray.

    Args:
        address: Where the cluster is, as ``ray.init`` takes it; None for the one that is found, or made.

    Raises:
        UsageError: When Ray is not installed, too old, or not there.
    """

    def __init__(self, address: str | None) -> None:
        self.ray = import_ray()
        connect(self.ray, address)
        self._lock = threading.Lock()
        self._inventories = _inventories.setdefault(self.ray.get_runtime_context().gcs_address, {})
        self._plans: dict[Request, Plan] = {}
        self._looked = float("-inf")

    def plan(self, request: Request) -> Plan:
        """What to ask Ray for.

        Raises:
            UnknownNameError: When no node and no installed plug-in knows one of the names.
            NeverFitsError: When no node can ever serve the request, and none can come.
        """
        with self._lock:
            if time.monotonic() - self._looked > FRESH_SECONDS:
                self._plans.clear()
                self._looked = time.monotonic()
            plan = self._plans.get(request)
            if plan is None:
                plan = self._plans[request] = self._find(request)
            return plan

    def _find(self, request: Request) -> Plan:
        kinds = self.kinds()
        plan, found = find_plan(request, kinds, known_products, grows=self.grows)
        if plan is None:
            found.refuse(request)
        return plan or Plan()

    @property
    def devices(self) -> Iterator[Device]:
        """Those of nodes of every kind that there is, or was."""
        return (device for inventory in self._inventories.values() for device in inventory.devices)

    @property
    def grows(self) -> bool:
        """Whether nodes may be added."""
        return grows(self.ray)

    def kinds(self) -> list[Kind]:
        """The nodes that are alive, those that are alike together."""
        groups: dict[object, list[dict[str, Any]]] = {}
        for node in self.ray.nodes():
            if node["Alive"]:
                groups.setdefault(_signature(node), []).append(node)
        missing = {key: nodes[0] for key, nodes in groups.items() if key not in self._inventories}
        if missing:
            self._inventories.update(self._survey(missing))
        return [
            Kind(
                names=tuple(f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})" for node in nodes),
                resources=nodes[0]["Resources"],
                labels=_labels(nodes[0]),
                inventory=self._inventories[key],
            )
            for key, nodes in groups.items()
            if key in self._inventories
        ]

    def _survey(self, nodes: Mapping[object, Mapping[str, Any]]) -> dict[object, Inventory]:
        """Ask one node of each kind what is on it."""
        from anyaccel.engines.ray import tasks

        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        call = self.ray.remote(num_cpus=0, max_retries=1)(tasks.survey)
        refs = {
            key: call.options(scheduling_strategy=affinity(node["NodeID"], soft=False)).remote()
            for key, node in nodes.items()
        }
        self.ray.wait(list(refs.values()), num_returns=len(refs), timeout=SURVEY_SECONDS)
        found = {}
        for key, ref in refs.items():
            try:
                found[key] = self.ray.get(ref, timeout=0)
            except self.ray.exceptions.RayTaskError as error:
                raise WorkerStartError(f"a node cannot say what is on it: {last_line(error)}") from error
            except self.ray.exceptions.RayError:  # it has died meanwhile, or is about to
                continue
        return found


@cache
def known_products() -> Mapping[str, Sequence[Product]]:
    """What the installed plug-ins know, by resource."""
    found: dict[str, list[Product]] = {}
    answers, _ = ask("describe", Machine())
    for _, outcome in answers.values():
        if outcome.value and "info" in outcome.value:
            info = decode(PluginInfo, outcome.value["info"])
            products = [decode(Product, data) for data in outcome.value.get("products", [])]
            found.setdefault(info.resource, []).extend(products)
    return found


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in node["Labels"].items() if name.startswith(PREFIX)}


def _signature(node: Mapping[str, Any]) -> object:
    """Equal for nodes that are alike, as far as Ray knows; nodes whose devices nobody labeled are asked one by one."""
    labels = _labels(node)
    left_out = ("node:", "memory", "object_store_memory", "CPU")
    resources = {name: count for name, count in node["Resources"].items() if not name.startswith(left_out)}
    own = node["NodeID"] if resources and not labels else ""
    return tuple(sorted(labels.items())), tuple(sorted(resources.items())), own
