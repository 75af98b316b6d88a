"""The devices of a machine, for all pools of this process together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping

from anyaccel.inventory.detect import detect
from anyaccel.inventory.machine import Machine, parse_machine
from anyaccel.launcher.launch import open_scheduler
from anyaccel.workers.leases import Leases, LocalLeases

_known: weakref.WeakValueDictionary[object, LocalLeases] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def machine_leases(machine: str | Machine | None, declare: Mapping[str, int] | None) -> Leases:
    """The leases of a machine: the same for all pools that live at the same time, so that none takes another's device.

    Raises:
        MachineError: When it names no machine.
    """
    where = machine if isinstance(machine, Machine) else parse_machine(machine)
    key = (where.text, tuple(sorted((declare or {}).items())))
    with _lock:
        found = _known.get(key)
        if found is None:
            found = _known[key] = LocalLeases(open_scheduler(detect(where, declare=declare)))
        return found
