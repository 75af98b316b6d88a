"""What is wrong with NVIDIA's GPUs, driver or settings on a machine, and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyaccel.plugin import CommandTimeoutError, Detected, Device, Finding, Health, ProbeContext, QueryError, Severity

from . import detection, files, health, nvml
from .visibility import complaint, in_cuda

_RESET_BY = "then 'nvidia-smi -c DEFAULT'"


def diagnose(ctx: ProbeContext) -> list[Finding]:
    """Look at the machine once more, with an eye for faults. Nothing is found where no NVIDIA GPU can be."""
    if not files.is_present(ctx):
        return []
    try:
        detected = detection.detect(ctx)
    except RuntimeError as error:
        problem, _, fix = str(error).partition(": ")
        return [
            Finding(severity=Severity.FAIL, reason=f"{problem}.", remedy=fix),
            *_binding(ctx),
            *_kernel_log(ctx, ()),
        ]
    except (OSError, ValueError) as error:
        return [Finding(severity=Severity.FAIL, reason=f"{error}.", remedy="report this with 'anyaccel record DIR'")]
    if detected is None:
        return []
    return [
        *_driver(detected),
        *_devices(detected.devices),
        *(_from_note(note) for note in detected.notes),
        *_excluded(ctx),
        *_persistence(ctx, detected),
        *_sharing(detected.devices),
        *_mask(ctx.environ, detected.devices),
        *_binding(ctx),
        *_kernel_log(ctx, detected.devices),
    ]


def _driver(detected: Detected) -> Iterator[Finding]:
    usable = [device for device in detected.devices if device.health is not Health.UNHEALTHY]
    if usable and detected.driver_version:
        message = f"Driver {detected.driver_version} answers; usable devices: {len(usable)}."
        yield Finding(severity=Severity.OK, reason=message)


def _devices(devices: Sequence[Device]) -> Iterator[Finding]:
    for device in devices:
        if device.health is Health.UNHEALTHY:
            problem, _, fix = device.health_reason.partition(": ")
            message = f"{device.model} {device.id}: {problem}."
            yield Finding(severity=Severity.FAIL if in_cuda(device) else Severity.WARN, reason=message, remedy=fix)


def _from_note(note: str) -> Finding:
    problem, _, fix = note.rstrip(".").partition(": ")
    return Finding(severity=Severity.WARN, reason=f"{problem}.", remedy=fix)


def _excluded(ctx: ProbeContext) -> Iterator[Finding]:
    for card in files.cards(ctx):
        if card.excluded:
            yield Finding(
                severity=Severity.WARN,
                reason=f"The driver was told to leave {card.model} {files.card_id(card)} alone (GPU Excluded: Yes).",
                remedy="remove it from the module option NVreg_ExcludedGpus and reload the driver",
            )


def _persistence(ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
    indexes = {int(device.attributes["nvml_index"]) for device in detected.devices if "nvml_index" in device.attributes}
    modes = [facts.get("persistence") for index in sorted(indexes) if (facts := _facts(ctx, index))]
    if 0 in modes:
        yield Finding(
            severity=Severity.WARN,
            reason="Persistence is off: idle GPUs are initialized at each start, one to three seconds each, and forget"
            " their settings.",
            remedy="systemctl enable --now nvidia-persistenced",
        )


def _facts(ctx: ProbeContext, index: int) -> Mapping[str, Any]:
    from functools import partial

    try:
        facts: Mapping[str, Any] = ctx.query(f"nvml/device/{index}", partial(nvml.device, index))
    except QueryError:
        return {}
    return facts


def _sharing(devices: Sequence[Device]) -> Iterator[Finding]:
    for device in devices:
        mode = str(device.attributes.get("compute_mode", ""))
        if mode.startswith("exclusive") and "mps_pipe" not in device.attributes:
            yield Finding(
                severity=Severity.WARN,
                reason=f"{device.id} is in the compute mode {mode.upper()}, no MPS daemon runs: it cannot be shared.",
                remedy=f"start 'nvidia-cuda-mps-control -d', or stop its processes, {_RESET_BY}",
            )


def _mask(environ: Mapping[str, str], devices: Sequence[Device]) -> Iterator[Finding]:
    try:
        wrong = complaint(environ, devices)
    except ValueError as error:
        problem, _, fix = str(error).rpartition("; ")
        wrong = (f"{problem}.", fix)
    if wrong:
        yield Finding(severity=Severity.WARN, reason=wrong[0], remedy=wrong[1])


def _binding(ctx: ProbeContext) -> Iterator[Finding]:
    try:
        distributions = ctx.query("nvml/binding", nvml.binding)
    except QueryError:
        return
    if "pynvml" in distributions:
        yield Finding(
            severity=Severity.WARN,
            reason="The package pynvml is installed, which is not NVIDIA's and claims the module of nvidia-ml-py.",
            remedy="pip uninstall pynvml && pip install --force-reinstall nvidia-ml-py",
        )


def _kernel_log(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    try:
        result = ctx.run(["dmesg"], timeout=2)
    except (CommandTimeoutError, OSError):
        return
    if result is None or result.returncode != 0:  # often for root alone
        return
    for address, codes in health.xids(result.stdout).items():
        here = [f" ({d.id})" for d in devices if d.pci_bus_id and d.pci_bus_id.startswith(address)]
        for code in health.serious(codes):
            yield Finding(
                severity=Severity.FAIL,
                reason=f"The kernel log shows XID {code} for the GPU at {address}{''.join(here[:1])}.",
                remedy=health.XID_ACTIONS[code],
            )
