"""From the KFD topology and PCI to devices. No library is needed; ``amdsmi`` only names chips we do not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from anyaccel.plugin import Detected, Device, Health, PciFunction, ProbeContext, QueryError

from anyaccel_amd import health, kfd, places, products, smi
from anyaccel_amd.places import Place
from anyaccel_amd.products import Attribute

AMD = 0x1002
CUDA_VENDOR = 0x10DE
DISPLAY_VGA, DISPLAY_3D, DISPLAY_OTHER, PROCESSING = 0x0300, 0x0302, 0x0380, 0x1200
MODULE = "/sys/module/amdgpu"
WSL_NODE, WSL_LIBRARY = "/dev/dxg", "/opt/rocm*/lib/librocdxg.so*"


def detect(ctx: ProbeContext) -> Detected | None:
    """Find the AMD GPUs of a machine.

    Raises:
        ValueError: When the kernel's files contradict themselves.
        RuntimeError: When they change faster than they can be read.
    """
    functions = {f.address: f for f in ctx.pci(AMD, (DISPLAY_VGA, DISPLAY_3D, DISPLAY_OTHER, PROCESSING))}
    topology = kfd.read(ctx)
    if not functions and not topology.gpus and not topology.denied:
        return _nothing(ctx)
    found = places.places(ctx, [node for node in topology.gpus if not node.error], functions)
    readable = _devices(ctx, found, functions)
    # The order of the nodes is the order of the runtime, unreadable ones included.
    devices = [
        replace(readable[node.number] if not node.error else _unreadable(node), index=index)
        for index, node in enumerate(topology.gpus)
    ]
    notes = list(_notes(topology, functions))
    if not topology.denied and not any(node.error for node in topology.gpus):
        known = {place.card for place in found}
        devices += _without_kfd(ctx, [f for f in functions.values() if f.address not in known], len(devices))
    devices, more = _name_unknown(ctx, _rank_integrated(devices))
    return Detected(
        devices=tuple(devices),
        driver_version=(ctx.read(f"{MODULE}/version") or "").strip(),
        partial=any(node.error for node in topology.gpus),
        notes=(*notes, *more),
    )


def _nothing(ctx: ProbeContext) -> Detected | None:
    """What to say where neither PCI nor KFD shows a GPU of ours."""
    if ctx.exists(WSL_NODE) and ctx.glob(WSL_LIBRARY):
        return Detected(
            notes=("ROCm runs here on WSL, which does not tell which GPUs it uses: none can be given out.",)
        )
    return Detected() if ctx.is_dir(MODULE) or ctx.is_dir(kfd.NODES) else None


def _devices(ctx: ProbeContext, found: Sequence[Place], functions: Mapping[str, PciFunction]) -> dict[int, Device]:
    """The devices by node number, links among them included."""
    ids = {place.node.number: place.id for place in found}
    hives = {place.node.number: place.node.properties.get("hive_id", 0) for place in found}
    cuda = bool(ctx.pci(CUDA_VENDOR, (DISPLAY_VGA, DISPLAY_3D)))
    devices = {}
    for place in found:
        node = place.node
        links = {other: value for other, value in node.links.items() if other in ids and other != node.number}
        if not node.links:  # virtual machines and some captures show the hive alone: connected, at an unknown distance
            links = {
                other: 1
                for other, hive in hives.items()
                if hive and hive == hives[node.number] and other != node.number
            }
        device = _device(ctx, place, functions.get(place.card), cuda=cuda)
        devices[node.number] = replace(device, links={ids[other]: links[other] for other in sorted(links)})
    return devices


def _device(ctx: ProbeContext, place: Place, function: PciFunction | None, *, cuda: bool) -> Device:
    node = place.node
    known = products.chip(node.properties.get("device_id", 0), _number(ctx, place.card, "revision"))
    attributes = _attributes(ctx, place, known, cuda=cuda)
    minor = node.properties.get("drm_render_minor") or None
    render = health.render_node(minor)
    problem = health.problem(ctx, place.card, minor)
    memory = node.memory_bytes
    if memory is None and not place.partitioned:
        memory = _number(ctx, place.card, "mem_info_vram_total")
    if memory is not None and attributes.get("integrated"):
        memory += _number(ctx, place.card, "mem_info_gtt_total") or 0  # its VRAM is a small carve-out
    return Device(
        id=place.id,
        index=0,
        model=known.model if known else "",
        memory_bytes=memory or None,
        pci_bus_id=place.card,
        numa_node=function.numa_node if function else None,
        parent=f"amd-{place.card}" if place.partitioned else None,
        nodes=(health.KFD_NODE, render) if render else (health.KFD_NODE,),
        health=Health.UNHEALTHY if problem else Health.HEALTHY,
        health_reason=problem,
        attributes=attributes,
    )


def _attributes(ctx: ProbeContext, place: Place, known: products.Chip | None, *, cuda: bool) -> dict[str, Attribute]:
    """Facts beside the fixed fields; what is unknown is left out."""
    node, properties = place.node, place.node.properties
    device_id = properties.get("device_id", 0)
    revision = _number(ctx, place.card, "revision")
    integrated = node.gfx in products.INTEGRATED_GFX
    units = properties.get("simd_count", 0) // (properties.get("simd_per_cu") or 1)
    facts: dict[str, Attribute | None] = {
        "card": place.card,
        "partition": place.partition if place.partitioned else None,
        "compute_mode": places.mode(ctx, place.card, "compute") or None,
        "memory_mode": places.mode(ctx, place.card, "memory") or None,
        "device_id": f"0x{device_id:04x}" if device_id else None,
        "revision": f"0x{revision:02x}" if revision is not None else None,
        "gfx": node.gfx or (known.gfx if known else "") or None,
        "codename": node.name or None,
        "compute_units": units or None,
        "unique_id": f"{properties['unique_id']:016x}" if properties.get("unique_id") else None,
        "hive_id": f"{properties['hive_id']:016x}" if properties.get("hive_id") else None,
        "kfd_node": node.number,
        "kfd_gpu_id": node.gpu_id,
        "render_minor": properties.get("drm_render_minor") or None,
        "virtual_function": products.is_virtual_function(device_id) or None,
        "integrated": integrated or None,
        "beside_cuda": cuda or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _unreadable(node: kfd.Node) -> Device:
    """A GPU of which KFD only gives the directory. Its place in the order is kept."""
    return Device(
        id=f"amd-kfd-node-{node.number}",
        index=0,
        model="AMD GPU",
        health=Health.UNHEALTHY,
        health_reason=f"{node.error}; see 'dmesg | grep amdgpu', then reset the GPU or restart the machine",
        attributes={"kfd_node": node.number, **({} if node.gpu_id is None else {"kfd_gpu_id": node.gpu_id})},
    )


def _without_kfd(ctx: ProbeContext, functions: Sequence[PciFunction], index: int) -> list[Device]:
    """GPUs that PCI shows and KFD does not: ROCm gives them no number. Those of virtual machines are not ours."""
    found: list[Device] = []
    for function in functions:
        if function.driver not in (None, "amdgpu") or ctx.readlink(f"{health.PCI}/{function.address}/physfn"):
            continue
        known = products.chip(function.device, _number(ctx, function.address, "revision"))
        if function.driver is None:
            reason = "no kernel driver is bound to it; load it with 'modprobe amdgpu'"
        else:
            reason = (
                "the driver does not offer it for computing: ROCm does not support it, or its start or reset failed;"
                " see 'dmesg | grep -e kfd -e amdgpu'"
            )
        device = Device(
            id=f"amd-{function.address}",
            index=index + len(found),
            model=known.model if known else "",
            pci_bus_id=function.address,
            numa_node=function.numa_node,
            health=Health.UNHEALTHY,
            health_reason=reason,
            attributes={"card": function.address, "device_id": f"0x{function.device:04x}", "numbered": False},
        )
        found.append(device)
    return found


def _rank_integrated(devices: Sequence[Device]) -> list[Device]:
    """Mark integrated GPUs as secondary where a card is there too: they are given out only to who names them."""
    if not any(d.attributes.get("numbered", True) and not d.attributes.get("integrated") for d in devices):
        return list(devices)
    return [
        replace(device, attributes={**device.attributes, "secondary": True})
        if device.attributes.get("integrated")
        else device
        for device in devices
    ]


def _name_unknown(ctx: ProbeContext, devices: Sequence[Device]) -> tuple[list[Device], list[str]]:
    """Name devices that our table does not know: from sysfs, else from amdsmi, which is slow, else by their id."""
    named = [device if device.model else replace(device, model=_product_name(ctx, device)) for device in devices]
    if all(device.model for device in named):
        return named, []
    names, notes = {}, []
    try:
        for entry in ctx.query("amdsmi/names", smi.question(ctx, "names")):
            names[entry["bdf"]] = entry["market_name"]
    except QueryError as error:
        if error.kind not in smi.NOT_INSTALLED:
            notes.append(f"amdsmi could not name the devices that are not in our table: {error}")
    fallback = "AMD GPU {}".format
    return [
        d
        if d.model
        else replace(d, model=names.get(d.pci_bus_id) or fallback(d.attributes.get("device_id", "")).strip())
        for d in named
    ], notes


def _product_name(ctx: ProbeContext, device: Device) -> str:
    try:
        return (ctx.read(f"{health.PCI}/{health.card_of(device)}/product_name") or "").strip()
    except OSError:
        return ""


def _notes(topology: kfd.Topology, functions: Mapping[str, PciFunction]) -> Iterator[str]:
    if topology.denied:
        yield (
            f"{topology.denied} GPU nodes of the host are closed to this container. The others are numbered from 0,"
            " as ROCm does."
        )
    foreign: dict[str, list[str]] = {}
    for function in functions.values():
        if function.driver not in (None, "amdgpu"):
            foreign.setdefault(str(function.driver), []).append(function.address)
    for driver, addresses in foreign.items():
        yield f"The driver {driver} has the GPUs at {', '.join(addresses)}: they are somebody else's and left out."


def _number(ctx: ProbeContext, card: str, name: str) -> int | None:
    try:
        return ctx.read_int(f"{health.PCI}/{card}/{name}")
    except OSError:
        return None
