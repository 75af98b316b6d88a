"""Pools on this machine."""

from typing import Any

import pytest
from engine_pools import acme_site, functions_travel_by_value, new_pool, pool

__all__ = ["acme_site", "engine", "functions_travel_by_value", "new_pool", "pool"]


@pytest.fixture
def engine() -> dict[str, Any]:
    """What a pool takes to reach four devices."""
    return {"engine": "local", "machine": "sim:A1:4"}


@pytest.fixture
def filtered(site: str) -> dict[str, Any]:
    """What a pool takes to reach a machine of each kind of device, whose processes know the filter."""
    return {"engine": "local", "machine": "sim:A1:2,Acme-Whole:1"}
