"""A correct plug-in for an imaginary accelerator: devices are files below /dev/acme."""

import json
from collections.abc import Mapping, Sequence

from anyaccel.plugin import (
    Detected,
    Device,
    DeviceProcess,
    EnvContext,
    EnvEdits,
    Fractional,
    Health,
    PluginInfo,
    ProbeContext,
    Product,
    Stats,
    Term,
    hookimpl,
)

GIB = 1 << 30


@hookimpl
def anyaccel_info() -> PluginInfo:
    return PluginInfo(vendor="acme", resource="APU", kind="apu", env_vars=("ACME_VISIBLE", "ACME_ORDER"))


@hookimpl
def anyaccel_detect(ctx: ProbeContext) -> Detected | None:
    if not ctx.exists("/sys/class/acme"):
        return None
    return Detected(
        devices=tuple(
            Device(
                id=f"acme-{facts['serial']}",
                index=index,
                model=facts["model"],
                memory_bytes=facts["memory"],
                nodes=(f"/dev/acme{index}",),
                health=Health(facts.get("health", "unknown")),
                health_reason=facts.get("reason", ""),
                health_remedy=facts.get("remedy", ""),
            )
            for index, path in enumerate(ctx.glob("/sys/class/acme/*/facts"))
            if (facts := json.loads(ctx.read(path) or "{}"))
        ),
        driver_version=(ctx.read("/sys/class/acme/version") or "").strip(),
    )


@hookimpl
def anyaccel_fractional(device: Device) -> Fractional:
    return Fractional.NO if device.model == "Acme Whole" else Fractional.SHARED


@hookimpl
def anyaccel_tags(device: Device) -> Sequence[str]:
    return (device.model.replace(" ", "-"), *(("A1",) if device.model == "Acme One" else ()), "ACME")


@hookimpl
def anyaccel_env(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    names = [str(device.index) if ctx.mask == "index" else device.id for device in devices]
    return EnvEdits(set={"ACME_VISIBLE": ",".join(names)}, unset=frozenset({"ACME_ORDER"}))


@hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[Device]) -> Sequence[str] | None:
    mask = environ.get("ACME_VISIBLE")
    if mask is None:
        return None
    if mask == "nonsense":
        raise ValueError("ACME_VISIBLE must be a comma list of ids or indexes (got 'nonsense')")
    by_name = {name: device.id for device in devices for name in (device.id, str(device.index))}
    return list(dict.fromkeys(by_name[name] for name in mask.split(",") if name in by_name))


@hookimpl
def anyaccel_validate(request: Term, devices: Sequence[Device]) -> str | None:
    if len(devices) == 3:
        return "an Acme bus connects 1, 2 or 4 devices, never 3"
    return None


@hookimpl
def anyaccel_stats(devices: Sequence[Device], ctx: ProbeContext) -> Mapping[str, Stats]:
    return {
        device.id: Stats(memory_used_bytes=GIB, utilization=0.5, processes=(DeviceProcess(pid=7, memory_bytes=GIB),))
        for device in devices
    }


@hookimpl
def anyaccel_products() -> Sequence[Product]:
    return [
        Product(
            name="Acme-One",
            model="Acme One",
            memory_bytes=16 * GIB,
            counts=(1, 8),
            aliases=("A1",),
            id_template="acme-{uuid}",
            link=5,
        ),
        Product(name="Acme-Whole", model="Acme Whole", memory_bytes=32 * GIB, counts=(4,), id_template="acme-{index}"),
    ]
