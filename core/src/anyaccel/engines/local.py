"""The engine that runs calls on this machine."""

from __future__ import annotations

from anyaccel.errors import UsageError
from anyaccel.pool.dispatcher import Core, broker_of
from anyaccel.pool.engine import Setting


def open_engine(setting: Setting) -> Core:
    """Make it.

    Raises:
        UsageError: When it shall find a cluster.
    """
    if setting.address is not None:
        raise UsageError(f"address is for the engines of a cluster, such as engine='ray' (got {setting.address!r:.60})")
    return Core(lambda: broker_of(setting.machine, setting.declare, shared=setting.shared), setting)
