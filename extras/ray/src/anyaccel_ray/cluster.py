"""The nodes of a Ray cluster: what they are, whether more may come, and whether they can ever serve a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from anyaccel.engines.remote import last_line
from anyaccel.errors import WorkerStartError
from anyaccel.model import Device, Inventory, Product, Request
from anyaccel.vendors import known
from anyaccel_export.ray import PREFIX

from anyaccel_ray.connection import connect, import_ray
from anyaccel_ray.plan import NodeKind, RayPlan, find_plan

SURVEY_SECONDS = 60.0
_STATUS = b"__autoscaling_status"
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
        self._inventories = _inventories.setdefault(self.ray.get_runtime_context().gcs_address, {})

    def find(self, request: Request) -> RayPlan:
        """What to ask Ray for.

        Raises:
            UnknownNameError: When no node and no installed plug-in knows one of the names.
            NeverFitsError: When no node can ever serve the request, and none can come.
        """
        plan, found = find_plan(request, self.kinds(), known_products, grows=self.grows)
        if plan is None:
            found.refuse(request)
        return plan or RayPlan()

    @property
    def devices(self) -> Iterator[Device]:
        """Those of nodes of every kind that there is, or was."""
        return (device for inventory in self._inventories.values() for device in inventory.devices)

    @property
    def grows(self) -> bool:
        """Whether nodes may be added."""
        return grows(self.ray)

    def kinds(self) -> list[NodeKind]:
        """The nodes that are alive, those that are alike together."""
        groups: dict[object, list[dict[str, Any]]] = {}
        for node in self.ray.nodes():
            if node["Alive"]:
                groups.setdefault(_signature(node), []).append(node)
        missing = {key: nodes[0] for key, nodes in groups.items() if key not in self._inventories}
        if missing:
            self._inventories.update(self._survey(missing))
        return [
            NodeKind(
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
        from anyaccel_ray.node import survey

        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        call = self.ray.remote(num_cpus=0, max_retries=1)(survey)
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
    for each in known()[0]:
        found.setdefault(each.info.resource, []).extend(each.products)
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


def grows(ray: Any) -> bool:
    """Whether an autoscaler can add nodes to the cluster that this process is connected to.

    Ray does not say so itself, but what its autoscalers report gives them away; they do so some seconds after the start
    of the cluster.

    Args:
        ray: Ray, connected.
    """
    try:
        client = ray._private.worker.global_worker.gcs_client  # noqa: SLF001 - there is no public way
        return _reports_groups(ray) or _reports_state(client) or _reports_types(client)
    except Exception:  # noqa: BLE001 - none of it is public; without an answer there is none
        return False


def _reports_groups(ray: Any) -> bool:
    """Hosted clusters publish the groups of nodes that they may start."""
    config = ray._private.state.state.get_cluster_config()  # noqa: SLF001
    return bool(config is not None and config.node_group_configs)


def _reports_state(client: Any) -> bool:
    """The autoscaler of version 2 reports to the head; the watcher of a cluster that does not grow is of version 1."""
    reply = import_module("ray.core.generated.autoscaler_pb2").GetClusterStatusReply()
    reply.ParseFromString(client.get_cluster_status())
    return bool(reply.autoscaling_state.autoscaler_state_version)


def _reports_types(client: Any) -> bool:
    """The autoscaler of version 1 knows the types of nodes; a mere watcher calls each node a type of its own."""
    report = json.loads(client.internal_kv_get(_STATUS, None) or b"{}").get("autoscaler_report") or {}
    types = (report.get("node_type_mapping") or {}).items()
    return any(name not in (node, f"node_{node}") for node, name in types)
