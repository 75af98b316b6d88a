"""Observe devices while the machine runs: memory, load, health, and who uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.model import Device, Inventory, Problem, ProblemKind, Stats
from anyaccel.model.wire import decode
from anyaccel.probe.machine import parse_machine
from anyaccel.vendors import DEADLINE_SECONDS
from anyaccel.vendors.discovery import Source, problem_of


def stats(
    inventory: Inventory, *, timeout: float = DEADLINE_SECONDS, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Stats], tuple[Problem, ...]]:
    """Observe the devices of an inventory now, each vendor in a guarded process of its own.

    Args:
        inventory: What was found on the machine.
        timeout: Seconds that each vendor may take.
        environ: The environment that the plug-ins see; that of this process when None.

    Returns:
        Stats by device id, and the problems of vendors that could not tell. A device about which nothing is known has
        no entry, and a simulated one never has.

    Examples:
        >>> anyaccel.stats(anyaccel.detect("sim:H100:2"))
        ({}, ())
    """
    machine = parse_machine(inventory.machine, environ)
    vendors = {device.vendor for device in inventory.devices if not device.declared}
    if machine.simulated or not vendors:
        return {}, ()
    from anyaccel.vendors.process import ask, problem_in

    devices = {vendor: inventory.of_vendor(vendor) for vendor in vendors}
    answers, _ = ask("stats", machine, timeout=timeout, environ=environ, vendors=vendors, devices=devices)
    observed: dict[str, Stats] = {}
    problems = []
    for source, outcome in answers.values():
        problem = problem_in(source, outcome, "anyaccel_stats")
        if problem is not None:
            problems.append(problem)
        else:
            try:
                observed |= _decoded(source, outcome.value.get("stats"), devices[source.vendor])
            except ValueError as error:
                problems.append(problem_of(source, ProblemKind.CONTRACT, f"{error}.", "anyaccel_stats"))
    return observed, tuple(problems)


def _decoded(source: Source, answer: object, devices: Sequence[Device]) -> dict[str, Stats]:

    if not isinstance(answer, dict):
        raise ValueError("its process sent what is no answer")  # noqa: TRY004 - as decode() below says it
    ids = {device.raw_id: device.id for device in devices}
    return {ids[each]: decode(Stats, data, f"{source.vendor} stats") for each, data in answer.items() if each in ids}
