"""Diagnose a machine: plug-ins, devices, permissions and masks, and the findings of vendors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from anyaccel.inventory.detect import detect
from anyaccel.inventory.observe import stats
from anyaccel.linux import group_name
from anyaccel.model import (
    Device,
    Finding,
    Health,
    Inventory,
    Problem,
    Severity,
    Stats,
    VendorReport,
    VendorState,
)
from anyaccel.probe import HOST, Facts, Machine, parse_machine
from anyaccel.text import listed
from anyaccel.vendors import DEADLINE_SECONDS, ask_hook

ORPHANED_SHARE = 0.05
"""Part of a device's memory that drivers and firmware may use without a process."""
ORDER = (Severity.FAIL, Severity.WARN, Severity.OK)


def diagnose(
    machine: str | Machine | None = None,
    *,
    timeout: float = DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> tuple[Inventory, list[tuple[str, Finding]]]:
    """Find faults of a machine's accelerators and their software.

    The vendors' own diagnosis runs in guarded processes, like detection. On a simulated machine, only the plug-ins
    themselves are diagnosed; of a recording, only recorded facts are known.

    Args:
        machine: See :func:`anyaccel.detect`.
        timeout: Seconds that each vendor may take for each of detection, observation and diagnosis.
        environ: The environment whose variables count; the environment of this process when None.

    Returns:
        The inventory, and the findings, failures first, each with the key of its vendor; empty for the installation.

    Raises:
        MachineError: When ``machine`` names no machine.
    """
    environ = dict(os.environ if environ is None else environ)
    where = parse_machine(machine, environ)
    # Absent vendors too: a faulty presence.json would hide a vendor whose hardware is here.
    inventory = detect(where, timeout=timeout, environ=environ, everybody=True)
    found = [] if where.simulated else _ask_vendors(where, inventory, timeout, environ)
    if where.text == HOST:
        found += _observe(inventory, timeout, environ)
    environ = {**where.facts(environ).environ, **environ}
    for report in inventory.vendors:
        own = (*_of_vendor(report, inventory, environ), *_nodes(where, inventory.of_vendor(report.vendor)))
        found += [(report.vendor, finding) for finding in own]
    if not inventory.vendors:
        fix = "install one, for example with 'pip install anyaccel[all]'"
        message = "no plug-in is installed, so nothing was probed"
        found.append(("", Finding(severity=Severity.WARN, reason=message, remedy=fix)))
    found.sort(key=lambda each: (ORDER.index(each[1].severity), each[0]))
    return inventory, found


def _ask_vendors(
    machine: Machine, inventory: Inventory, timeout: float, environ: Mapping[str, str]
) -> list[tuple[str, Finding]]:
    """Return the findings of the working plug-ins."""
    # A plug-in that failed before it gave its identity would repeat the fault.
    working = [each.vendor for each in inventory.vendors if each.resource or each.state is not VendorState.FAILED]
    if not working:
        return []
    answers, problems = ask_hook("diagnose", machine, timeout=timeout, environ=environ, vendors=working)
    found = [(source.vendor, each) for source, told in answers.items() for each in told]
    return found + [(problem.vendor, _of_problem(problem)) for problem in problems if problem.vendor in working]


def _observe(inventory: Inventory, timeout: float, environ: Mapping[str, str]) -> Iterator[tuple[str, Finding]]:
    """Yield findings about memory without a process, and about plug-ins without stats."""
    observed, problems = stats(inventory, timeout=timeout, environ=environ)
    yield from ((problem.vendor, _of_problem(problem)) for problem in problems)
    for device in inventory.devices:
        seen = observed.get(device.id, Stats())
        used, total = seen.memory_used_bytes, device.memory_bytes
        # None stands for unknown processes, so only an empty list says that memory has no owner.
        if seen.processes == () and used and total and used > total * ORPHANED_SHARE:
            message = f"{device.name} has {used / 2**30:.1f} GiB in use without a visible process"
            fix = "end processes of other users or containers; if there are none, reset the device"
            yield device.vendor, Finding(severity=Severity.WARN, reason=message, remedy=fix)


def _of_problem(problem: Problem) -> Finding:
    origin = " ".join(part for part in (problem.distribution, problem.version) if part) or f"plug-in {problem.vendor}"
    what = f"{problem.hook}: {problem.reason}" if problem.hook else problem.reason
    return Finding(severity=Severity.FAIL, reason=f"{origin}: {what}", remedy=problem.next_step)


def _of_vendor(report: VendorReport, inventory: Inventory, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of detection about a vendor."""
    if report.problem is not None:
        yield _of_problem(report.problem)
        return
    masks = tuple(name for name in report.env_vars if name in environ)
    for note in report.notes:
        message, _, way_out = note.partition("; ")
        named = [name for name in masks if name in note]
        fix = way_out or (f"unset {' '.join(named)}" if named else f"nothing where that is meant, else {_read(report)}")
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)
    devices = inventory.of_vendor(report.vendor)
    for device in devices:
        if device.health is Health.UNHEALTHY:
            reason = device.health_reason or "the vendor gives no reason"
            message = f"{device.name} ({device.id}) cannot be used: {reason}"
            yield Finding(severity=Severity.FAIL, reason=message, remedy=device.health_remedy or _read(report))
    hidden = sum(not device.visible for device in devices)
    if devices and hidden == len(devices) and not report.notes and "ANYACCEL_DEVICES" not in environ:
        message = f"the environment hides every device of {report.vendor}"
        fix = f"unset {' '.join(masks)}" if masks else _read(report)
        yield Finding(severity=Severity.WARN, reason=message, remedy=fix)
    if report.partial and not report.notes and all(device.health is not Health.UNHEALTHY for device in devices):
        message = f"{report.vendor}: some devices could not be read"
        yield Finding(severity=Severity.WARN, reason=message, remedy=_read(report))
    yield Finding(severity=Severity.OK, reason=_summary(report, len(devices), hidden))


def _summary(report: VendorReport, count: int, hidden: int) -> str:
    origin = " ".join(part for part in (report.vendor, "plug-in", report.version) if part)
    if report.state is VendorState.ABSENT:
        return f"{origin}, no hardware of this vendor is on the machine"
    parts = [origin, *([f"driver {report.driver_version}"] if report.driver_version else [])]
    parts.append(f"{count} device{'s' * (count != 1)}" + (f", {hidden} of them hidden" if hidden else ""))
    return ", ".join(parts)


def _read(report: VendorReport) -> str:
    """Return the way out for a plug-in without one."""
    return f"see the documentation of {report.distribution or f'the plug-in for {report.vendor}'}"


def _nodes(machine: Machine, devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield findings about device nodes without access for this user, and about missing nodes."""
    if machine.simulated:
        return
    facts = machine.facts({})
    usable = [device for device in devices if device.usable]
    paths = dict.fromkeys(path for device in usable for path in device.nodes)
    closed = [path for path in paths if _closed(facts, path)]
    # A recording has only the facts that were read, so a missing node is certain on this host alone.
    missing = [path for path in paths if machine.recording is None and path not in closed and not facts.exists(path)]
    if missing:
        message = f"device nodes of {devices[0].vendor} are missing: {listed(missing)}"
        fix = "pass them to the container (docker run --device ...), or load the vendor's driver"
        yield Finding(severity=Severity.FAIL, reason=message, remedy=fix)
    groups: dict[str, list[str]] = {}
    for path in closed:
        groups.setdefault(_group(path) if machine.recording is None else "", []).append(path)
    for group, members in groups.items():
        fix = f"sudo usermod -aG {group} $USER  (then log in again)" if group else "ask an administrator for access"
        yield Finding(severity=Severity.FAIL, reason=f"this user may not open {listed(members)}", remedy=fix)


def _closed(facts: Facts, path: str) -> bool:
    try:
        node = facts.node(path)
    except OSError:  # not even its directory is open to us
        return True
    return node is not None and not node.readable


def _group(path: str) -> str:
    """Return the user group with access to a path; empty for an unknown group."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    # No user should join the group of root.
    return group_name(status.st_gid) if status.st_mode & 0o040 and status.st_gid != 0 else ""
