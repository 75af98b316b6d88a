"""Find out what is on a machine."""

from __future__ import annotations

import os

from anyaccel.vendors import DEADLINE_SECONDS, begin_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from anyaccel.model import Inventory, Request
    from anyaccel.probe.machine import Machine


def detect(
    machine: str | Machine | None = None,
    *,
    declare: Mapping[str, int] | None = None,
    timeout: float = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
    request: Request | None = None,
    everybody: bool = False,
) -> Inventory:
    """Find the accelerators of a machine.

    Nothing of a vendor is loaded into this process: each plug-in runs in a process of its own. One that hangs, crashes
    or lies is reported as failed and costs only its vendor. A plug-in of which the data beside it says that its
    hardware is certainly not here is not asked.

    Args:
        machine: This host when None (or what ``ANYACCEL_MACHINE`` names), a simulation such as ``sim:H100:8``, or the
            directory of a recording.
        declare: Number of devices by resource name to count whatever is found; see :func:`anyaccel.declare`.
        timeout: Seconds that each vendor may take; all run at once.
        environ: The environment whose variables count; that of this process when None.
        request: What the devices are for. Where the vendors that it names have answered, the others have less time.
        everybody: Whether vendors that are certainly not here are asked as well.

    Raises:
        MachineError: When ``machine`` names no machine, or a product that no plug-in knows.
        UsageError: When ``ANYACCEL_PLUGINS`` names a vendor that has no plug-in.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> [device.type for device in inventory.devices]
        ['H100', 'H100']
    """
    environ = os.environ if environ is None else environ
    begin_for(machine if isinstance(machine, str | None) else machine.text, environ)
    from anyaccel.inventory.find import find  # takes as long to import as what has begun takes to start

    return find(machine, declare=declare, timeout=timeout, environ=environ, request=request, everybody=everybody)


def survey(inventory: Inventory | None, machine: str | Machine | None = None, **where: Any) -> Inventory:
    """Return the inventory that the caller gave, or detect the machine that the caller named; see :func:`detect`."""
    return detect(machine, **where) if inventory is None else inventory
