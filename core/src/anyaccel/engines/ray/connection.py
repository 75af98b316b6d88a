"""Ray itself: whether it is installed, and the cluster that this process is connected to."""

from __future__ import annotations

import os
from typing import Any

from anyaccel.engines.ray.authentication import check_admission, use_token
from anyaccel.engines.ray.labels import PREDEFINED, UNIT_VARIABLE, node_labels, node_resources, unit_instances
from anyaccel.engines.remote.cluster import last_line
from anyaccel.errors import UsageError
from anyaccel.inventory.detect import detect

_OLDEST = (2, 49)


def import_ray() -> Any:
    """Ray.

    Raises:
        UsageError: When it is not installed, or too old.
    """
    try:
        import ray  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError("engine='ray' needs Ray, which is not installed: pip install 'anyaccel[ray]'") from error
    if tuple(map(int, ray.__version__.split(".")[:2])) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(f"engine='ray' needs Ray {oldest} or newer (got {ray.__version__}): pip install -U ray")
    return ray


def connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, unless this process is; make one on this machine where none is to be found.

    A token of Ray's that is there is used.

    Raises:
        UsageError: When there is none at the address, or it wants a token that we do not have.
    """
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local") and not _same(address, there, ray.util.get_node_ip_address()):
            raise UsageError(
                f"this process is connected to the Ray cluster at {there} already (got address={address!r})"
            )
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    quiet = {"logging_level": "WARNING"}
    use_token()
    if address != "local":
        check_admission(address or "auto")
    if address not in (None, "local"):
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UsageError(f"there is no Ray cluster at {address!r}: {last_line(error)}") from error
        return
    if address is None:
        try:
            ray.init(address="auto", **quiet)
        except (ConnectionError, ray.exceptions.RayError):
            pass
        else:
            return
    inventory = detect()
    resources = node_resources(inventory.usable)
    before = os.environ.get(UNIT_VARIABLE)
    os.environ[UNIT_VARIABLE] = unit_instances({device.resource for device in inventory.usable})
    try:
        ray.init(
            address="local",
            num_gpus=resources.pop(PREDEFINED, 0),
            resources=resources,
            labels=node_labels(inventory),
            include_dashboard=False,
            **quiet,
        )
    finally:
        if before is None:
            del os.environ[UNIT_VARIABLE]
        else:
            os.environ[UNIT_VARIABLE] = before


def _same(address: str, there: str, own: str) -> bool:
    """Whether two addresses are of one cluster: this machine goes by its own address and as the local host."""
    host, _, port = address.rpartition(":")
    its_host, _, its_port = there.rpartition(":")
    return address == there or ({host, its_host} <= {"127.0.0.1", "localhost", own} and port == its_port)
