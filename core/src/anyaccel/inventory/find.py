"""Ask the vendors of a machine for its devices, all at once, each in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence

from anyaccel import configuration
from anyaccel.errors import MachineError, UsageError
from anyaccel.inventory.current import narrow
from anyaccel.model import Device, Inventory, Problem, VendorReport, VendorState, replace
from anyaccel.probe import HOST, Machine, parse_machine
from anyaccel.vendors import (
    ALLOW_VARIABLE,
    DENY_VARIABLE,
    Presence,
    Source,
    begin,
    do_meanwhile,
    installed,
    read_presences,
    select_makers,
    select_present,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.probe import Facts


def find(
    machine: str | Machine | None,
    *,
    declare: Mapping[str, int] | None,
    timeout: float,
    environ: Mapping[str, str],
    everybody: bool,
) -> Inventory:
    """Detect the accelerators of a machine; see :func:`anyaccel.detect`, which has started the fork server."""
    where = parse_machine(machine, environ)
    sources, problems = installed(environ)
    present: Mapping[str, Presence | None]
    present = said = read_presences(sources)
    facts = None if where.simulated else where.facts(environ)
    if facts is None and not everybody:
        present = select_makers(said, [item.product for item in where.products])
    elif facts is not None and not everybody:
        present = select_present(said, facts, {**facts.environ, **environ})
    if where.text == HOST and not everybody:
        from anyaccel.inventory.hangs import recall  # nothing is remembered of other machines

        hung = recall([source for source in sources if source.vendor in present], timeout, environ)
        present = {vendor: signs for vendor, signs in present.items() if vendor not in hung}
        problems += hung.values()
    reports = [_report_unasked(problem, VendorState.FAILED, problem) for problem in problems]
    failed = {report.vendor for report in reports}
    others = (source for source in sources if source.vendor not in {*present, *failed})
    reports += [_report_unasked(source, VendorState.NOT_ASKED) for source in others]
    found: list[Device] = []
    if present or where.simulated:  # without a plug-in, to refuse the product
        begin()
        asked, found = _ask(where, sources, said, present, facts=facts, timeout=timeout, environ=environ)
        reports += asked
    reports.sort(key=lambda report: report.vendor)  # answers come in any order
    devices = narrow(found, where, environ)  # after contest(), which needs the full devices of both vendors
    inventory = Inventory(machine=where.text, devices=tuple(devices), vendors=tuple(reports))
    if declare:
        from anyaccel.inventory.declared import declare as add_declared

        inventory = add_declared(inventory, declare)
    return inventory if where.recording else _labeled(inventory)  # a recording is of another machine


def _labeled(inventory: Inventory) -> Inventory:
    """Add the labels from the machine's configuration to the devices.

    A faulty configuration adds no labels. A request for devices reports the fault.
    """
    with contextlib.suppress(UsageError):
        found = configuration.machine()
        names = found.names("devices")
        if names:
            from anyaccel.inventory.declared import label

            return label(inventory, {name: found.get(f"devices.{name}.labels") for name in names})
    return inventory


def _ask(
    machine: Machine,
    sources: Sequence[Source],
    said: Mapping[str, Presence | None],
    present: Mapping[str, Presence | None],
    *,
    facts: Facts | None,
    timeout: float,
    environ: Mapping[str, str],
) -> tuple[list[VendorReport], list[Device]]:
    """Ask the possible vendors; return their reports and devices."""
    from anyaccel.vendors.process import ask

    do_meanwhile(functools.partial(_import_rest, real=facts is not None))
    detect = functools.partial(ask, "detect", timeout=timeout, environ=environ, sources=sources)
    unnamed = [vendor for vendor, signs in present.items() if signs is None or signs.names is None]
    outcomes, _ = detect(machine, vendors=present, more={each: {"names": True} for each in unnamed})
    if machine.text == HOST:
        from anyaccel.inventory.hangs import remember

        remember(outcomes, timeout, environ)
    from anyaccel.inventory import answers

    names = answers.VendorNames(
        sources, said, {vendor: answers.product_names(outcome) for vendor, (_, outcome) in outcomes.items()}
    )
    if machine.simulated:
        # Only after all answers is it known whose product a name is; a vendor that simulated another's starts again.
        for vendor, own in answers.check_products(machine, outcomes, names).items():
            rest = replace(machine, products=own)
            outcomes |= detect(rest, vendors=[vendor], more={vendor: {"simulate": True}})[0]
    reports = []
    found: dict[str, list[Device]] = {}
    for source, outcome in outcomes.values():
        report, found[source.vendor] = answers.interpret(source, outcome)
        reports.append(report)
    reports, found = names.own(reports, found)
    if facts is None:
        return reports, answers.qualify_ids(found)
    from anyaccel.inventory.contested import contest
    from anyaccel.inventory.memory import limited

    control_nodes = {report.vendor: report.control_nodes for report in reports}
    contested = contest(found, control_nodes, host=machine.text == HOST)
    return reports, limited(answers.qualify_ids(contested), facts)


def _import_rest(*, real: bool) -> None:
    """Import the modules for the answers, while the vendors answer; ``real`` unless the machine is simulated."""
    import anyaccel.inventory.answers

    if real:
        import anyaccel.inventory.contested
        import anyaccel.inventory.memory  # noqa: F401


def _report_unasked(plugin: Source | Problem, state: VendorState, problem: Problem | None = None) -> VendorReport:
    """Return the report of a vendor whose plug-in was not, or cannot be, asked."""
    return VendorReport(
        vendor=plugin.vendor,
        state=state,
        distribution=plugin.distribution,
        version=plugin.version,
        problem=problem,
    )


def detect_excluded(inventory: Inventory) -> Inventory:
    """Ask plug-ins excluded by ``ANYACCEL_PLUGINS`` and ``ANYACCEL_DISABLE`` for devices that workers must not open.

    Each plug-in runs in its guarded process, as in detection. Answers are kept per machine, since confinement asks
    before each launch. A simulated machine has no further devices.

    Args:
        inventory: The machine's inventory; its vendors are not asked again.

    Returns:
        The devices and reports of the excluded vendors.
    """
    return _detect_excluded(inventory.machine, frozenset(report.vendor for report in inventory.vendors))


@functools.lru_cache(maxsize=16)
def _detect_excluded(machine: str, listed: frozenset[str]) -> Inventory:
    from anyaccel.inventory.answers import interpret
    from anyaccel.vendors.process import ask

    try:
        where = parse_machine(machine)
    except MachineError:  # the inventory was made by hand
        return Inventory(machine=machine, devices=())
    environ = {name: value for name, value in os.environ.items() if name not in {ALLOW_VARIABLE, DENY_VARIABLE}}
    sources, problems = ([], []) if where.simulated else installed(environ)
    broken = (problem for problem in problems if problem.vendor not in listed)
    reports = [_report_unasked(problem, VendorState.FAILED, problem) for problem in broken]
    excluded = {source.vendor for source in sources} - listed
    found: list[Device] = []
    for source, outcome in ask("detect", where, environ=environ, vendors=excluded)[0].values() if excluded else ():
        report, devices = interpret(source, outcome)
        reports.append(report)
        found += devices
    return Inventory(machine=machine, devices=tuple(found), vendors=tuple(reports))
