"""A vendor whose cards are listed beside their halves; a variable makes a user see the cards, or the halves, alone."""

from collections.abc import Mapping, Sequence

from anyaccel.plugin import (
    Detected,
    Device,
    EnvContext,
    EnvEdits,
    Fractional,
    Health,
    PluginInfo,
    ProbeContext,
    hookimpl,
)


@hookimpl
def anyaccel_info() -> PluginInfo:
    return PluginInfo(vendor="divided", resource="CARD", kind="card", env_vars=("CARDS_VISIBLE",))


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected:
    view = ctx.environ.get("VIEW", "whole half")
    found = []
    for card in range(int(ctx.environ.get("CARDS", "1"))):
        found += [(f"card-{card}", "Whole", None)] if "whole" in view else []
        found += [(f"card-{card}-{half}", "Half", f"card-{card}") for half in "ab"] if "half" in view else []
    return Detected(
        devices=tuple(
            Device(id=name, index=index, model=model, parent=parent, memory_bytes=8 << 30, health=Health.HEALTHY)
            for index, (name, model, parent) in enumerate(found)
        )
    )


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
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    mask = environ.get("CARDS_VISIBLE")
    return None if mask is None else [device.id for device in devices if device.id in mask.split(",")]
