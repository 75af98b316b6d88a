"""What is wrong with AMD GPUs on a machine, one way out each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from anyaccel.plugin import Device, Finding, Health, ProbeContext, QueryError, Severity

from anyaccel_amd import detection, environment, health, smi
from anyaccel_amd.environment import CUDA, HIP, ROCR


def diagnose(ctx: ProbeContext) -> list[Finding]:
    """Look at the devices, the variables and the library."""
    found = detection.detect(ctx)
    if found is None:
        return []
    findings = [*_devices(ctx, found.devices), *_variables(ctx.environ, found.devices), *_library(ctx)]
    return findings or [Finding(severity=Severity.OK, reason=f"AMD: {len(found.devices)} devices, all of them usable.")]


def _devices(ctx: ProbeContext, devices: tuple[Device, ...]) -> Iterator[Finding]:
    broken: dict[str, list[str]] = {}
    for device in devices:
        if device.health is Health.UNHEALTHY:
            broken.setdefault(device.health_reason, []).append(device.id)
    for reason, ids in broken.items():
        what, _, fix = reason.partition("; ")
        yield Finding(severity=Severity.FAIL, reason=f"AMD: {', '.join(ids)} cannot be used: {what}.", remedy=fix)
    cards = {health.card_of(device): device for device in devices if device.attributes.get("numbered", True)}
    for card in cards:
        count = health.uncorrectable(ctx, card)
        if count:
            yield Finding(
                severity=Severity.WARN,
                reason=f"AMD {card}: {count} uncorrectable memory errors since the driver was loaded.",
                remedy="Reset the GPU when it is idle ('sudo amd-smi reset -G'); have it replaced when the number"
                " rises.",
            )
    yield from _incomplete(devices)


def _incomplete(devices: tuple[Device, ...]) -> Iterator[Finding]:
    """A kernel has 64 DRM nodes; a machine divided in 64, with a display chip, loses a partition (ROCm/amdsmi#99)."""
    counts = Counter(device.parent for device in devices if device.parent is not None)
    full = max(counts.values(), default=0)
    for parent, count in counts.items():
        if count < full:
            yield Finding(
                severity=Severity.WARN,
                reason=f"AMD {parent}: {count} partitions are to be seen where other cards have {full}.",
                remedy="Give the container all of them, or unload the driver of the display chip (often 'ast').",
            )


def _variables(environ: Mapping[str, str], devices: tuple[Device, ...]) -> Iterator[Finding]:
    rocr, hip, cuda = environ.get(ROCR), environ.get(HIP), environ.get(CUDA)
    try:
        seen = environment.visible(environ, devices)
    except ValueError as error:
        yield Finding(severity=Severity.FAIL, reason=f"{error}.", remedy=f"unset {ROCR}")
        return
    if rocr and hip and seen == [] and hip != environment.NONE and devices:
        yield Finding(
            severity=Severity.FAIL,
            reason=f"{ROCR}={rocr} and {HIP}={hip} together hide every GPU: HIP counts what ROCR left over.",
            remedy=f"unset {ROCR}",
        )
    if rocr is not None and hip is None:
        yield Finding(
            severity=Severity.WARN,
            reason=f"{ROCR} is set and {HIP} is not: Ray refuses to start so (ray-project/ray#53737).",
            remedy=f"unset {ROCR} and set {HIP} to the same numbers",
        )
    if hip == "":
        yield Finding(
            severity=Severity.WARN,
            reason=f"{HIP} is empty, which hides nothing (ROCm/hip#3001).",
            remedy=f"set {HIP}={environment.NONE} to hide all GPUs, or unset it",
        )
    yield from _rival(hip, cuda, devices)


def _rival(hip: str | None, cuda: str | None, devices: tuple[Device, ...]) -> Iterator[Finding]:
    if not cuda:
        return
    if not hip and any(device.attributes.get("beside_cuda") for device in devices):
        yield Finding(
            severity=Severity.WARN,
            reason=f"{CUDA}={cuda} also filters the AMD GPUs, since {HIP} is not set (ollama/ollama#15752).",
            remedy=f"set {HIP} to the AMD GPUs that are meant",
        )
    elif hip and hip != cuda and not any(device.attributes.get("beside_cuda") for device in devices):
        yield Finding(
            severity=Severity.WARN,
            reason=f"{HIP}={hip} and {CUDA}={cuda} differ: HIP uses the first, and vLLM refuses to start.",
            remedy=f"unset {CUDA}",
        )


def _library(ctx: ProbeContext) -> Iterator[Finding]:
    try:
        ctx.query("amdsmi/version", smi.question(ctx, "version"))
    except QueryError as error:
        if error.kind in smi.NOT_INSTALLED:
            return
        if error.kind in ("KeyError", "AttributeError"):
            yield Finding(
                severity=Severity.WARN,
                reason=(
                    "The Python package amdsmi is installed and cannot load ROCm's libamd_smi.so"
                    f" ({error.kind}: {error}). anyaccel works without it; programs that"
                    " import it, Ray 2.60 among them, may not start."
                ),
                remedy="pip uninstall amdsmi, or install the version that belongs to the installed ROCm",
            )
        else:
            yield Finding(
                severity=Severity.WARN,
                reason=f"The library amdsmi does not answer ({error.kind}): {error}",
                remedy="run 'amd-smi list' to see what it says; anyaccel works without it",
            )
