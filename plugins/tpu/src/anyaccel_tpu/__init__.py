"""Google TPU chips, v2 to tpu7x, as a plug-in of anyaccel.

Nothing of Google's is loaded: not libtpu, JAX, torch_xla or tpu-info. Chips come from PCI and device nodes, what a
host knows about its slice from GKE's variables and, on Google's machines, from the metadata server.
"""

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

from anyaccel_tpu import environment
from anyaccel_tpu.products import GENERATIONS, by_key, products
from anyaccel_tpu.slices import SliceShape, pod_type, ray_labels, ray_resources, slice_shape

__all__ = [
    "GENERATIONS",
    "SliceShape",
    "pod_type",
    "ray_labels",
    "ray_resources",
    "slice_shape",
]


@hookimpl
def anyaccel_info() -> PluginInfo:
    """Resource ``TPU``, counted in chips: never in TensorCores, chiplets or devices of JAX."""
    return PluginInfo(
        vendor="tpu",
        resource="TPU",
        kind="tpu",
        env_vars=environment.ENV_VARS,
        url="https://pypi.org/project/anyaccel-tpu/",
    )


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    """Find the chips of this host."""
    from anyaccel_tpu import detection

    return detection.detect(ctx)


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:  # noqa: ARG001 - the hook's signature
    """A chip is opened by one process at a time; there are no partitions."""
    return Fractional.NO


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    """Ray's tag, other names of the generation, and the type of the slice such as ``v4-16``."""
    generation = by_key(device.attributes.get("generation"))
    if generation is None:
        return ()
    slice_types = (device.attributes.get("pod_type"), device.attributes.get("accelerator_type"))
    names = (generation.tag, *generation.aliases, *(str(name) for name in slice_types if name))
    return tuple(dict.fromkeys(names))


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Mask, bounds and ports for a part of the host; no restriction for all of it."""
    return environment.edits(devices, ctx)


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    """Read the mask under its newer and its older name."""
    return environment.visible(environ, devices)


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    """Whole chips, in the numbers and rectangles that the runtime accepts."""
    if request.fraction:
        return "a TPU chip belongs to one process at a time: ask for whole chips, 1, 2, 4 or 8"
    return environment.refusal(devices)


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    """Who holds each chip; everything else is known to the workload alone."""
    from anyaccel_tpu import health

    return health.stats(devices, ctx)


@hookimpl
def anyaccel_container(devices: Sequence[Device]) -> ContainerEdits:
    """One entry per node, since a directory passes nothing, and the node that opens all vfio groups."""
    nodes = list(dict.fromkeys(path for device in devices for path in device.nodes))
    if any(path.startswith("/dev/vfio/") for path in nodes):
        nodes.append("/dev/vfio/vfio")
    return ContainerEdits(nodes=tuple(nodes))


@hookimpl
def anyaccel_diagnose(ctx: ProbeContext) -> Sequence[Finding]:
    """Chips without driver or node, variables that contradict each other, a lock file left behind, maintenance."""
    from anyaccel_tpu import health

    return health.diagnose(ctx)


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    """The generations v2 to tpu7x."""
    return products()
