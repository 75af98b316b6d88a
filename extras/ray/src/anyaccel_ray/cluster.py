"""The nodes of a Ray cluster: their devices, whether an autoscaler may add nodes, and plans for requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from anyaccel.errors import WorkerStartError
from anyaccel.model import Device, Inventory, Product, Request
from anyaccel.vendors import known
from anyaccel_cluster import last_line
from anyaccel_export.ray import PREFIX

from anyaccel_ray.connection import connect, import_ray
from anyaccel_ray.plan import NodeKind, RayPlan, find_plan

SURVEY_SECONDS = 60.0
"""Seconds that nodes may take to report their devices."""
_STATUS = b"__autoscaling_status"
_inventories: dict[str, dict[object, Inventory]] = {}
"""Inventories by address of the cluster and kind of node, shared by all pools."""


class Nodes:
    """A connection to Ray.

    Args:
        address: Address of the cluster, as ``ray.init`` takes it; None for the one that is found, or for a new one.

    Raises:
        UsageError: When Ray is not installed or too old, or there is no cluster at the address.
    """

    def __init__(self, address: str | None) -> None:
        self.ray = import_ray()
        connect(self.ray, address)
        self._inventories = _inventories.setdefault(self.ray.get_runtime_context().gcs_address, {})

    def find(self, request: Request) -> RayPlan:
        """Return the plan of a request.

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
        """Devices of nodes of each kind that the cluster has or had."""
        return (device for inventory in self._inventories.values() for device in inventory.devices)

    @property
    def grows(self) -> bool:
        """Whether an autoscaler may add nodes."""
        return grows(self.ray)

    def kinds(self) -> list[NodeKind]:
        """Return the nodes that are alive, grouped by kind."""
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
        """Detect the devices of one node of each kind."""
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
                raise WorkerStartError(f"a node cannot detect its devices: {last_line(error)}") from error
            except self.ray.exceptions.RayError:  # the node has died meanwhile
                continue
        return found


@cache
def known_products() -> Mapping[str, Sequence[Product]]:
    """Return the products that the installed plug-ins know, by resource."""
    found: dict[str, list[Product]] = {}
    for each in known()[0]:
        found.setdefault(each.info.resource, []).extend(each.products)
    return found


def _labels(node: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in node["Labels"].items() if name.startswith(PREFIX)}


def _signature(node: Mapping[str, Any]) -> object:
    """Return a key, equal for nodes of the same kind. A node with unlabeled devices is a separate kind."""
    labels = _labels(node)
    left_out = ("node:", "memory", "object_store_memory", "CPU")
    resources = {name: count for name, count in node["Resources"].items() if not name.startswith(left_out)}
    own = node["NodeID"] if resources and not labels else ""
    return tuple(sorted(labels.items())), tuple(sorted(resources.items())), own


def grows(ray: Any) -> bool:
    """Return whether an autoscaler can add nodes to the cluster that this process is connected to.

    Ray has no call for this. Its autoscalers are recognized by their reports, which begin some seconds after the start
    of the cluster.

    Args:
        ray: The module, connected to the cluster.
    """
    try:
        client = ray._private.worker.global_worker.gcs_client  # noqa: SLF001 - there is no public way
        return _reports_groups(ray) or _reports_state(client) or _reports_types(client)
    except Exception:  # noqa: BLE001 - none of these calls is public; without an answer, assume no autoscaler
        return False


def _reports_groups(ray: Any) -> bool:
    """Return whether the cluster publishes groups of nodes to start, as hosted clusters do."""
    config = ray._private.state.state.get_cluster_config()  # noqa: SLF001
    return bool(config is not None and config.node_group_configs)


def _reports_state(client: Any) -> bool:
    """Return whether an autoscaler of version 2 reports; the monitor of a cluster without one is of version 1."""
    reply = import_module("ray.core.generated.autoscaler_pb2").GetClusterStatusReply()
    reply.ParseFromString(client.get_cluster_status())
    return bool(reply.autoscaling_state.autoscaler_state_version)


def _reports_types(client: Any) -> bool:
    """Return whether an autoscaler of version 1 reports types of nodes; a mere monitor names each node as a type."""
    report = json.loads(client.internal_kv_get(_STATUS, None) or b"{}").get("autoscaler_report") or {}
    types = (report.get("node_type_mapping") or {}).items()
    return any(name not in (node, f"node_{node}") for node, name in types)
