"""Devices of excluded vendors, which must be closed to workers."""

from __future__ import annotations

import functools
import os

from anyaccel.errors import MachineError
from anyaccel.inventory.answers import interpret
from anyaccel.inventory.find import report_problem
from anyaccel.model import Device, Inventory
from anyaccel.probe.machine import parse_machine
from anyaccel.vendors.discovery import ALLOW_VARIABLE, DENY_VARIABLE, installed
from anyaccel.vendors.process import ask


def left_out(inventory: Inventory) -> Inventory:
    """Ask plug-ins excluded by ``ANYACCEL_PLUGINS`` and ``ANYACCEL_DISABLE`` for their devices on a machine.

    Each plug-in runs in its guarded process, as in detection. Answers are kept per machine, since confinement asks
    before each launch. A simulated machine has no further devices.

    Args:
        inventory: The machine's inventory; its vendors are not asked again.

    Returns:
        The devices and reports of the excluded vendors.
    """
    return _left_out(inventory.machine, frozenset(report.vendor for report in inventory.vendors))


@functools.lru_cache(maxsize=16)
def _left_out(machine: str, listed: frozenset[str]) -> Inventory:
    try:
        where = parse_machine(machine)
    except MachineError:  # the inventory was made by hand
        return Inventory(machine=machine, devices=())
    environ = {name: value for name, value in os.environ.items() if name not in {ALLOW_VARIABLE, DENY_VARIABLE}}
    sources, problems = ([], []) if where.simulated else installed(environ)
    reports = [report_problem(problem) for problem in problems if problem.vendor not in listed]
    excluded = {source.vendor for source in sources} - listed
    found: list[Device] = []
    for source, outcome in ask("detect", where, environ=environ, vendors=excluded)[0].values() if excluded else ():
        report, devices = interpret(source, outcome)
        reports.append(report)
        found += devices
    return Inventory(machine=machine, devices=tuple(found), vendors=tuple(reports))
