"""Import Ray, and connect this process to a cluster."""

from __future__ import annotations

import os
from typing import Any

from anyaccel.errors import UsageError, WorkerStartError
from anyaccel_cluster import last_line

from anyaccel_ray.authentication import check_admission, use_token

_OLDEST = (2, 49)


def import_ray() -> Any:
    """Import Ray.

    Raises:
        UsageError: When Ray is not installed, or too old.
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
    """Connect to a cluster, unless this process is connected; start one on this machine if none is found.

    An existing token of Ray's is used.

    Raises:
        UsageError: When there is no cluster at the address, or the cluster requires a token that we do not have.
    """
    if ray.is_initialized():
        there = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", "local") and not _same(address, there, ray.util.get_node_ip_address()):
            raise UsageError(
                f"this process is connected to the Ray cluster at {there} already (got address={address!r})"
            )
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    use_token()
    if address != "local":
        check_admission(address or "auto")
        try:
            ray.init(address=address or "auto", logging_level="WARNING")
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            none_there = isinstance(error, (ConnectionError, ray.exceptions.RayError))
            if address is not None or not none_there:
                raise UsageError(f"there is no Ray cluster at {address or 'auto'!r}: {last_line(error)}") from error
        else:
            return
    _start_cluster(ray)


def _start_cluster(ray: Any) -> None:
    """Start a cluster of this machine alone.

    Raises:
        WorkerStartError: When Ray cannot start one.
    """
    from anyaccel import detect
    from anyaccel_export.ray import describe  # here: hosts on nodes do not need it

    node = describe(detect())
    before = {name: os.environ.get(name) for name in node.variables}
    os.environ.update(node.variables)
    try:
        ray.init(
            address="local",
            num_gpus=node.gpus,
            resources=dict(node.resources),
            labels=dict(node.labels),
            include_dashboard=False,
            logging_level="WARNING",
        )
    except Exception as error:  # Ray raises bare exceptions
        raise WorkerStartError(
            f"Ray could not start a cluster on this machine: {last_line(error)}",
            hint="start one with 'anyaccel ray start --head', whose output says more",
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _same(address: str, there: str, own: str) -> bool:
    """Return whether two addresses are the same: this machine has several, such as the local host's."""
    host, _, port = address.rpartition(":")
    its_host, _, its_port = there.rpartition(":")
    return address == there or ({host, its_host} <= {"127.0.0.1", "localhost", own} and port == its_port)
