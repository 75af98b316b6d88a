"""Devices of vendors that the environment leaves out of an inventory: there all the same, and to be closed."""

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
    """A device that no inventory lists.

    Attributes:
        name: What to call it.
        nodes: Device nodes without which it does not work.
    """

    name: str
    nodes: tuple[str, ...] = ()


class LeftOut(Value):
    """A vendor whose plug-in is installed and which an inventory leaves out.

    Attributes:
        vendor: Key of the vendor.
        devices: Its devices.
        reason: Why they are not known, or not all; empty when they are.
    """

    vendor: str
    devices: tuple[Unlisted, ...] = ()
    reason: str = ""


def left_out(inventory: Inventory) -> tuple[LeftOut, ...]:
    """Ask the plug-ins that ``ANYACCEL_PLUGINS`` and ``ANYACCEL_DISABLE`` leave out what they have on a machine.

    Each runs in its guarded process, as in detection, so that it can do no harm here. They are asked once per machine
    and process. A simulated machine has what it was made with, so nothing is asked about it.

    Args:
        inventory: The machine's inventory: its vendors have been asked.
    """
    return _left_out(inventory.machine, frozenset(report.vendor for report in inventory.vendors))


@functools.lru_cache(maxsize=16)
def _left_out(machine: str, listed: frozenset[str]) -> tuple[LeftOut, ...]:
    try:
        where = parse_machine(machine)
    except MachineError:  # an inventory that somebody made: its machine is nowhere
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
