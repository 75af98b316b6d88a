"""Pools on every engine, and clusters of Ray and of Dask on the loopback whose nodes are simulated machines."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyaccel as aa
import cloudpickle
import pytest
from anyaccel.engines.ray.labels import UNIT_VARIABLE, node_labels, node_resources, unit_instances
from dask_nodes import DaskNodes, needs_dask
from ray_nodes import needs_ray

HERE = Path(__file__).parent

CLUSTERS = ("ray", "dask")
VENDORS = HERE.parent / "vendors"
KEEPS_IDLE = {"RAY_num_workers_soft_limit": "8", "RAY_idle_worker_killing_time_threshold_ms": "600000"}
"""Ray ends idle processes of its own after a second where a node has few processors; each takes a second to start."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the cluster of a session run in one process, one after the other; those on another run beside them."""
    for item in items:
        if item.path.parent != HERE or not isinstance(item, pytest.Function):
            continue
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        for name in CLUSTERS:
            if f"{name}_nodes" in item.fixturenames or name in params:
                item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray makes a token in the home directory where it wants one, and takes the one that is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Test modules cannot be imported by workers: pytest gives them names that are on no path."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def acme_site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory in which the vendors of the tests are installed, for all nodes."""
    site = tmp_path_factory.mktemp("site")
    for vendor in ("acme", "cards"):
        (site / f"plug_{vendor}_everywhere.py").write_text((VENDORS / f"{vendor}.py").read_text())
        info = site / f"anyaccel_{vendor}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: anyaccel-{vendor}\nVersion: 1.2.3\n")
        (info / "entry_points.txt").write_text(f"[anyaccel]\n{vendor} = plug_{vendor}_everywhere\n")
    return str(site)


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
        )

    def kill(self, node: Any) -> None:
        """Let a node die."""
        self._cluster.remove_node(node, allow_graceful=False)

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


@pytest.fixture(scope="session")
def dask_nodes(acme_site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskNodes]:
    """A cluster of Dask with one worker, on which there are four devices of the vendor of the tests."""
    nodes = DaskNodes(tmp_path_factory.mktemp("dask"), acme_site)
    try:
        nodes.add("sim:A1:4")
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def new_pool() -> Iterator[Callable[..., aa.Pool]]:
    """Make pools; all are ended after the test."""
    made: list[aa.Pool] = []

    def new_pool(needs: Any = None, **options: Any) -> aa.Pool:
        made.append(aa.Pool(needs, **{"grace": 2.0, **options}))
        return made[-1]

    yield new_pool
    for each in made:
        each._core.stop(0)
        each.shutdown()


@pytest.fixture
def pool_on(acme: object, request: pytest.FixtureRequest, new_pool: Callable[..., aa.Pool]) -> Callable[..., aa.Pool]:
    """Make pools on an engine, where there are four devices that can be shared."""

    def pool_on(engine: str, needs: Any = None, **options: Any) -> aa.Pool:
        if engine in CLUSTERS:
            options["address"] = request.getfixturevalue(f"{engine}_nodes").address
        else:
            options["machine"] = "sim:A1:4"
        return new_pool(needs, engine=engine, **options)

    return pool_on


@pytest.fixture(params=["local", pytest.param("ray", marks=needs_ray), pytest.param("dask", marks=needs_dask)])
def pool(request: pytest.FixtureRequest, pool_on: Callable[..., aa.Pool]) -> Any:
    """Make pools on each engine in turn."""

    def pool(needs: Any = None, **options: Any) -> aa.Pool:
        return pool_on(request.param, needs, **options)

    return pool
