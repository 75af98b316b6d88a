"""Tenstorrent accelerators for anyaccel: what tt-kmd shows of them, and how tt-umd numbers and masks them."""

from collections.abc import Mapping, Sequence

import anyaccel.plugin as ap

MASK = "TT_VISIBLE_DEVICES"
CHIPS = {0xFACA: "Grayskull", 0x401E: "Wormhole", 0xB140: "Blackhole"}
WORMHOLE = {"n150": 12, "n300": 24, "galaxy-wormhole": 12}  # GiB of memory by card, as the driver calls it
BLACKHOLE = {"p100": 28, "p150": 32, "p300": 32, "galaxy-blackhole": 32}  # without the letter, as in p150a


@ap.hookimpl
def anyaccel_info() -> ap.PluginInfo:
    return ap.PluginInfo(vendor="tenstorrent", resource="TTNPU", kind="npu", env_vars=(MASK,))


@ap.hookimpl
def anyaccel_detect(ctx: ap.ProbeContext) -> ap.Detected | None:
    version = ctx.read("/sys/module/tenstorrent/version")
    functions = [function for function in ctx.pci(vendor=0x1E52) if function.device in CHIPS]
    if version is None and not functions:
        return None  # neither the driver nor a card: this vendor is not on the machine
    devices = tuple(_device(ctx, index, function) for index, function in enumerate(functions))
    return ap.Detected(devices=devices, driver_version=(version or "").strip())


def _device(ctx: ap.ProbeContext, index: int, function: ap.PciFunction) -> ap.Device:
    path = next(iter(ctx.glob(f"/sys/bus/pci/devices/{function.address}/tenstorrent/tenstorrent!*")), "")
    node = ctx.node(f"/dev/tenstorrent/{path.rpartition('!')[2]}")
    try:
        card, reason = (ctx.read(f"{path}/tt_card_type") or "").strip(), ""
    except OSError as error:  # the processor that manages the chip does not answer
        card, reason = "", f"its card type cannot be read ({error.strerror}); reset it with 'tt-smi -r'"
    if not path:
        reason = "no driver is bound to it; install tt-kmd and run 'modprobe tenstorrent'"
    elif node is None:
        reason = "its node below /dev/tenstorrent is missing; pass it to the container with --device"
    elif not (node.readable and node.writable):
        reason = f"this user may not open {node.path}; ask for read and write access to it"
    gib = {**WORMHOLE, **BLACKHOLE}.get(card.rstrip("abc"))
    return ap.Device(
        id=f"tenstorrent-{function.address}",
        index=index,
        model=f"Tenstorrent {CHIPS[function.device]} {card.replace('unknown', '')}".strip(),
        memory_bytes=gib << 30 if gib else None,
        pci_bus_id=function.address,
        numa_node=function.numa_node,
        nodes=(node.path,) if node else (),
        health=ap.Health.UNHEALTHY if reason else ap.Health.UNKNOWN,
        health_reason=reason,
    )


@ap.hookimpl
def anyaccel_fractional() -> ap.Fractional:
    return ap.Fractional.NO  # the runtime gives a chip to one process


@ap.hookimpl
def anyaccel_tags(device: ap.Device) -> Sequence[str]:
    card, *others = device.model.split()[::-1]  # such as p150a, Blackhole, Tenstorrent
    return list(dict.fromkeys((card, card.rstrip("abc"), *others)))


@ap.hookimpl
def anyaccel_env(devices: Sequence[ap.Device]) -> ap.EnvEdits:
    return ap.EnvEdits(set={MASK: ",".join(str(device.pci_bus_id) for device in devices)})


@ap.hookimpl
def anyaccel_visible(environ: Mapping[str, str], devices: Sequence[ap.Device]) -> Sequence[str] | None:
    if MASK not in environ:
        return None
    meant: set[str] = set()
    for word in (part.strip() for part in environ[MASK].split(",") if environ[MASK]):
        named = {device.id for device in devices if ":" in word and word in device.id}  # also a part of an address
        named |= {device.id for place, device in enumerate(d for d in devices if d.nodes) if word == str(place)}
        if not named:
            raise ValueError(
                f"{MASK} must list PCI addresses or indexes of devices (got {word!r}); correct or unset it"
            )
        meant |= named
    return [device.id for device in devices if device.id in meant]  # the runtime keeps its own order


@ap.hookimpl
def anyaccel_products() -> Sequence[ap.Product]:
    return [
        ap.Product(
            name=card,
            model=f"Tenstorrent {chip} {card}",
            memory_bytes=gib << 30,
            counts=(32,) if "galaxy" in card else (1, 2, 4, 8),
            id_template="tenstorrent-{pci}",
            node_templates=("/dev/tenstorrent/{index}",),
        )
        for chip, cards in (("Wormhole", WORMHOLE), ("Blackhole", BLACKHOLE))
        for card, gib in cards.items()
    ]
