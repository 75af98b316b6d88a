"""A vendor with eight slots per card, named in the mask: ``slice-0:0-1-2-3,slice-1``."""

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
    Product,
    VisiblePart,
    hookimpl,
)


@hookimpl
def anyaccel_info() -> PluginInfo:
    return PluginInfo(vendor="slices", resource="SLICE", kind="slice", env_vars=("SLICES",))


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected:
    return Detected(
        devices=tuple(
            Device(
                id=f"slice-{index}", index=index, model="Sliced", slots=8, memory_bytes=80 << 30, health=Health.HEALTHY
            )
            for index in range(int(ctx.environ.get("CARDS", "1")))
        )
    )


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:
    return Fractional.PARTITIONED


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    return (device.model,)


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    def name(device: Device) -> str:
        share = ctx.shares.get(device.id)
        return ":".join([device.id, *(["-".join(map(str, share.slots))] if share and share.slots else [])])

    return EnvEdits(set={"SLICES": ",".join(map(name, devices))}, memory_by="slots", compute_by="slots")


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str | VisiblePart] | None:
    mask = environ.get("SLICES")
    if mask is None:
        return None
    known = {device.id: [str(slot) for slot in range(device.slots)] for device in devices}
    found: dict[str, str | VisiblePart] = {}
    for item in mask.split(","):
        name, _, slots = item.partition(":")
        if name not in known:
            continue
        if slots and not set(slots.split("-")) <= set(known[name]):
            raise ValueError(f"SLICES must name slots from 0 (got {item!r:.40})")
        numbers = tuple(dict.fromkeys(map(int, slots.split("-")))) if slots else ()
        found.setdefault(name, VisiblePart(id=name, slots=numbers) if numbers else name)
    return list(found.values())


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    return [
        Product(name="Sliced", model="Sliced", slots=8, counts=(1, 2), parts={"Slab": 3}, id_template="slice-{uuid}"),
        Product(name="Slab", model="Slab", slots=2, id_template="slab-{uuid}"),
    ]
