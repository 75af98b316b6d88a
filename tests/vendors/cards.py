"""A plug-in whose devices have device nodes of this machine: A is /dev/zero, B is /dev/full."""

from collections.abc import Sequence

from anyaccel.plugin import (
    Device,
    EnvContext,
    EnvEdits,
    Fractional,
    PluginInfo,
    ProbeContext,
    Product,
    hookimpl,
)


@hookimpl
def anyaccel_info() -> PluginInfo:
    return PluginInfo(vendor="cards", resource="CARD", kind="card", env_vars=("CARDS_VISIBLE",))


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> None:
    return None


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:
    return Fractional.SHARED


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    return (device.model,)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    return EnvEdits(set={"CARDS_VISIBLE": ",".join(device.id for device in devices)})


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    return [
        Product(name=name, model=name, id_template=f"{name}-{{index}}", node_templates=(node,))
        for name, node in (("A", "/dev/zero"), ("B", "/dev/full"))
    ]
