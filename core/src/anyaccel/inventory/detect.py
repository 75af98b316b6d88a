"""Find out what is on a machine, every vendor at once, each at its own risk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyaccel.errors import MachineError
from anyaccel.inventory import TASKS
from anyaccel.inventory.current import narrow
from anyaccel.inventory.machine import Machine, parse_machine
from anyaccel.model import (
    Detected,
    Device,
    Inventory,
    PluginInfo,
    Problem,
    ProblemKind,
    VendorReport,
    VendorState,
)
from anyaccel.model.wire import decode, encode
from anyaccel.plugins.discovery import Source, installed, problem_of
from anyaccel.probe.guard import Outcome, guarded_call

DEADLINE_SECONDS = 10.0

Answers = dict[str, tuple[Source, Outcome]]


def detect(
    machine: str | Machine | None = None,
    *,
    declare: Mapping[str, int] | None = None,
    timeout: float = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> Inventory:
    """Find the accelerators of a machine.

    Nothing of a vendor is loaded into this process: each plug-in runs in a child process of its own. One that hangs,
    crashes or lies is reported as failed and costs only its vendor.

    Args:
        machine: This host when None (or what ``ANYACCEL_MACHINE`` names), a simulation such as ``sim:H100:8``, or the
            directory of a recording.
        declare: Number of devices by resource name to count whatever is found; see :func:`anyaccel.declare`.
        timeout: Seconds that each vendor may take; all run at once.
        environ: The environment whose variables count; that of this process when None.

    Raises:
        MachineError: When ``machine`` names no machine, or a product that no plug-in knows.
    """
    where = machine if isinstance(machine, Machine) else parse_machine(machine, environ)
    answers, problems = ask("detect", where, timeout=timeout, environ=environ)
    if where.simulated:
        _check_products(where, answers)
    reports = [_report_problem(problem) for problem in problems]
    devices: list[Device] = []
    for source, outcome in answers.values():
        report, found = _interpret(source, outcome)
        clash = _clash(source, found, devices)
        reports.append(_report_problem(clash) if clash else report)
        devices += [] if clash else found
    reports.sort(key=lambda report: report.vendor)
    found = narrow(devices, where, os.environ if environ is None else environ)
    inventory = Inventory(machine=where.text, devices=tuple(found), vendors=tuple(reports))
    if declare:
        from anyaccel.inventory.declared import declare as add_declared

        return add_declared(inventory, declare)
    return inventory


def ask(
    task: str,
    machine: Machine,
    *,
    timeout: float = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
    vendors: Iterable[str] | None = None,
    **extra: Any,
) -> tuple[Answers, list[Problem]]:
    """Run one task of :mod:`anyaccel.inventory.tasks` for every installed plug-in.

    Args:
        task: Name of the task.
        machine: The machine that it is about.
        timeout: Seconds that each vendor may take.
        environ: The environment that detection sees.
        vendors: Vendors to ask; all when None.
        extra: By name, further payload: a value for all, or a dict by vendor.

    Returns:
        Outcomes by vendor, and the problems that kept a plug-in from being asked.
    """
    environ = dict(os.environ if environ is None else environ)
    call = guarded_call(TASKS)  # it starts while we look for plug-ins
    try:
        sources, problems = installed(environ)
    except BaseException:
        call.close()
        raise
    wanted = None if vendors is None else set(vendors)
    chosen = {source.vendor: source for source in sources if wanted is None or source.vendor in wanted}
    shared = {"machine": encode(machine), "environ": environ, "seconds": timeout}
    payloads = {
        vendor: {
            **shared,
            "source": encode(source),
            **{name: value[vendor] if isinstance(value, dict) else value for name, value in extra.items()},
        }
        for vendor, source in chosen.items()
    }
    outcomes = call.run({vendor: (f"{TASKS}:{task}", payload) for vendor, payload in payloads.items()}, timeout)
    return {vendor: (source, outcomes[vendor]) for vendor, source in chosen.items()}, problems


def problem_in(source: Source, outcome: Outcome, hook: str) -> Problem | None:
    """The problem that an outcome tells of: the plug-in's own, or that its process did not live to answer."""
    if outcome.fault:
        return problem_of(source, ProblemKind(outcome.fault), f"{outcome.reason}.", hook, outcome.details)
    if "problem" in outcome.value:
        return decode(Problem, outcome.value["problem"])
    return None


def _interpret(source: Source, outcome: Outcome) -> tuple[VendorReport, list[Device]]:
    answer: dict[str, Any] = outcome.value or {}
    problem = problem_in(source, outcome, "anyaccel_detect")
    try:
        info = decode(PluginInfo, answer["info"]) if "info" in answer else None
        data = answer.get("detected")
        detected = decode(Detected, data) if data is not None else None
    except ValueError as error:
        info = detected = None
        problem = problem_of(source, ProblemKind.CONTRACT, f"{error}.", "anyaccel_detect")
    state = VendorState.FAILED if problem else VendorState.OK if detected else VendorState.ABSENT
    report = VendorReport(
        vendor=source.vendor,
        state=state,
        resource=info.resource if info else "",
        kind=info.kind if info else "",
        env_vars=info.env_vars if info else (),
        distribution=source.distribution,
        version=source.version,
        driver_version=detected.driver_version if detected else "",
        partial=detected.partial if detected else False,
        notes=detected.notes if detected else (),
        problem=problem,
        seconds=answer.get("seconds", 0.0),
    )
    return report, list(detected.devices) if detected else []


def _report_problem(problem: Problem) -> VendorReport:
    return VendorReport(
        vendor=problem.vendor,
        state=VendorState.FAILED,
        distribution=problem.distribution,
        version=problem.version,
        problem=problem,
    )


def _clash(source: Source, found: Sequence[Device], others: Sequence[Device]) -> Problem | None:
    owners = {device.id: device.vendor for device in others}
    for device in found:
        if device.id in owners:
            reason = f"the device id {device.id!r} must be unique on the machine, and {owners[device.id]} has it too."
            return problem_of(source, ProblemKind.CONFLICT, reason, "anyaccel_detect")
    return None


def _check_products(machine: Machine, answers: Answers) -> None:
    """Refuse a simulation of something that no plug-in knows, or that several know under one name."""
    known = {
        vendor: [str(name) for name in (outcome.value or {}).get("products", [])]
        for vendor, (_, outcome) in answers.items()
    }
    for name in (item.product for item in machine.products):
        makers = [vendor for vendor, names in known.items() if name.casefold() in map(str.casefold, names)]
        if len(makers) > 1:
            raise MachineError(f"{name!r} is a product of {' and '.join(makers)}: set ANYACCEL_PLUGINS to one of them")
        if not makers:
            import difflib

            names = sorted({name for listed in known.values() for name in listed})
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            way_out = f"did you mean {', '.join(close)}?" if close else "see 'anyaccel plugins' for what is installed"
            failed = [problem for source, outcome in answers.values() if (problem := problem_in(source, outcome, ""))]
            if failed:
                way_out = f"perhaps one that failed does: {failed[0]}"
            raise MachineError(f"no installed plug-in knows the product {name!r} in {machine.text!r}; {way_out}")
