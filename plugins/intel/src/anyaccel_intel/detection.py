"""Finding Intel GPUs in sysfs: no library, no privileges, and also where the runtime is broken.

File by file this follows the parsers of intel/intel-resource-drivers-for-kubernetes (``pkg/gpu/discovery``) and
intel/intel-device-plugins-for-kubernetes (``cmd/gpu_plugin``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from anyaccel.plugin import Detected, Device, Health, PciFunction, ProbeContext

from anyaccel_intel import layout, topology
from anyaccel_intel.affinity import MASK
from anyaccel_intel.capacity import memory_of, number, tiles_of
from anyaccel_intel.drivers import DRIVERS, PCI, Fault, fault_of, wedged
from anyaccel_intel.products import BY_ID
from anyaccel_intel.runtime import completed

INTEL = 0x8086
DISPLAY = (0x0300, 0x0301, 0x0302, 0x0380)  # VGA: Arc and integrated; display: Flex and Max; 3D
RIVALS = (0x10DE, 0x1002)  # makers of discrete GPUs beside which an integrated one is no compute device
PASSED_ON = ("vfio-pci", "xe-vfio-pci")
INTEGRATED = "ANYACCEL_INTEL_INTEGRATED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One PCI function, as far as files tell.

    Attributes:
        function: The PCI function.
        integrated: Whether it is part of the processor.
        memory_bytes: Its own memory, or None.
        tiles: Number of tiles.
        parent: PCI address of the physical function, when this is a virtual one.
        nodes: Device nodes that should exist.
        fault: Why it cannot be used, or None.
    """

    function: PciFunction
    integrated: bool
    memory_bytes: int | None = None
    tiles: int = 1
    parent: str | None = None
    nodes: tuple[str, ...] = ()
    fault: Fault | None = None


@dataclass(slots=True, kw_only=True)
class Survey:
    """What the files of one machine say.

    Attributes:
        gpus: GPUs that are ours to report.
        unlisted: Addresses of integrated GPUs that stay out beside a discrete card.
        notes: What people should know about GPUs that are not reported.
        partial: Whether something could not be read.
        driver_version: Version of the driver module, where it is built outside the kernel.
    """

    gpus: list[Gpu] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    partial: bool = False
    driver_version: str = ""


def detect(ctx: ProbeContext) -> Detected | None:
    """Report the GPUs of a machine; None where there is neither a GPU nor a driver of Intel's."""
    found = survey(ctx)
    if found is None:
        return None
    devices = _numbered(ctx, [device for gpu in found.gpus for device in _devices(gpu, found, ctx)], found)
    devices, runtime_notes = completed(devices, ctx)
    links, link_notes = topology.links(devices, {gpu.function.address: gpu.function.bridges for gpu in found.gpus}, ctx)
    return Detected(
        devices=tuple(replace(device, links=links.get(device.id, {})) for device in devices),
        driver_version=found.driver_version,
        partial=found.partial,
        notes=(*found.notes, *runtime_notes, *link_notes),
    )


def survey(ctx: ProbeContext) -> Survey | None:
    """Look at every display function of Intel's."""
    functions = ctx.pci(INTEL, DISPLAY)
    loaded = [name for name in DRIVERS if ctx.is_dir(f"/sys/module/{name}")]
    if not functions and not loaded:
        return None
    found = Survey(driver_version=_module_version(ctx, loaded))
    dead = wedged(ctx, [function.address for function in functions if function.driver in DRIVERS])
    for function in functions:
        _sort(function, found, ctx, dead)
    _set_integrated_aside(found, ctx)
    return found


def _sort(function: PciFunction, found: Survey, ctx: ProbeContext, dead: frozenset[str]) -> None:
    """Put one function where it belongs: among the GPUs, among the notes, or nowhere."""
    path = f"{PCI}/{function.address}"
    physical = (ctx.readlink(f"{path}/physfn") or "").rpartition("/")[2].lower() or None
    if function.driver in PASSED_ON:
        found.notes.append(f"GPU {function.address} is handed to a virtual machine ({function.driver}), not to us")
        return
    if physical and (_integrated(function, ctx) or function.driver is None):
        return  # pieces of an integrated GPU are no further GPUs, unbound pieces are for virtual machines
    try:
        gpu = _gpu(function, physical, ctx)
    except (OSError, ValueError) as error:
        found.partial = True
        # The runtime reads other files, and counts it; its number must not go to a neighbor.
        counted = function.driver in DRIVERS
        fault = Fault(f"its files cannot be read: {error}", "check the permissions and the kernel log", counted)
        gpu = Gpu(function=function, integrated=_integrated(function, ctx), parent=physical, fault=fault)
    if function.address in dead and not gpu.fault:
        cure = f"unbind and bind it again below /sys/bus/pci/drivers/{function.driver}, or reboot"
        gpu = replace(gpu, fault=Fault("the kernel has declared it wedged", cure))
    found.gpus.append(gpu)


def _gpu(function: PciFunction, physical: str | None, ctx: ProbeContext) -> Gpu:
    path = f"{PCI}/{function.address}"
    integrated = _integrated(function, ctx)
    nodes = tuple(
        f"/dev/dri/{name}"
        for name in (each.rpartition("/")[2] for each in ctx.glob(f"{path}/drm/*"))
        if re.fullmatch(r"(card|renderD)[0-9]+", name)
    )
    split = None if integrated or physical else number(ctx, f"{path}/sriov_numvfs")
    return Gpu(
        function=function,
        integrated=integrated,
        memory_bytes=None if integrated else memory_of(function, physical, ctx),
        tiles=tiles_of(function, integrated, ctx),
        parent=physical,
        nodes=tuple(sorted(nodes, reverse=True)),
        fault=fault_of(function, nodes, split or 0, ctx),
    )


def _integrated(function: PciFunction, ctx: ProbeContext) -> bool:
    """Whether a GPU is part of the processor: by the product, else by the address that is reserved for it.

    The address alone lies inside a virtual machine, where a card may sit anywhere (intel/ipex-llm#12994).
    """
    model = BY_ID.get(function.device)
    if model:
        return model.integrated
    if not function.address.startswith("0000:00:02."):
        return False
    return not re.search(r"^flags\s*:.*\bhypervisor\b", ctx.read("/proc/cpuinfo") or "", re.MULTILINE)


def _set_integrated_aside(found: Survey, ctx: ProbeContext) -> None:
    """Keep integrated GPUs out of the inventory beside a discrete card, of whatever vendor, as PyTorch does."""
    if ctx.environ.get(INTEGRATED, "").lower() in ("1", "true", "yes"):
        return
    integrated = [gpu for gpu in found.gpus if gpu.integrated]
    if not integrated:
        return
    rivals = [function.address for maker in RIVALS for function in ctx.pci(maker, DISPLAY)]
    discrete = [gpu.function.address for gpu in found.gpus if not gpu.integrated] + rivals
    if not discrete:
        return
    found.gpus = [gpu for gpu in found.gpus if not gpu.integrated]
    found.unlisted = [gpu.function.address for gpu in integrated]
    found.notes.append(
        f"integrated GPU {', '.join(found.unlisted)} is left out beside the discrete card {discrete[0]};"
        f" set {INTEGRATED}=1 to list it"
    )


def _devices(gpu: Gpu, found: Survey, ctx: ProbeContext) -> list[Device]:
    """The devices that one GPU makes: the card, or its tiles where the runtime shows tiles."""
    function = gpu.function
    model = BY_ID.get(function.device)
    attributes: dict[str, str | int | bool] = {
        "device_id": f"0x{function.device:04x}",
        "integrated": gpu.integrated,
        "unit": "card",
        "driver": function.driver or "",
    }
    if gpu.fault and not gpu.fault.counted:
        attributes["level_zero"] = False
    if ahead := sum(address < function.address for address in found.unlisted):
        attributes["unlisted_ahead"] = ahead
    if gpu.tiles > 1:
        attributes["tiles"] = gpu.tiles
    whole = Device(
        id=f"intel-{function.address}",
        index=0,
        model=model.name if model else f"Intel(R) Graphics [0x{function.device:04x}]",
        memory_bytes=gpu.memory_bytes,
        pci_bus_id=function.address,
        numa_node=function.numa_node,
        parent=f"intel-{gpu.parent}" if gpu.parent else None,
        nodes=gpu.nodes,
        health=Health.UNHEALTHY if gpu.fault else Health.HEALTHY if model else Health.UNKNOWN,
        health_reason=str(gpu.fault) if gpu.fault else "",
        attributes=attributes,
    )
    # A mask that names tiles of cards leaves us parts of cards, whatever is counted.
    by_card = layout.composite(ctx.environ, _max_cards(found.gpus)) and "." not in ctx.environ.get(MASK, "")
    if gpu.tiles == 1 or by_card:
        return [whole]
    share = gpu.memory_bytes // gpu.tiles if gpu.memory_bytes else None
    return [
        replace(
            whole,
            id=f"{whole.id}-tile{tile}",
            parent=whole.id,
            memory_bytes=share,
            attributes={**attributes, "unit": "tile", "tile": tile},
        )
        for tile in range(gpu.tiles)
    ]


def _max_cards(gpus: Iterable[Gpu]) -> list[Device]:
    """Just enough of a device per divided card to ask for the order of the machine."""
    return [
        Device(id="", index=0, model="", attributes={"device_id": f"0x{gpu.function.device:04x}", "tiles": gpu.tiles})
        for gpu in gpus
    ]


def _numbered(ctx: ProbeContext, devices: Sequence[Device], found: Survey) -> list[Device]:
    pci_order = layout.pci_ordered(ctx.environ)
    ordered = layout.units(layout.cards(devices, pci_order=pci_order))
    ahead = len(found.unlisted) if pci_order else 0
    return [replace(device, index=index) for index, (_, _, device) in enumerate(ordered, ahead)]


def _module_version(ctx: ProbeContext, drivers: Iterable[str]) -> str:
    versions = (ctx.read(f"/sys/module/{driver}/version") for driver in drivers)
    return next((version.strip() for version in versions if version), "")
