"""AMD GPUs for anyaccel: Instinct and Radeon, whole or in compute partitions."""

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

from anyaccel_amd import environment, products


@hookimpl
def anyaccel_info() -> PluginInfo:
    """Say who we are."""
    return PluginInfo(
        vendor="amd",
        resource="GPU",
        kind="gpu",
        env_vars=environment.VARIABLES,
        url="https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html",
    )


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find the GPUs in the kernel's KFD topology and on PCI."""
    from anyaccel_amd import detection

    return detection.detect(ctx)


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:  # noqa: ARG001 - the same for every device
    """Any GPU may be shared, and nothing keeps the holders apart but themselves. Partitions are devices."""
    return Fractional.SHARED


@hookimpl
def anyaccel_tags(device: Device) -> tuple[str, ...]:
    """Name the product, its gfx name and the profile of a partition."""
    return products.tags(device)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Write the mask for HIP and OpenCL, and take away the one below that would count twice."""
    return environment.edits(devices, ctx)


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Say which devices a HIP program sees."""
    return environment.visible(environ, devices)


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """Refuse devices without a number, and integrated GPUs beside a card unless they are asked for by name."""
    for device in devices:
        if not device.attributes.get("numbered", True):
            return f"{device.id} has no number in ROCm's runtime: only a GPU that KFD lists can be given out."
        named = {name.lower() for name in request.names} & {tag.lower() for tag in products.tags(device)}
        if device.attributes.get("secondary") and not named:
            return (
                f"{device.id} is the GPU inside the CPU, and is given out beside a card only by its name:"
                f" ask for {products.tags(device)[0]}."
            )
    return None


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    """Observe the devices through sysfs."""
    from anyaccel_amd import stats

    return stats.stats(devices, ctx)


@hookimpl
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:
    """Give the device nodes. KFD shows a container only GPUs whose node it may open, so that it needs no mask."""
    return ContainerEdits(nodes=tuple(dict.fromkeys(node for device in devices for node in device.nodes)))


@hookimpl
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:
    """Look at devices, variables and the amdsmi library."""
    from anyaccel_amd import diagnosis

    return diagnosis.diagnose(ctx)


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    """List Instinct and Radeon products."""
    return products.products()
