"""A vendor of two cards with PCI addresses and memory regions of the kernel, unless ``NO_REGION`` names a card."""

from anyaccel.plugin import Detected, Device, EnvEdits, Fractional, PluginInfo, hookimpl


@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="pci", resource="APU", kind="apu", env_vars=("APU",))


@hookimpl
def anyaccel_detect(ctx):
    return Detected(
        devices=(
            Device(id="a", index=0, model="A", memory_bytes=16 << 30, pci_bus_id="0000:03:00.0"),
            Device(id="b", index=1, model="A", memory_bytes=16 << 30, pci_bus_id="0000:83:00.0"),
        )
    )


@hookimpl
def anyaccel_fractional(device):
    return Fractional.SHARED


@hookimpl
def anyaccel_tags(device):
    return ("A",)


@hookimpl
def anyaccel_env(devices, ctx):
    regions = {d.id: f"acme/{d.pci_bus_id}/vram" for d in devices if ctx.environ.get("NO_REGION") != d.id}
    return EnvEdits(set={"APU": ",".join(d.id for d in devices)}, memory_regions=regions)
