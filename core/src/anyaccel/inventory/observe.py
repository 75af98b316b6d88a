"""Observe the devices of a machine: all vendors at once, each in a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from anyaccel.durations import Duration, read_seconds
from anyaccel.errors import PluginError
from anyaccel.model import Inventory, Problem, Stats
from anyaccel.probe import parse_machine
from anyaccel.vendors import DEADLINE_SECONDS


def stats(
    inventory: Inventory, *, timeout: Duration = DEADLINE_SECONDS, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Stats], tuple[Problem, ...]]:
    """Observe the devices of an inventory now, each vendor in a guarded process of its own.

    Args:
        inventory: The machine.
        timeout: Time that each vendor may take.
        environ: The environment for the plug-ins; the environment of this process when None.

    Returns:
        Stats by device id, and the problems of vendors that failed. An unknown device has no entry, and neither has a
        simulated device.

    Examples:
        >>> anyaccel.stats(anyaccel.detect("sim:H100:2"))
        ({}, ())
    """
    seconds = read_seconds("timeout", timeout)
    machine = parse_machine(inventory.machine, environ)
    vendors = {device.vendor for device in inventory.devices if not device.declared}
    if machine.simulated or not vendors:
        return {}, ()
    from anyaccel.vendors.process import ask_hook, vendor_process  # a machine may have no vendor

    devices = {vendor: inventory.of_vendor(vendor) for vendor in vendors}
    sources = []
    for vendor in sorted(vendors):
        with contextlib.suppress(PluginError):  # it is not installed
            sources.append(vendor_process(vendor).source)
    answers, problems = ask_hook("stats", machine, timeout=seconds, environ=environ, sources=sources, devices=devices)
    observed: dict[str, Stats] = {}
    for source, seen in answers.items():
        ids = {device.raw_id: device.id for device in devices[source.vendor]}
        observed |= {ids[each]: stats for each, stats in seen.items() if each in ids}
    return observed, tuple(problems)
