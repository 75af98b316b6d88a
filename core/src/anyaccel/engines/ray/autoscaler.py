"""Whether a cluster grows: Ray does not say so itself, but what its autoscalers report gives them away."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

_STATUS = b"__autoscaling_status"


def grows(ray: Any) -> bool:
    """Whether an autoscaler can add nodes to the cluster that this process is connected to.

    It takes an autoscaler some seconds from the start of the cluster until it shows.

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
