"""Observation: what the NPUs do now, and what is wrong with them here."""

from __future__ import annotations

from collections.abc import Sequence

from anyaccel.plugin import Device, Finding, Health, ProbeContext, Severity, Stats

from anyaccel_ascend import environment, files, npu_smi
from anyaccel_ascend.detection import detect
from anyaccel_ascend.npu_smi import ToolFailureError
from anyaccel_ascend.npu_table import ShownChip, Table, parse_table


def stats(devices: Sequence[Device], ctx: ProbeContext) -> dict[str, Stats]:
    """Observe the NPUs with one call of npu-smi.

    The power of an A3 package stands with its first die; that of the second is unknown. A vNPU is left out: npu-smi
    shows the whole chip. Processes are those that npu-smi can see, at most eight per chip; their ids are the host's
    on a host.

    Raises:
        RuntimeError: When npu-smi says that it cannot tell.
        ValueError: When what it prints cannot be understood.
    """
    try:
        answer = npu_smi.ask(ctx, "Bus-Id", "info")
    except ToolFailureError as failure:
        raise RuntimeError(str(failure)) from None
    if answer is None:
        return {}
    table = parse_table(answer.stdout)
    shown = {(chip.card, chip.chip): chip for chip in table.chips}
    found = {}
    for device in devices:
        row = shown.get((_number(device, "card"), _number(device, "chip")))
        if row is not None and environment.addressable(device):
            found[device.id] = _stats(row, table)
    return found


def _number(device: Device, name: str) -> int:
    value = device.attributes.get(name)
    return value if isinstance(value, int) else -1


def _stats(row: ShownChip, table: Table) -> Stats:
    processes = None if table.processes is None else table.processes.get((row.card, row.chip), ())
    return Stats(
        memory_used_bytes=row.memory_used_bytes,
        utilization=row.utilization,
        temperature_celsius=row.temperature_celsius,
        power_watts=row.power_watts,
        health=Health.UNHEALTHY if row.fault else Health.HEALTHY,
        health_reason=row.fault,
        processes=processes,
    )


def diagnose(ctx: ProbeContext) -> list[Finding]:
    """Look for what keeps NPUs from being used: driver, tool, permissions, faults, variables."""
    detected = detect(ctx)
    if detected is None:
        return []
    findings = [Finding(severity=Severity.WARN, reason=note, remedy=_fix_of(note)) for note in detected.notes]
    by_reason: dict[str, list[str]] = {}
    for device in detected.devices:
        if device.health is Health.UNHEALTHY:
            by_reason.setdefault(device.health_reason, []).append(device.id)
    for reason, ids in by_reason.items():
        what, _, fix = reason.rpartition("; ")
        severity = Severity.WARN if "is split into" in reason else Severity.FAIL
        findings.append(Finding(severity=severity, reason=f"{', '.join(ids)}: {what or reason}.", remedy=fix))
    findings += _variables(ctx, detected.devices)
    if not detected.devices and not findings:
        message = "The Ascend driver is installed, and no NPU is on the PCI bus."
        findings.append(Finding(severity=Severity.WARN, reason=message, remedy="See 'lspci -d 19e5:' and dmesg."))
    if not findings:
        message = f"NPUs: {len(detected.devices)}, driver {detected.driver_version or 'of unknown version'}."
        findings.append(Finding(severity=Severity.OK, reason=message))
    return findings


def _fix_of(note: str) -> str:
    """The last sentence of a note says what to do; a minor fault asks for a look."""
    head, _, last = note.rstrip(".").rpartition(". ")
    return last if head else "See 'npu-smi info -t health'."


def _variables(ctx: ProbeContext, devices: Sequence[Device]) -> list[Finding]:
    count = sum(1 for device in devices if environment.addressable(device))
    mask, container = ctx.environ.get(environment.MASK), ctx.environ.get(environment.CONTAINER)
    findings = []
    if mask is not None and (fault := environment.mask_fault(mask, count)):
        fix = f"Write ascending numbers, such as {environment.MASK}=0,1, before anything imports torch_npu or CANN."
        findings.append(Finding(severity=Severity.FAIL, reason=fault, remedy=fix))
    if container is not None and mask is None and not files.in_container(ctx):
        findings.append(
            Finding(
                severity=Severity.WARN,
                reason=f"{environment.CONTAINER} hides nothing from processes: Ascend Docker Runtime alone reads it.",
                remedy=f"Set {environment.MASK} for processes.",
            )
        )
    return findings
