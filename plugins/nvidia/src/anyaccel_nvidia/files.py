"""What files tell about NVIDIA's GPUs: whether any can be here, and an inventory where NVML cannot be asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from anyaccel.plugin import Detected, Device, Health, PciFunction, ProbeContext

VENDOR_ID = 0x10DE
GPU_CLASSES = (0x0300, 0x0302)
"""VGA and 3D controllers: neither audio functions (0x0403) nor NVSwitch bridges (0x0680)."""

WSL_NODE = "/dev/dxg"
DRIVER = "/proc/driver/nvidia"
_TEGRA = ("/etc/nv_tegra_release", "/sys/class/tegra-firmware")
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BUS_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What the files know about one GPU.

    Attributes:
        function: Its PCI function.
        model: Name, or an empty string.
        uuid: UUID, or None while the driver has not initialized it, or where only root may read it.
        minor: N of ``/dev/nvidiaN``, or None.
        excluded: Whether the driver was told to leave it alone.
        node: ``/dev/nvidiaN``, or None when N is unknown.
    """

    function: PciFunction
    model: str = ""
    uuid: str | None = None
    minor: int | None = None
    excluded: bool = False
    node: str | None = None


def read(ctx: ProbeContext, path: str) -> str:
    """Text of a file that detection can do without; empty when it is absent or may not be read."""
    try:
        return ctx.read(path) or ""
    except OSError:
        return ""


def is_tegra(ctx: ProbeContext) -> bool:
    """Whether this is a Jetson or another Tegra board, whose GPU is on no PCI bus."""
    family = read(ctx, "/sys/devices/soc0/family")
    return family.startswith("Tegra") or any(ctx.exists(path) for path in _TEGRA)


def is_present(ctx: ProbeContext) -> bool:
    """Whether an NVIDIA GPU can be here at all. Decided from files, before any library is loaded.

    WSL and Tegra have neither a PCI function nor the usual device nodes: there NVML decides.
    """
    return (
        ctx.exists(DRIVER)
        or bool(ctx.glob("/dev/nvidia[0-9]*"))
        or ctx.exists("/dev/nvidiactl")
        or ctx.exists(WSL_NODE)
        or bool(functions(ctx))
        or is_tegra(ctx)
    )


def functions(ctx: ProbeContext) -> list[PciFunction]:
    """The PCI functions that are NVIDIA GPUs."""
    return ctx.pci(VENDOR_ID, GPU_CLASSES)


def pci_address(bus_id: str) -> str:
    """NVML's ``00000000:0C:00.0`` as sysfs writes it: ``0000:0c:00.0``.

    Raises:
        ValueError: When it is no PCI bus id.
    """
    match = _BUS_ID.fullmatch(bus_id)
    if match is None:
        raise ValueError(
            f"NVML's PCI bus id must look like 00000000:0C:00.0 (got {bus_id!r}); update the driver, or report this"
        )
    domain, bus, slot, number = match.groups()
    return f"{int(domain, 16):04x}:{bus}:{slot}.{number}".lower()


def driver_version(ctx: ProbeContext) -> str:
    """Version of the loaded kernel module, or an empty string."""
    match = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", read(ctx, f"{DRIVER}/version"))
    return match[1] if match else ""


def cards(ctx: ProbeContext) -> list[Card]:
    """The GPUs on the PCI bus, with what the driver's files say about each, in the order of their addresses."""
    return [_card(ctx, function) for function in functions(ctx)]


def _card(ctx: ProbeContext, function: PciFunction) -> Card:
    path = f"{DRIVER}/gpus/{function.address}/information"
    lines = read(ctx, path).splitlines()  # some hosts let only root read it (ray-project/ray#28064)
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    minor = values.get("Device Minor", "")
    if minor and not minor.isdecimal():
        raise ValueError(f"{path}: 'Device Minor' must be a number (got {minor!r}); reload the driver, or report this")
    uuid = values.get("GPU UUID", "")
    if uuid and "?" not in uuid and not _UUID.fullmatch(uuid):  # question marks: not initialized yet
        raise ValueError(f"{path}: 'GPU UUID' must look like GPU-8-4-4-4-12 hexadecimal digits (got {uuid!r})")
    return Card(
        function=function,
        model=values.get("Model", ""),
        uuid=uuid if uuid and "?" not in uuid else None,
        minor=int(minor) if minor else None,
        excluded=values.get("GPU Excluded", "").lower() == "yes",
        node=f"/dev/nvidia{minor}" if minor else None,
    )


def card_id(card: Card) -> str:
    """Identity: the UUID, else the PCI address."""
    return card.uuid or f"nvidia-{card.function.address}"


def foreign(card: Card) -> bool:
    """Whether another driver than NVIDIA's has the GPU, so that CUDA cannot use it."""
    return card.function.driver != "nvidia"


def given(ctx: ProbeContext, card: Card) -> bool:
    """Whether the GPU was given to this container: PCI and procfs show all of the host's, device nodes do not lie."""
    return ctx.exists(card.node) if card.node else bool(ctx.glob("/dev/nvidia[0-9]*"))


def unusable(card: Card, index: int, reason: str) -> Device:
    """A GPU that is there and cannot be used."""
    return Device(
        id=card_id(card),
        index=index,
        model=card.model or f"NVIDIA Device {card.function.device:04x}",
        pci_bus_id=card.function.address,
        numa_node=card.function.numa_node,
        nodes=(card.node,) if card.node else (),
        health=Health.UNHEALTHY,
        health_reason=reason,
        attributes={"driver": card.function.driver or "none", "pci_device": f"{card.function.device:04x}"},
    )


def foreign_reason(card: Card) -> str:
    """Say why a GPU that another driver has cannot be used."""
    driver = card.function.driver
    if driver is None:
        return "no kernel driver is bound to it: install and load NVIDIA's driver ('modprobe nvidia')"
    if driver == "vfio-pci":
        return "it is set aside for virtual machines (vfio-pci): bind it to the driver 'nvidia' to use it here"
    return f"the driver {driver!r} has it, which CUDA cannot use: install NVIDIA's driver and bind the GPU to it"


def inventory(ctx: ProbeContext, why: str, way_out: str) -> Detected:
    """List the GPUs from files alone: names, identities and nodes, but neither memory nor health.

    Args:
        ctx: The machine.
        why: Why NVML was not asked.
        way_out: How it can be asked.
    """
    found = [card for card in cards(ctx) if not card.excluded]
    mine = [card for card in found if not foreign(card) and given(ctx, card)]
    devices = [_device(ctx, card, index) for index, card in enumerate(mine)]
    others = [card for card in found if foreign(card)]
    devices += [unusable(card, len(mine) + n, foreign_reason(card)) for n, card in enumerate(others)]
    return Detected(
        devices=tuple(devices),
        driver_version=driver_version(ctx),
        partial=bool(mine),
        notes=tuple(_notes(ctx, found, mine, why, way_out)),
    )


def _device(ctx: ProbeContext, card: Card, index: int) -> Device:
    node = ctx.node(card.node) if card.node else None
    health, reason = Health.UNKNOWN, ""
    if node is not None and not (node.readable and node.writable):
        health, reason = Health.UNHEALTHY, f"this user may not open {card.node}: give read and write access to it"
    elif card.minor is not None and ctx.glob(f"{DRIVER}/capabilities/gpu{card.minor}/mig/gi[0-9]*"):
        health = Health.UNHEALTHY
        reason = "MIG is on, and only NVML can name its MIG devices: install the driver's libnvidia-ml.so.1"
    return Device(
        id=card_id(card),
        index=index,
        model=card.model or f"NVIDIA Device {card.function.device:04x}",
        pci_bus_id=card.function.address,
        numa_node=card.function.numa_node,
        nodes=(card.node,) if card.node else (),
        health=health,
        health_reason=reason,
        attributes={"nvml_index": index, "pci_device": f"{card.function.device:04x}"},
    )


def _notes(ctx: ProbeContext, found: list[Card], mine: list[Card], why: str, way_out: str) -> Iterator[str]:
    hidden = [card for card in found if not foreign(card) and card not in mine]
    if mine:
        yield f"NVML could not be asked ({why}), so memory, health, links and MIG are unknown: {way_out}."
    if hidden:
        yield (
            f"NVIDIA GPUs ({len(hidden)}) are on the PCI bus without a device node here: ask for them when starting the"
            " container, or let 'nvidia-modprobe -u -c=0' make the nodes."
        )
    if not found and is_tegra(ctx):
        yield f"This is a Tegra board and NVML could not be asked ({why}), so its GPU is not listed: update JetPack."
