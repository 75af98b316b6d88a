"""Detect the accelerators of a machine."""

from __future__ import annotations

import os

from anyaccel.vendors import DEADLINE_SECONDS, begin_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyaccel.durations import Duration
    from anyaccel.model import Inventory
    from anyaccel.probe import Machine


def detect(
    machine: str | Machine | None = None,
    *,
    declare: Mapping[str, int] | None = None,
    timeout: Duration = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
    everybody: bool = False,
) -> Inventory:
    """Detect the accelerators of a machine.

    This process loads no code of a vendor: each plug-in runs in a process of its own. A plug-in that hangs, crashes or
    breaks the contract is reported as failed, and other vendors are unaffected. A plug-in is not asked if the data
    beside it rules out its hardware.

    Args:
        machine: This host when None (or what ``ANYACCEL_MACHINE`` names), a simulation such as ``sim:H100:8``, or the
            directory of a recording.
        declare: Number of devices by resource name, whatever is found; see :func:`anyaccel.declare`.
        timeout: Time that each vendor may take; all run at once.
        environ: The environment whose variables count; the environment of this process when None.
        everybody: Whether to ask vendors that are certainly absent, too.

    Raises:
        MachineError: When ``machine`` names no machine, or a product that no plug-in knows.
        UsageError: When ``ANYACCEL_PLUGINS`` names a vendor without a plug-in.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> [device.type for device in inventory.devices]
        ['H100', 'H100']
    """
    environ = os.environ if environ is None else environ
    begin_for(machine if isinstance(machine, str | None) else getattr(machine, "text", None), environ)
    # Imports while the fork server starts.
    from anyaccel.durations import read_seconds
    from anyaccel.inventory.find import find

    seconds = read_seconds("timeout", timeout)
    return find(machine, declare=declare, timeout=seconds, environ=environ, everybody=everybody)
