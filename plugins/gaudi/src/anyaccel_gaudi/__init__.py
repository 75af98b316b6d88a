"""Intel Gaudi accelerators for anyaccel: the hooks, each a thin call into the module that knows."""

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

from anyaccel_gaudi import detection, environment, health, modules, products


@hookimpl
def anyaccel_info() -> PluginInfo:
    """Say who we are."""
    return PluginInfo(
        vendor="gaudi",
        resource="HPU",
        kind="hpu",
        env_vars=(environment.VISIBLE_MODULES, environment.MODULE_ID),
        url="https://docs.habana.ai/en/latest/PyTorch/PyTorch_Scaling_Guide/Gaudi_Assignment.html",
    )


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find the devices in sysfs, and ask hl-smi what sysfs does not say."""
    return detection.detect(ctx)


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:  # noqa: ARG001 - the answer is the same for every device
    """Say that devices are given whole: the driver admits one process, and there are no partitions."""
    return Fractional.NO


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    """Name the accelerator types, Ray's first."""
    return products.tags(device)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:  # noqa: ARG001 - module ids are absolute
    """Mask by module id."""
    return environment.mask(devices)


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    """Read a mask of module ids."""
    return environment.visible(environ, devices)


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """Accept the numbers of devices that the vendor supports for one job."""
    return modules.refuse(request, devices)


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    """Observe the devices now."""
    return health.stats(devices, ctx)


@hookimpl
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:
    """Say what a container needs."""
    return environment.container(devices)


@hookimpl
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:
    """Look for what is wrong here."""
    return health.diagnose(ctx)


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    """List the three generations."""
    return products.PRODUCTS
