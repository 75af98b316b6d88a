"""Intel GPUs for anyaccel: Data Center GPU Max and Flex, Arc, Arc Pro, and GPUs that are part of a processor."""

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

from anyaccel_intel import environment, products

__all__ = [
    "anyaccel_container",
    "anyaccel_detect",
    "anyaccel_diagnose",
    "anyaccel_env",
    "anyaccel_fractional",
    "anyaccel_info",
    "anyaccel_products",
    "anyaccel_stats",
    "anyaccel_tags",
    "anyaccel_validate",
    "anyaccel_visible",
]


@hookimpl
def anyaccel_info() -> PluginInfo:
    """Say who we are."""
    return PluginInfo(
        vendor="intel",
        resource="GPU",
        kind="gpu",
        env_vars=environment.VARIABLES,
        url="https://pypi.org/project/anyaccel-intel/",
    )


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find GPUs in sysfs."""
    from anyaccel_intel import detection

    return detection.detect(ctx)


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:  # noqa: ARG001 - the same for all
    """Several processes may use one GPU, and nothing limits the memory that each takes."""
    return Fractional.SHARED


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    """Name a device by its product."""
    return products.tags(device)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Mask the Level Zero driver."""
    return environment.edits(devices, ctx)


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    """Read masks and selectors as the driver and the SYCL runtime do."""
    return environment.visible(environ, devices)


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """Refuse sets that PyTorch would not show as they are."""
    return environment.refusal(request, devices)


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    """Observe GPUs through sysfs and the kernel's accounting."""
    from anyaccel_intel import observation

    return observation.stats(devices, ctx)


@hookimpl
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:
    """Say what a container needs."""
    return environment.container(devices)


@hookimpl
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:
    """Look for trouble."""
    from anyaccel_intel import diagnosis

    return diagnosis.diagnose(ctx)


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    """List what we know."""
    return products.products()
