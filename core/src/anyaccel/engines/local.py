"""The engine that runs calls on this machine."""

from __future__ import annotations

from anyaccel.errors import UsageError
from anyaccel.pool.dispatcher import LocalEngine, broker_of
from anyaccel.pool.engine import PoolSettings


def open_engine(settings: PoolSettings) -> LocalEngine:
    """Make the local engine of a pool; the machine is detected when it is needed first.

    Raises:
        UsageError: When the settings have the address of a cluster.
        EnforcementError: When workers must be confined or held to memory, and the kernel cannot.
    """
    if settings.address is not None:
        raise UsageError(
            f"address is for the engines of a cluster, such as engine='ray' (got {settings.address!r:.60})"
        )
    return LocalEngine(lambda: broker_of(settings.machine, settings.declare, shared=settings.shared), settings)
