"""The devices of a machine, for all pools of this process together."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping

from anyaccel.inventory.detect import detect
from anyaccel.launcher.launch import open_scheduler
from anyaccel.probe.machine import Machine, parse_machine
from anyaccel.workers.leases import Leases, LocalLeases

_known: weakref.WeakValueDictionary[object, Leases] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def machine_leases(machine: str | Machine | None, declare: Mapping[str, int] | None, *, shared: bool) -> Leases:
    """The leases of a machine: the same for all pools that live at the same time, so that none takes another's device.

    Args:
        machine: The machine; see :func:`anyaccel.detect`.
        declare: Devices to count by resource name.
        shared: Whether leases are seen by every process on the machine, or by this one alone.

    Raises:
        MachineError: When it names no machine.
        StateDirectoryError: When leases are to be shared, and there is no directory for them that can be trusted.
    """
    where = machine if isinstance(machine, Machine) else parse_machine(machine)
    key = (where.text, tuple(sorted((declare or {}).items())), shared, os.environ.get("ANYACCEL_STATE_DIR"))
    with _lock:
        found = _known.get(key)
        if found is None:
            inventory = detect(where, declare=declare)
            if shared:
                from anyaccel.workers.shared_leases import SharedLeases

                found = SharedLeases(inventory)
            else:
                found = LocalLeases(open_scheduler(inventory))
            _known[key] = found
        return found
