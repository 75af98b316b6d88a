"""Clusters of Ray on the loopback whose nodes are simulated machines, and pools on them."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyaccel as aa
import pytest
from anyaccel_export.ray import UNIT_VARIABLE, node_labels, node_resources, unit_instances
from engine_pools import acme_site, functions_travel_by_value, new_pool, pool
from ray_nodes import needs_ray
from waiting import PATIENCE

__all__ = ["acme_site", "functions_travel_by_value", "new_pool", "pool"]

HERE = Path(__file__).parent
KEEPS_IDLE = {"RAY_num_workers_soft_limit": "8", "RAY_idle_worker_killing_time_threshold_ms": "600000"}
"""Ray ends idle processes of its own after a second where a node has few processors; each takes a second to start."""
HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 100_000}
"""A dead node is known after two seconds; one that gets no processor for a while is not taken for dead."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the cluster of a session run in one process, one after the other; those on another run beside them."""
    for item in items:
        if item.path.parent == HERE and isinstance(item, pytest.Function) and "ray_nodes" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("ray"))
            item.add_marker(needs_ray)


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray makes a token in the home directory where it wants one, and takes the one that is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


class Nodes:
    """A cluster of Ray whose nodes say what simulated machines have."""

    def __init__(self, site: str, state: Path) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(shutdown_at_exit=True)
        self._site = site
        self._state = state
        self.states: dict[str, str] = {}

    @property
    def address(self) -> str:
        """Where it is."""
        return str(self._cluster.address)

    @property
    def path(self) -> str:
        """Where a node's processes find modules, the vendors of the tests among them."""
        return os.pathsep.join(filter(None, (self._site, os.environ.get("PYTHONPATH"))))

    def add(self, machine: str, *, cpus: int = 0, **environ: str) -> Any:
        """Start a node that has the devices of a machine, as 'anyaccel ray start' would."""
        state = self._state / f"{len(list(self._state.iterdir()))}"  # each stands for a machine of its own
        state.mkdir(mode=0o700)
        self.states[machine] = str(state)
        own = {"ANYACCEL_MACHINE": machine, "ANYACCEL_STATE_DIR": str(state), **KEEPS_IDLE, **environ}
        own["PYTHONPATH"] = self.path
        inventory = detected(self._site, own)
        devices = [device for device in inventory.devices if device.usable]
        resources: dict[str, Any] = node_resources(devices)
        own[UNIT_VARIABLE] = unit_instances({device.resource for device in devices})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray looks for free ports and forgets the sockets
            node = self._start(own, cpus, resources, node_labels(inventory))
            gc.collect()
        return node

    def _start(self, own: dict[str, str], cpus: int, resources: dict[str, Any], labels: dict[str, str]) -> Any:
        return self._cluster.add_node(
            num_cpus=cpus,
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            labels=labels,
            env_vars=own,
            include_dashboard=False,
            **({} if self._cluster.head_node else {"_system_config": HEALTH}),
        )

    def kill(self, node: Any) -> None:
        """Let a node die, and wait until the cluster knows: until then, it may start something there."""
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.wait_for_nodes(PATIENCE)

    def end(self) -> None:
        """End all nodes."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def detected(site: str, environ: dict[str, str]) -> aa.Inventory:
    """What a process with this environment finds."""
    sys.path.insert(0, site)
    try:
        return aa.detect(environ={**os.environ, **environ})
    finally:
        sys.path.remove(site)


@pytest.fixture(scope="session")
def ray_nodes(acme_site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A cluster with one node, on which there are four devices of the vendor of the tests."""
    nodes = Nodes(acme_site, tmp_path_factory.mktemp("state"))
    try:
        nodes.add("sim:A1:4", cpus=4)
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def engine(ray_nodes: Nodes) -> dict[str, Any]:
    """What a pool takes to reach four devices."""
    return {"engine": "ray", "address": ray_nodes.address}


@pytest.fixture
def cluster(acme: object, ray_nodes: Nodes) -> tuple[str, ...]:
    """The options of a sweep on a cluster with four devices."""
    return "--engine", "ray", "--address", ray_nodes.address


@pytest.fixture
def filtered(site: str, ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a pool takes to reach a machine of each kind of device, whose processes know the filter."""
    monkeypatch.setattr(ray_nodes, "_site", site)
    added = [ray_nodes.add("sim:A1:2"), ray_nodes.add("sim:Acme-Whole:1")]
    yield {"engine": "ray", "address": ray_nodes.address}
    for node in added:
        ray_nodes.kill(node)
