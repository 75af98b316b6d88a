"""Find out what is on a machine, every vendor at once, each at its own risk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from anyaccel.errors import MachineError
from anyaccel.inventory.current import narrow
from anyaccel.model import Device, Inventory, Problem, Request, VendorReport, VendorState
from anyaccel.probe.context import Facts
from anyaccel.probe.host import HostFacts
from anyaccel.probe.machine import HOST, Machine, parse_machine
from anyaccel.vendors import DEADLINE_SECONDS, begin
from anyaccel.vendors.discovery import Source, installed
from anyaccel.vendors.presence import Presence, possible


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
    """
    environ = os.environ if environ is None else environ
    where = machine if isinstance(machine, Machine) else parse_machine(machine, environ)
    if where.text != HOST:  # somebody is to be asked there
        begin()
    sources, problems = installed(environ)
    present: dict[str, Presence | None] = {source.vendor: None for source in sources}
    if not everybody and not where.simulated:
        present = possible(sources, *_seen(where, environ))
    reports = [_report_problem(problem) for problem in problems]
    reports += [_not_asked(source) for source in sources if source.vendor not in present]
    found: list[Device] = []
    if present:
        asked, found = _ask(where, sources, present, request, timeout=timeout, environ=environ)
        reports += asked
    elif where.simulated:
        raise MachineError(f"no plug-in is installed that could simulate {where.text!r}")
    reports.sort(key=lambda report: report.vendor)
    devices = narrow(found, where, environ)
    inventory = Inventory(machine=where.text, devices=tuple(devices), vendors=tuple(reports))
    if declare:
        from anyaccel.inventory.declared import declare as add_declared

        return add_declared(inventory, declare)
    return inventory


def _ask(
    machine: Machine,
    sources: Sequence[Source],
    present: Mapping[str, Presence | None],
    request: Request | None,
    *,
    timeout: float,
    environ: Mapping[str, str],
) -> tuple[list[VendorReport], list[Device]]:
    """Ask the vendors that may be there; how each fared, and their devices."""
    from anyaccel.inventory import answers
    from anyaccel.vendors.process import ask

    enough = None if request is None else answers.enough_for(request, present, sources)
    outcomes, _ = ask(
        "detect", machine, timeout=timeout, environ=environ, vendors=present, sources=sources, enough=enough
    )
    if machine.simulated:
        answers.check_products(machine, outcomes)
    reports = []
    found: dict[str, list[Device]] = {}
    for source, outcome in outcomes.values():
        report, found[source.vendor] = answers.interpret(source, outcome)
        reports.append(report)
    return reports, answers.told_apart(found)


def _seen(machine: Machine, environ: Mapping[str, str]) -> tuple[Facts, Mapping[str, str]]:
    """A machine's facts, and the environment in which its vendors are looked for."""
    if machine.recording is None:
        return HostFacts(environ), environ
    from anyaccel.probe.loading import load
    from anyaccel.probe.recording import RecordedFacts

    facts = RecordedFacts(load(machine.recording))
    return facts, {**facts.environ, **environ}


def _report_problem(problem: Problem) -> VendorReport:
    return VendorReport(
        vendor=problem.vendor,
        state=VendorState.FAILED,
        distribution=problem.distribution,
        version=problem.version,
        problem=problem,
    )


def _not_asked(source: Source) -> VendorReport:
    return VendorReport(
        vendor=source.vendor,
        state=VendorState.NOT_ASKED,
        distribution=source.distribution,
        version=source.version,
    )
