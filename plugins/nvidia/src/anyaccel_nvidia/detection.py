"""Detection: NVML's answers, put together with what the files of the machine say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from anyaccel.plugin import Detected, Device, Health, ProbeContext, QueryError

from . import files, health, nvml
from .files import Card
from .visibility import nvml_index

Facts = Mapping[str, Any]

MPS_PIPE = "/tmp/nvidia-mps"  # noqa: S108 - where CUDA looks unless CUDA_MPS_PIPE_DIRECTORY says otherwise
_SKIPPED = ("DGX Display", "NVIDIA DGX Display")
"""A display adapter that CUDA does not offer; NVIDIA's go-nvlib skips it likewise."""
_UNIFIED = ("NVIDIA GB10", "Orin", "NVIDIA Thor")
"""Integrated GPUs that share the host's memory and report none of their own."""

_NOT_ASKED = {
    "ModuleNotFoundError": ("the package nvidia-ml-py is not installed", "pip install nvidia-ml-py"),
    "NotThisMachine": ("the machine is looked at from outside", "detect on the machine itself"),
    "NotRecorded": ("the recording has no answer of NVML", "record the machine again"),
}
"""Where NVML is not at fault, by what the query raised: why it was not asked, and the way out."""
_NO_LIBRARY = (
    "the driver's library libnvidia-ml.so.1 is not here",
    "install it, or start the container with the driver capability 'utility'",
)
_NO_MODULE = ("the kernel module is not loaded", "modprobe nvidia")


def detect(ctx: ProbeContext) -> Detected | None:
    """Find the GPUs and MIG devices of a machine.

    Raises:
        RuntimeError: When the driver is there and does not answer: that is no machine without GPUs.
    """
    if not files.is_present(ctx):
        return None
    try:
        system: Facts = ctx.query("nvml/system", nvml.system)
    except QueryError as error:
        return _without_nvml(ctx, error)
    found, failures = _ask_each(ctx, system["count"])
    cards = files.cards(ctx)
    by_address = {card.function.address: card for card in cards}
    devices = [
        device for facts in found for device in _devices(ctx, facts, system, by_address) if device.model not in _SKIPPED
    ]
    devices += _failed(ctx, failures, found, cards)
    devices.sort(key=nvml_index)
    devices += [
        files.unusable(card, 0, files.foreign_reason(card))
        for card in cards
        if files.foreign(card) and not card.excluded and card.function.address not in _addresses(found)
    ]
    links = _links(ctx, found)
    return Detected(
        devices=tuple(
            replace(device, index=index, links=links.get(device.id, {})) for index, device in enumerate(devices)
        ),
        driver_version=system["driver"] or files.driver_version(ctx),
        partial=bool(failures),
        notes=tuple(remark for facts in found for remark in health.remarks(facts)),
    )


def _without_nvml(ctx: ProbeContext, error: QueryError) -> Detected | None:
    """Answer from the files where NVML is not there; where it is there and fails, fail."""
    by_value = {health.LIBRARY_NOT_FOUND: _NO_LIBRARY, health.DRIVER_NOT_LOADED: _NO_MODULE}
    known = by_value.get(error.value or 0) or _NOT_ASKED.get(error.kind)
    if known is None:
        raise RuntimeError(health.driver_reason(error)) from error
    detected = files.inventory(ctx, *known)
    if error.value == health.DRIVER_NOT_LOADED and any("driver" not in d.attributes for d in detected.devices):
        raise RuntimeError(
            "NVML says that the kernel module is not loaded, while device nodes and a bound driver are here:"
            " reload it ('modprobe nvidia') or start the container with /dev/nvidiactl"
        ) from error
    if detected.devices or detected.notes or detected.driver_version or files.functions(ctx):
        return detected
    if error.kind == "ModuleNotFoundError":
        raise RuntimeError(f"only NVML can tell whether GPUs are here, and {known[0]}: {known[1]}") from error
    return None  # WSL without an NVIDIA GPU, stale device nodes


def _ask_each(ctx: ProbeContext, count: int) -> tuple[list[Facts], dict[int, QueryError]]:
    """Ask about each GPU by itself, so that a bad one hides no other."""
    found: list[Facts] = []
    failures: dict[int, QueryError] = {}
    for index in range(count):
        try:
            found.append(ctx.query(f"nvml/device/{index}", partial(nvml.device, index)))
        except QueryError as error:
            failures[index] = error
    return found, failures


def _devices(ctx: ProbeContext, facts: Facts, system: Facts, cards: Mapping[str, Card]) -> Iterator[Device]:
    """One device for a GPU, or one for each of its MIG devices: with MIG on it is none itself."""
    address = files.pci_address(facts["bus_id"]) if facts["bus_id"] else None
    card = cards.get(address or "")
    state, reason = health.judge(facts)
    node = ctx.exists(files.WSL_NODE) and files.WSL_NODE
    minor = facts["minor"] if facts["minor"] is not None else card and card.minor
    if minor is not None:
        node = f"/dev/nvidia{minor}"
    card_id = facts["uuid"] or (f"nvidia-{address}" if address else f"nvidia-{facts['name'].replace(' ', '-')}")
    memory, unified = _memory(ctx, facts)
    whole = Device(
        id=card_id,
        index=facts["index"],
        model=facts["name"],
        memory_bytes=memory,
        pci_bus_id=address,
        numa_node=card.function.numa_node if card else None,
        nodes=(node,) if node else (),
        health=state,
        health_reason=reason,
        attributes=_attributes(facts, system) | ({"unified_memory": True} if unified else {}),
    )
    if not (facts["mig"] and facts["mig"][0]):
        pipe = _mps_pipe(ctx)
        yield replace(whole, attributes={**whole.attributes, "mps_pipe": pipe}) if pipe else whole
        return
    capabilities = _mig_capabilities(ctx)
    for mig in facts["mig_devices"]:
        gpu, compute = mig["gpu_instance"], mig["compute_instance"]
        paths = (f"gpu{minor}/gi{gpu}/access", f"gpu{minor}/gi{gpu}/ci{compute}/access")
        own = {"mig_profile": mig["name"].partition(" MIG ")[2] or None}
        own |= {"gpu_instance": gpu, "compute_instance": compute}
        yield replace(
            whole,
            id=mig["uuid"],
            model=mig["name"],
            memory_bytes=mig["memory"],
            parent=whole.id,
            nodes=(*whole.nodes, *(capabilities[path] for path in paths if path in capabilities)),
            attributes={**whole.attributes, **{name: fact for name, fact in own.items() if fact is not None}},
        )


def _attributes(facts: Facts, system: Facts) -> dict[str, str | int | float | bool]:
    cuda, capability, fabric = system["cuda"], facts["compute_capability"], facts["fabric"] or {}
    attributes = {
        "nvml_index": facts["index"],
        "pci_device": facts["pci_device"] and f"{int(facts['pci_device'], 16) >> 16:04x}",
        "compute_capability": capability and ".".join(map(str, capability)),
        "compute_mode": health.COMPUTE_MODES.get(facts["compute_mode"]),
        "cuda_version": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
        "fabric_cluster": fabric.get("cluster"),
        "fabric_clique": fabric.get("clique"),
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _memory(ctx: ProbeContext, facts: Facts) -> tuple[int | None, bool]:
    """Memory in bytes, and whether it is the host's: an integrated GPU has none of its own to report."""
    if facts["memory"] is not None:
        return facts["memory"], False
    if not facts["name"].startswith(_UNIFIED):
        return None, False
    return host_memory(ctx, "MemTotal"), True


def host_memory(ctx: ProbeContext, key: str) -> int | None:
    """A line of ``/proc/meminfo`` in bytes, or None."""
    for line in files.read(ctx, "/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _mps_pipe(ctx: ProbeContext) -> str | None:
    """Directory in which an MPS control daemon listens, or None."""
    directory = ctx.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPE
    return directory if ctx.exists(f"{directory}/control") else None


def _mig_capabilities(ctx: ProbeContext) -> dict[str, str]:
    """Device nodes that open an instance, by the name that the driver's table gives it."""
    lines = files.read(ctx, "/proc/driver/nvidia-caps/mig-minors").splitlines()
    rows = (line.split() for line in lines)
    return {row[0]: f"/dev/nvidia-caps/nvidia-cap{row[1]}" for row in rows if len(row) > 1 and row[1].isdecimal()}


def _addresses(found: Sequence[Facts]) -> set[str]:
    return {files.pci_address(facts["bus_id"]) for facts in found if facts["bus_id"]}


def _failed(
    ctx: ProbeContext, failures: Mapping[int, QueryError], found: Sequence[Facts], cards: Sequence[Card]
) -> Iterator[Device]:
    """The GPUs that NVML counts and cannot describe. Which ones they are, the files say where only one answer fits."""
    known = _addresses(found)
    left = [card for card in cards if not files.foreign(card) and not card.excluded and files.given(ctx, card)]
    left = [card for card in left if card.function.address not in known]
    for position, (index, error) in enumerate(failures.items()):
        reason = health.device_reason(error)
        if len(left) == len(failures):  # NVML counts in the order of PCI addresses
            device = files.unusable(left[position], index, reason)
            attributes = {"nvml_index": index, "pci_device": device.attributes["pci_device"]}
            yield replace(device, attributes=attributes)
        else:
            yield Device(
                id=f"nvidia-unidentified-{index}",
                index=index,
                model="NVIDIA GPU",
                health=Health.UNHEALTHY,
                health_reason=reason,
                attributes={"nvml_index": index},
            )


LINK_BY_ANCESTOR = {0: 60, 10: 50, 20: 40}
"""Strength of a PCIe path by NVML's topology level: same board, one switch, several switches. Paths through the
host count as no link. The numbers are those of NVIDIA/go-gpuallocator."""
LINK_BY_NVLINK = 100


def _links(ctx: ProbeContext, found: Sequence[Facts]) -> dict[str, dict[str, int]]:
    """Strength of the connections between whole GPUs; nothing when the driver does not tell."""
    whole = {facts["index"]: facts for facts in found if not (facts["mig"] and facts["mig"][0]) and facts["uuid"]}
    if len(whole) < 2:  # noqa: PLR2004 - a pair
        return {}
    try:
        answer = ctx.query("nvml/topology", partial(nvml.topology, list(whole)))
    except QueryError:  # unknown is no fault (NVIDIA/go-gpuallocator#17)
        return {}
    strength = {(one, other): LINK_BY_ANCESTOR.get(level, 0) for one, other, level in answer["ancestors"]}
    nvlinks = {int(index): ends for index, ends in answer["nvlink"].items()}
    buses = {index: facts["bus_id"] for index, facts in whole.items()}
    links: dict[str, dict[str, int]] = {facts["uuid"]: {} for facts in whole.values()}
    for one in whole:
        for other in whole:
            direct = nvlinks.get(one, {}).get(buses[other], 0)
            switched = min(nvlinks.get(one, {}).get("switch", 0), nvlinks.get(other, {}).get("switch", 0))
            value = strength.get((min(one, other), max(one, other)), 0) + LINK_BY_NVLINK * (direct + switched)
            if one != other and value:
                links[whole[one]["uuid"]][whole[other]["uuid"]] = value
    return links
