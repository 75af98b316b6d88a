"""What is wrong with Intel GPUs on a machine, each with one way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anyaccel.plugin import Detected, Device, Finding, Health, ProbeContext, Severity

from anyaccel_intel import affinity, runtime, selector
from anyaccel_intel.affinity import MASK
from anyaccel_intel.detection import Gpu, detect, survey
from anyaccel_intel.drivers import BY_PATH, PCI
from anyaccel_intel.environment import SELECTOR, visible

SMALL_BAR = 256 << 20
DEAD_VARIABLE = "XPU_VISIBLE_DEVICES"


def diagnose(ctx: ProbeContext) -> tuple[Finding, ...]:
    """Look for what is wrong; nothing is said where nothing of Intel's is on the machine."""
    found, detected = survey(ctx), detect(ctx)
    if found is None or detected is None:
        return ()
    troubles = (
        *_devices(found.gpus, ctx),
        *_environment(ctx, detected.devices),
        *_by_path(ctx, found.gpus),
        *_witness(ctx, detected),
    )
    usable = [device for device in detected.devices if device.health is not Health.UNHEALTHY]
    if troubles or not usable:
        return troubles or (Finding(severity=Severity.OK, reason="a driver is loaded, and there is no GPU to use"),)
    return (Finding(severity=Severity.OK, reason=f"{len(usable)} GPUs or tiles can be used"),)


def _devices(gpus: Sequence[Gpu], ctx: ProbeContext) -> Iterator[Finding]:
    for gpu in gpus:
        address = gpu.function.address
        if gpu.fault:
            severity = Severity.WARN if gpu.fault.counted else Severity.FAIL
            yield Finding(severity=severity, reason=f"GPU {address}: {gpu.fault.reason}", remedy=gpu.fault.fix)
        elif not gpu.integrated and gpu.parent is None and _window(address, ctx) == SMALL_BAR:
            yield Finding(
                severity=Severity.WARN,
                reason=f"GPU {address}: the processor reaches 256 MiB of its memory at once",
                remedy="switch on Resizable BAR (and Above 4G Decoding) in the firmware",
            )


def _window(address: str, ctx: ProbeContext) -> int | None:
    """Size of the PCI window to a card's memory, which is its third resource."""
    lines = (ctx.read(f"{PCI}/{address}/resource") or "").splitlines()
    try:
        start, end, _ = (int(word, 16) for word in lines[2].split())
    except (IndexError, ValueError):
        return None
    return end - start + 1 if end > start else None


def _environment(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    mask, chosen = ctx.environ.get(MASK), ctx.environ.get(SELECTOR)
    if DEAD_VARIABLE in ctx.environ:
        yield Finding(
            severity=Severity.WARN,
            reason=f"{DEAD_VARIABLE} is set, and nothing has read it since Intel Extension for PyTorch 1.13",
            remedy=f"unset it; {MASK} is the variable that works",
        )
    if mask == "":
        yield Finding(
            severity=Severity.WARN,
            reason=f"{MASK} is empty, which shows every GPU",
            remedy=f"unset it, or hide all with {MASK}={affinity.NOTHING}",
        )
    try:
        shown = visible(ctx.environ, devices)
    except ValueError as error:
        name = MASK if str(error).startswith(MASK) else SELECTOR
        yield Finding(severity=Severity.FAIL, reason=str(error), remedy=f"correct or unset {name}")
        return
    if chosen and any(term.negative for term in selector.parse(chosen).terms):
        yield Finding(
            severity=Severity.WARN,
            reason=f"{SELECTOR} discards devices, and by number that hides the whole backend ({chosen!r})",
            remedy="name the devices that you want instead, for example level_zero:1,2",
        )
    if devices and shown == []:
        yield Finding(
            severity=Severity.WARN,
            reason=f"{MASK}={mask!r} and {SELECTOR}={chosen!r} together leave no GPU visible",
            remedy=f"correct them; {SELECTOR} counts from 0 what {MASK} has left",
        )


def _by_path(ctx: ProbeContext, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if any(not gpu.fault for gpu in gpus) and not ctx.glob(f"{BY_PATH}/pci-*-render"):
        yield Finding(
            severity=Severity.WARN,
            reason=f"{BY_PATH} is missing, and oneCCL cannot start without it",
            remedy=f"give the container the folder: -v {BY_PATH}:{BY_PATH}",
        )


def _witness(ctx: ProbeContext, detected: Detected) -> Iterator[Finding]:
    """Compare with the runtime's own list: neither is believed alone."""
    usable = [device for device in detected.devices if device.health is not Health.UNHEALTHY]
    try:
        shown = visible(ctx.environ, detected.devices)
        answer = runtime.seen(ctx)
    except ValueError as error:
        if str(error).startswith("sycl-ls"):
            yield Finding(
                severity=Severity.WARN, reason=str(error), remedy="report the line, with the version of oneAPI"
            )
        return
    expected = [device for device in usable if shown is None or device.id in shown]
    if answer and len(answer[1]) < len(expected):
        yield Finding(
            severity=Severity.FAIL,
            reason=f"sysfs shows {len(expected)} GPUs or tiles that should work, {answer[0]} shows {len(answer[1])}",
            remedy="install intel-level-zero-gpu or intel-opencl-icd for this generation, and look into the kernel log",
        )
