"""Clusters of Dask on the loopback whose workers are simulated machines, and pools on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dask_nodes import DaskNodes, needs_dask
from engine_pools import acme_site, functions_travel_by_value, new_pool, pool

__all__ = ["acme_site", "functions_travel_by_value", "new_pool", "pool"]

HERE = Path(__file__).parent
os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}"  # for the commands dask and anyaccel


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the cluster of a session run in one process, one after the other; those on another run beside them."""
    for item in items:
        if item.path.parent == HERE and isinstance(item, pytest.Function):
            item.add_marker(needs_dask)
            if "dask_nodes" in item.fixturenames:
                item.add_marker(pytest.mark.xdist_group("dask"))


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
def engine(dask_nodes: DaskNodes) -> dict[str, Any]:
    """What a pool takes to reach four devices."""
    return {"engine": "dask", "address": dask_nodes.address}


@pytest.fixture
def cluster(acme: object, dask_nodes: DaskNodes) -> tuple[str, ...]:
    """The options of a sweep on a cluster with four devices."""
    return "--engine", "dask", "--address", dask_nodes.address


@pytest.fixture
def filtered(site: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a pool takes to reach a machine of each kind of device, whose processes know the filter."""
    nodes = DaskNodes(tmp_path_factory.mktemp("dask"), site)
    try:
        nodes.add("sim:A1:2")
        nodes.add("sim:Acme-Whole:1")
        yield {"engine": "dask", "address": nodes.address}
    finally:
        nodes.end()
