"""NVIDIA GPUs and MIG devices for anyaccel."""

from __future__ import annotations

import warnings
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

from . import environment


@hookimpl
def anyaccel_info() -> PluginInfo:
    """Say who this plug-in is for."""
    return PluginInfo(
        vendor="nvidia",
        resource="GPU",
        kind="gpu",
        env_vars=environment.VARIABLES,
        url="https://pypi.org/project/anyaccel-nvidia/",
    )


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find GPUs and MIG devices."""
    from . import detection

    return detection.detect(ctx)


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:
    """Shared by agreement or under MPS, but not in an exclusive compute mode."""
    return environment.fractional(device)


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    """Ray's type, the exact model and, where Ray has a name for it, the memory class."""
    from .tags import tags

    return tags(device)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Mask the devices by ``CUDA_VISIBLE_DEVICES``; keep a share to its part."""
    return environment.edits(devices, ctx)


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    """Read ``CUDA_VISIBLE_DEVICES`` as CUDA does, with a warning about what CUDA takes without a word."""
    from .visibility import complaint, visible

    ids = visible(environ, devices)
    wrong = complaint(environ, devices)
    if wrong:
        warnings.warn(" ".join((wrong[0], f"To mend it, {wrong[1]}.")), stacklevel=1)
    return ids


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """One MIG device per worker; no shares of a GPU that admits one process."""
    return environment.validate(request, devices)


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    """Ask NVML for memory, utilization, temperature, power, processes and health."""
    from . import observation

    return observation.stats(devices, ctx)


@hookimpl
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:
    """Name device nodes, and the variables of NVIDIA's container runtime."""
    from . import observation

    return observation.container(devices)


@hookimpl
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:
    """Look at driver, devices, modes, masks, the binding and the kernel log."""
    from . import diagnosis

    return diagnosis.diagnose(ctx)


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    """List the data center, workstation and consumer GPUs that people ask for by name."""
    from .products import PRODUCTS

    return PRODUCTS
