"""Connections of pools to a Dask cluster."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from typing import Any

from anyaccel.errors import AnyaccelError, UsageError
from anyaccel.pool import PROCESSORS

_lock = threading.Lock()
_own: list[Any] = []
"""The cluster that this process has started, with its client: one entry for each pool that uses it."""


class Connection:
    """A client of Dask, used by a pool.

    Args:
        client: The client.
        kept: Whether the client outlives the pool.
        own: Whether the cluster was started by this process.

    Attributes:
        client: The client.
        address: Address of its scheduler.
    """

    def __init__(self, client: Any, *, kept: bool, own: bool = False) -> None:
        self.client = client
        self.address = str(client.scheduler.address)
        self._kept = kept
        self._own = own

    def close(self) -> None:
        """Close the client and the cluster, if made for pools and unused by other pools."""
        if self._own:
            with _lock:
                cluster = _own.pop()
                last = not _own
            if last:
                self.client.close()
                cluster[0].close()
        elif not self._kept:
            self.client.close()


def connect(address: str | None) -> Connection:
    """Connect to a cluster, and register our plug-ins with the scheduler and the workers.

    Args:
        address: Address of the scheduler. None for the current client, else for the scheduler in Dask's configuration,
            else for a new cluster of this machine alone.

    Raises:
        UsageError: When Dask is not installed, there is no scheduler at the address, or anyaccel is not installed on
            the cluster.
    """
    if importlib.util.find_spec("distributed") is None:
        raise UsageError("engine='dask' needs Dask, which is not installed", hint="pip install 'anyaccel[dask]'")
    connection = _open(address)
    try:
        _prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _open(address: str | None) -> Connection:
    distributed: Any = importlib.import_module("distributed")
    address = address or importlib.import_module("dask.config").get("scheduler-address", None)
    if address is None:
        try:
            current = distributed.Client.current()
        except ValueError:
            current = None
        if current is not None and current.asynchronous:
            raise UsageError(
                "the current Dask client is asynchronous, and a pool needs one that is not",
                hint="make the pool with the scheduler's address=, in a thread (asyncio.to_thread)",
            )
        if current is not None:
            return Connection(current, kept=True)
        with _lock:
            if _own:
                cluster, client = _own[0]
            else:
                # In this process, not in a process of its own: it only hosts the processes that run calls.
                cluster = distributed.LocalCluster(
                    n_workers=1,
                    threads_per_worker=PROCESSORS,
                    processes=False,
                    dashboard_address="127.0.0.1:0",
                    scheduler_kwargs={"dashboard": False},
                )
                client = distributed.Client(cluster, set_as_default=False)
            _own.append((cluster, client))
        return Connection(client, kept=True, own=True)
    try:
        return Connection(distributed.Client(address, set_as_default=False), kept=False)
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no Dask scheduler at {address!r}: {error}") from error


def _prepare(connection: Connection) -> None:
    """Register our plug-ins with the scheduler and the workers; no effect the second time on a cluster."""
    from anyaccel_dask.dispatcher import Dispatcher
    from anyaccel_dask.node import Announcer

    try:
        connection.client.register_plugin(Dispatcher())
        connection.client.register_plugin(Announcer())
    except AnyaccelError:
        raise
    except Exception as error:
        raise UsageError(
            f"the Dask cluster at {connection.address} cannot be used: {type(error).__name__}: {error}",
            hint="install the same anyaccel beside its scheduler and its workers",
        ) from error
