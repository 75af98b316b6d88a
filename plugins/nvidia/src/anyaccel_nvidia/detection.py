"""Build cards from the answers of NVML and the driver's files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from anyaccel.errors import QueryError
from anyaccel.kit import Card, host_memory, pairs, text, try_query
from anyaccel.plugin import PciFunction, ProbeContext

from . import faults, mps, nvml

Facts = Mapping[str, Any]

DRIVER = "/proc/driver/nvidia"
WSL_NODE = "/dev/dxg"

LINK_BY_ANCESTOR = {0: 60, 10: 50, 20: 40}
"""Strength of a PCIe path by NVML's topology level: same board, one switch, several switches. Paths through the
host count as no link. The numbers are those of NVIDIA/go-gpuallocator."""
LINK_BY_NVLINK = 100

_UNIFIED = ("NVIDIA GB10", "Orin", "NVIDIA Thor")
"""Integrated GPUs: they use the host's memory and report no memory of their own."""
_TEGRA = ("/etc/nv_tegra_release", "/sys/class/tegra-firmware")
_UUID = r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_BUS_ID = r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])"


def is_tegra(ctx: ProbeContext) -> bool:
    """Return True on a Jetson or another Tegra board, whose GPU is not on PCI."""
    return text(ctx, "/sys/devices/soc0/family").startswith("Tegra") or any(map(ctx.exists, _TEGRA))


def is_ours(ctx: ProbeContext, card: Card) -> bool:
    """Return True if NVIDIA's driver is bound to a GPU and the GPU was given to this container.

    Device nodes are the proof: PCI shows every GPU of the host.
    """
    given = ctx.exists(card.nodes[0]) if card.nodes else bool(ctx.glob("/dev/nvidia[0-9]*"))
    return given and "driver" not in card.attributes


def read_information(card: Card) -> None:
    """Read the driver's ``information`` file: name, UUID and N of ``/dev/nvidiaN``.

    A UUID of question marks belongs to a GPU that is not initialized yet. A GPU excluded in the driver's settings gets
    the attribute ``excluded``; drivers before 470 call it blacklisted.

    Raises:
        ValueError: UUID or minor number is malformed.
    """
    path = f"{DRIVER}/gpus/{card.address}/information"
    values = pairs(text(card.ctx, path))  # some hosts let only root read it (ray-project/ray#28064)
    minor, uuid = values.get("Device Minor"), values.get("GPU UUID")
    if minor and not minor.isdecimal():
        raise ValueError(f"{path}: 'Device Minor' must be a number (got {minor!r}); reload the driver, or report this")
    if uuid and "?" not in uuid:
        if not re.fullmatch(_UUID, uuid):
            raise ValueError(f"{path}: 'GPU UUID' must look like GPU-8-4-4-4-12 hexadecimal digits (got {uuid!r})")
        card.id = uuid
    card.model = values.get("Model") or ""
    card.nodes = (f"/dev/nvidia{minor}",) if minor else ()
    words = [str(value).lower() for key, value in values.items() if key.endswith(("Excluded", "Blacklisted"))]
    card.attributes["excluded"] = True if "yes" in words else None


def mps_daemon(ctx: ProbeContext) -> dict[str, str | int | None]:
    """Return attributes for GPUs under an MPS daemon: directory and protocol of the daemon.

    A daemon of another user does not answer: programs would then get the whole GPU without a message. A daemon that has
    ended is none.
    """
    silent = None
    for pipe in mps.listening(ctx.environ, ctx.exists):
        try:
            answer = ctx.query(f"mps/{pipe}", partial(mps.query_daemon, pipe))
        except QueryError:
            silent = silent or pipe
        else:
            if answer:
                return {"mps_pipe": pipe, "mps_protocol": answer["protocol"]}
    return {"mps_pipe": silent, "mps_protocol": None}


def gpu_cards(
    ctx: ProbeContext, facts: Facts, system: Facts, known: Mapping[str, Card], daemon: Mapping[str, Any]
) -> list[Card]:
    """Build the card of a GPU from NVML's answer, or with MIG on, the cards of its MIG devices.

    ``facts`` is NVML's answer about the GPU, ``system`` the answer about the driver, ``known`` the cards from files by
    address, ``daemon`` the result of :func:`mps_daemon`.
    """
    address = pci_address(facts["bus_id"], known) if facts["bus_id"] else None
    pci_device = int(facts["pci_device"], 16) >> 16 if facts["pci_device"] else None
    file = known.get(address or "")
    function = file.function if file else None
    if address and not function:
        function = PciFunction(address=address, vendor=0x10DE, device=pci_device or 0, class_code=0x0302)
    nodes = file.nodes if file else ()
    if facts["minor"] is not None:
        nodes = (f"/dev/nvidia{facts['minor']}",)
    # WSL has one node for every GPU of the machine.
    if not nodes and ctx.exists(WSL_NODE):
        nodes = (WSL_NODE,)
    memory, unified = facts["memory"], None
    # GB10, Orin and Thor answer "not supported" for memory, since the GPU has none of its own.
    if memory is None and (facts["name"] or "").startswith(_UNIFIED):
        memory, unified = host_memory(ctx), True
    cuda, capability, fabric = system["cuda"], facts["compute_capability"], facts["fabric"] or {}
    shared = {
        "nvml_index": facts["index"],
        "pci_device": None if pci_device is None else f"{pci_device:04x}",
        "compute_capability": capability and ".".join(map(str, capability)),
        "compute_mode": faults.COMPUTE_MODES.get(facts["compute_mode"]),
        "cuda_version": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
        "fabric_cluster": fabric.get("cluster"),
        "fabric_clique": fabric.get("clique"),
        "unified_memory": unified,
    }

    def make(name: str, model: str, memory_bytes: int | None, **own: Any) -> Card:
        card = Card(ctx, name, function)
        card.number, card.model, card.memory_bytes, card.nodes = facts["index"], model, memory_bytes, nodes
        card.attributes = shared | own
        card.fault, card.sound = faults.judge(facts), True
        return card

    name = facts["name"] or ""
    whole = facts["uuid"] or f"nvidia-{address or name.replace(' ', '-') or facts['index']}"
    if not has_mig(facts):
        return [make(whole, name, memory, **daemon)]
    cards = []
    # An instance needs two nodes beside the GPU's: of the GPU instance and of its compute instance.
    capabilities = _mig_capabilities(ctx)
    for mig in facts["mig_devices"]:
        gpu, compute = mig["gpu_instance"], mig["compute_instance"]
        profile = mig["name"].partition(" MIG ")[2] or None
        card = make(
            mig["uuid"], mig["name"], mig["memory"], mig_profile=profile, gpu_instance=gpu, compute_instance=compute
        )
        card.parent = whole
        instance = f"{driver_name(nodes)}/gi{gpu}"
        paths = (f"{instance}/access", f"{instance}/ci{compute}/access")
        card.nodes += tuple(capabilities[path] for path in paths if path in capabilities)
        cards.append(card)
    return cards


def driver_name(nodes: Sequence[str]) -> str:
    """Return the name of a GPU in the driver's files on capabilities: ``gpu0`` for ``/dev/nvidia0``."""
    return "".join(nodes).replace("/dev/nvidia", "gpu")


def has_mig(facts: Facts) -> bool:
    """Return True if MIG is on now; the second value of NVML's pair is the mode after the next reset."""
    return bool(facts["mig"] and facts["mig"][0])


def pci_address(bus_id: str, known: Collection[str] = ()) -> str:
    """Convert NVML's ``00000000:0C:00.0`` to the form of sysfs, ``0000:0c:00.0``.

    Under Hyper-V and on Azure, NVML's domain has 32 bits and the kernel's the lower 16 (nvidia-docker#1316): of
    ``03F8CFDD:00:00.0`` sysfs and the driver's files know ``cfdd:00:00.0``. Other wide domains exist as they are:
    Intel's VMD begins at 10000. So the narrow form counts only if it is ``known``, and the wide one is not.

    Raises:
        ValueError: When it is no PCI bus id.
    """
    match = re.fullmatch(_BUS_ID, bus_id, re.IGNORECASE)
    if match is None:
        raise ValueError(
            f"NVML's PCI bus id must look like 00000000:0C:00.0 (got {bus_id!r}); update the driver, or report this"
        )
    domain, bus, slot, number = match.groups()
    domains = (int(domain, 16), int(domain, 16) & 0xFFFF)
    wide, narrow = (f"{value:04x}:{bus}:{slot}.{number}".lower() for value in domains)
    return narrow if narrow in known and wide not in known else wide


def _mig_capabilities(ctx: ProbeContext) -> dict[str, str]:
    """Return the device nodes of MIG instances, by their names in the driver's table."""
    rows = (line.split() for line in text(ctx, "/proc/driver/nvidia-caps/mig-minors").splitlines())
    return {row[0]: f"/dev/nvidia-caps/nvidia-cap{row[1]}" for row in rows if len(row) > 1 and row[1].isdecimal()}


def links(ctx: ProbeContext, found: Sequence[Facts]) -> dict[str, dict[str, int]]:
    """Return the strength of the connections between whole GPUs, by id; empty if NVML reports none."""
    whole = [facts for facts in found if facts["uuid"] and not has_mig(facts)]
    if len(whole) < 2:  # noqa: PLR2004 - a pair
        return {}
    answer = try_query(ctx, "nvml/topology", partial(nvml.topology, [facts["index"] for facts in whole]))
    if answer is None:  # unknown is no fault (NVIDIA/go-gpuallocator#17)
        return {}
    paths = {(one, other): LINK_BY_ANCESTOR.get(level, 0) for one, other, level in answer["ancestors"]}

    def strengths(one: Facts) -> Iterator[tuple[str, int]]:
        ends = answer["nvlink"].get(str(one["index"]), {})
        for other in whole:
            # Through NVSwitch each GPU reaches each other one with as many links as the weaker of the two has.
            switched = min(ends.get("switch", 0), answer["nvlink"].get(str(other["index"]), {}).get("switch", 0))
            pair = (min(one["index"], other["index"]), max(one["index"], other["index"]))
            value = paths.get(pair, 0) + LINK_BY_NVLINK * (ends.get(other["bus_id"], 0) + switched)
            if other is not one and value:
                yield other["uuid"], value

    return {facts["uuid"]: dict(strengths(facts)) for facts in whole}
