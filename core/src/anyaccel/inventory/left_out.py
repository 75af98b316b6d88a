"""Devices of excluded vendors, which must be closed to workers."""

from __future__ import annotations

import functools
import os

from anyaccel.errors import MachineError
from anyaccel.model import Inventory, Value
from anyaccel.model.wire import decode
from anyaccel.probe.machine import parse_machine
from anyaccel.vendors.discovery import ALLOW_VARIABLE, DENY_VARIABLE, installed
from anyaccel.vendors.process import ask, problem_in


class Unlisted(Value):
    """A device outside of the inventory.

    Attributes:
        name: Name of the device.
        nodes: Device nodes that the device needs.
    """

    name: str
    nodes: tuple[str, ...] = ()


class LeftOut(Value):
    """A vendor with an installed plug-in outside of an inventory.

    Attributes:
        vendor: Key of the vendor.
        devices: Known devices of the vendor.
        reason: Why not all devices are known; empty when all are.
    """

    vendor: str
    devices: tuple[Unlisted, ...] = ()
    reason: str = ""


def left_out(inventory: Inventory) -> tuple[LeftOut, ...]:
    """Ask plug-ins excluded by ``ANYACCEL_PLUGINS`` and ``ANYACCEL_DISABLE`` for their devices on a machine.

    Each plug-in runs in its guarded process, as in detection. Answers are kept per machine, since confinement asks
    before each launch. A simulated machine has no further devices.

    Args:
        inventory: The machine's inventory; its vendors are not asked again.
    """
    return _left_out(inventory.machine, frozenset(report.vendor for report in inventory.vendors))


@functools.lru_cache(maxsize=16)
def _left_out(machine: str, listed: frozenset[str]) -> tuple[LeftOut, ...]:
    try:
        where = parse_machine(machine)
    except MachineError:  # the inventory was made by hand
        return ()
    if where.simulated:
        return ()
    environ = {name: value for name, value in os.environ.items() if name not in {ALLOW_VARIABLE, DENY_VARIABLE}}
    sources, problems = installed(environ)
    found = [LeftOut(vendor=problem.vendor, reason=problem.reason) for problem in problems]
    vendors = {source.vendor for source in sources} - listed
    answers = ask("nodes", where, environ=environ, vendors=vendors)[0] if vendors else {}
    for vendor, (source, outcome) in answers.items():
        problem = problem_in(source, outcome, "anyaccel_detect")
        reason = problem.reason if problem else ""
        try:
            devices = tuple(decode(Unlisted, device) for device in (outcome.value or {}).get("devices", ()))
        except ValueError as error:
            devices, reason = (), str(error)
        found.append(LeftOut(vendor=vendor, devices=devices, reason=reason))
    return tuple(vendor for vendor in found if vendor.vendor not in listed and (vendor.devices or vendor.reason))
