"""AWS Inferentia and Trainium for anyaccel: the NeuronCores of a machine, one logical core a device."""

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

from anyaccel_neuron import environment, products


@hookimpl
def anyaccel_info() -> PluginInfo:
    """Say who we are: Ray's resource name, one unit a NeuronCore."""
    return PluginInfo(
        vendor="neuron",
        resource="neuron_cores",
        kind="neuron",
        env_vars=environment.ENV_VARS,
        url="https://awsdocs-neuron.readthedocs-hosted.com",
    )


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find the logical cores, each with the chip it is a part of as its parent."""
    from anyaccel_neuron.detection import detect

    return detect(ctx)


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:  # noqa: ARG001 - the same for every core
    """A core belongs to one process: no time slicing, no partition, and programs are compiled for whole cores."""
    return Fractional.NO


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    """Name a core's accelerator types, Ray's first."""
    return products.tags(device)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:  # noqa: ARG001 - cores go by index only
    """Make a worker see exactly these cores."""
    return environment.env(devices)


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    """Say which cores an environment leaves visible."""
    return environment.visible(environ, devices)


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """Say why the runtime cannot serve a term with exactly these cores."""
    return environment.validate(request, devices)


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    """Observe memory, use, processes and health of the cores."""
    from anyaccel_neuron.health import stats

    return stats(devices, ctx)


@hookimpl
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:
    """List the device nodes of the chips that hold the cores."""
    return environment.container(devices)


@hookimpl
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:
    """Look for a driver that is missing, tools that fail, and variables that contradict each other."""
    from anyaccel_neuron.diagnosis import diagnose

    return diagnose(ctx)


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    """List the chips, in each configuration of logical cores."""
    return products.products()
