"""Huawei Ascend NPUs for anyaccel. See the README for what is detected, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.plugin import (
    ContainerEdits,
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    Finding,
    Fractional,
    PluginInfo,
    ProbeContext,
    Product,
    Stats,
    Term,
    hookimpl,
)

from anyaccel_ascend import containers, detection, environment, health, products


@hookimpl
def anyaccel_info() -> PluginInfo:
    """Say who we are."""
    return PluginInfo(
        vendor="ascend",
        resource="NPU",
        kind="npu",
        env_vars=environment.VARIABLES,
        url="https://pypi.org/project/anyaccel-ascend/",
    )


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find NPUs: device nodes and PCI first, then npu-smi."""
    return detection.detect(ctx)


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:
    """Whole NPUs are shared by agreement; a split one is shared through its vNPUs; those are given out whole."""
    if device.attributes.get("split"):
        return Fractional.PARTITIONED
    return Fractional.NO if "template" in device.attributes else Fractional.SHARED


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    """Name the SoC first, as Ray does, then its family."""
    return products.tags(device)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Set the mask of logic ids, in ascending order."""
    return environment.edits(devices, ctx.devices)


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    """Read the mask as the runtime does."""
    return environment.visible(environ, devices)


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """Refuse what the runtime cannot address, and mixtures of whole NPUs and vNPUs."""
    partitions = [device.id for device in devices if environment.vnpu_id(device) is not None]
    for device in devices:
        if device.attributes.get("split"):
            return f"{device.id} is split into vNPUs; ask for one of those by its tag, such as 'vnpu'."
        if environment.vnpu_id(device) is None and not environment.addressable(device):
            return f"{device.id} has no number in the runtime: {device.health_reason}."
        if request.fraction and "template" in device.attributes:
            return f"{device.id} is a vNPU, which is given out whole; ask for 1, or for a smaller template."
    if partitions and len(partitions) < len(devices):
        return (
            f"a worker gets either whole NPUs or vNPUs, not both (got the vNPUs {', '.join(partitions)} among others)."
        )
    return None


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    """Observe the NPUs with one call of npu-smi."""
    return health.stats(devices, ctx)


@hookimpl
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:
    """Name nodes, mounts, and the physical ids for Ascend Docker Runtime."""
    return containers.edits(devices)


@hookimpl
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:
    """Look for a missing driver, a failing tool, closed nodes, faults and masks that hide everything."""
    return health.diagnose(ctx)


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    """List the known products."""
    return products.PRODUCTS
