"""Find TPU chips: PCI functions first, the device nodes to confirm them, IOMMU groups where PCI is hidden."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from anyaccel.plugin import Detected, Device, Health, PciFunction, ProbeContext

from anyaccel_tpu import facts as slice_facts
from anyaccel_tpu.products import GOOGLE, V2_OR_V3, Generation, generation_of

_GROUPS = "/sys/kernel/iommu_groups"
_VFIO = "/dev/vfio/vfio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip before its nodes were looked at.

    Attributes:
        generation: Its generation.
        address: PCI address of its first TPU function, or None when only a node ``/dev/accel<n>`` was found.
        numa_node: NUMA node, or None.
        groups: IOMMU groups of its functions, in the order of the functions.
        driver: Kernel driver of its first function, or None.
        node: The node through which it was found, where that was all there was.
    """

    generation: Generation
    address: str | None = None
    numa_node: int | None = None
    groups: tuple[str, ...] = ()
    driver: str | None = None
    node: str | None = None


def detect(ctx: ProbeContext) -> Detected | None:
    """Find the chips of this host.

    Returns:
        The chips, None where nothing speaks for a TPU.

    Raises:
        ValueError: When sysfs shows a function of Google's with a device id that is no number.
    """
    notes: list[str] = []
    chips = group(ctx.pci(GOOGLE)) or group(_behind_vfio(ctx, notes))
    partial = bool(notes)
    accel = [] if chips else _accel_nodes(ctx)
    if not chips and (_pci_shown(ctx) or not (accel or notes or ctx.environ.get("TPU_ACCELERATOR_TYPE"))):
        return None
    facts = slice_facts.gather(ctx, tpu_seen=bool(chips))
    named = facts.generation
    if not chips and named is not None:
        # Others use the name /dev/accel<n> too: without PCI to tell them apart, only Google's word makes it a TPU.
        chips = [Chip(generation=named, node=path) for path in accel]
    if not chips:
        return _unproven(facts, notes)
    chips = [_decided(chip, named) for chip in in_order(chips)]
    if named is not None and chips[0].generation not in (named, V2_OR_V3):
        notes.append(
            f"the accelerator type is said to be {facts.accelerator_type}, and PCI shows {chips[0].generation.model};"
            " PCI was believed"
        )
    devices = _devices(ctx, chips, facts.attributes(len(chips)))
    return Detected(devices=devices, partial=partial, notes=(*notes, *facts.notes))


def group(functions: Iterable[PciFunction]) -> list[Chip]:
    """Make one chip of all functions in one slot of which any has a TPU's id.

    A chip of tpu7x has two functions and two IOMMU groups; counting either finds eight chips where there are four.
    """
    slots: dict[str, list[PciFunction]] = {}
    for function in functions:
        slots.setdefault(function.address.rpartition(".")[0], []).append(function)
    chips = []
    for members in slots.values():
        members.sort(key=lambda member: member.address)
        known = [(member, generation_of(member.device, member.subsystem_device)) for member in members]
        first, generation = next(((member, found) for member, found in known if found), (members[0], None))
        if generation is not None:
            chips.append(
                Chip(
                    generation=generation,
                    address=first.address,
                    numa_node=first.numa_node,
                    groups=tuple(dict.fromkeys(member.iommu_group for member in members if member.iommu_group)),
                    driver=first.driver,
                )
            )
    return chips


def in_order(chips: Sequence[Chip]) -> list[Chip]:
    """Sort chips as Google's ``tpu-info`` does: by the IOMMU group of function 0 where they are opened through vfio.

    The minor number of a group's node, and the order of a directory, say nothing.
    """
    if all(chip.generation.vfio and chip.groups and chip.groups[0].isdecimal() for chip in chips):
        return sorted(chips, key=lambda chip: int(chip.groups[0]))
    return sorted(chips, key=lambda chip: (chip.address or "", _number(chip.node)))


def links(index: int, count: int) -> dict[int, int]:
    """Strength of the connection from one chip to the others of its host, by their indexes.

    All chips of a host are wired to each other. Pairs 0,1 and 2,3 come before quads 0-3 and 4-7, since these are the
    rectangles that the runtime accepts, and a placement that takes the best-linked set then takes one of them.
    """
    return {
        other: 3 if other // 2 == index // 2 else 2 if other // 4 == index // 4 else 1
        for other in range(count)
        if other != index
    }


def _behind_vfio(ctx: ProbeContext, notes: list[str]) -> list[PciFunction]:
    """Functions of Google's behind the groups in /dev/vfio; a group that sysfs does not vouch for is no TPU."""
    functions = []
    for path in ctx.glob("/dev/vfio/[0-9]*"):
        number = path.rpartition("/")[2]
        if not number.isdecimal() or ctx.node(path) is None:
            continue
        try:
            functions += [_function(ctx, device, number) for device in ctx.glob(f"{_GROUPS}/{number}/devices/*")]
        except OSError as error:
            notes.append(f"{path} was left out: what is behind it cannot be read ({error})")
    return [function for function in functions if function.vendor == GOOGLE]


def _function(ctx: ProbeContext, path: str, number: str) -> PciFunction:
    numa_node = ctx.read_int(f"{path}/numa_node")
    return PciFunction(
        address=path.rpartition("/")[2].lower(),
        vendor=ctx.read_int(f"{path}/vendor") or 0,
        device=ctx.read_int(f"{path}/device") or 0,
        class_code=0,
        subsystem_device=ctx.read_int(f"{path}/subsystem_device"),
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        iommu_group=number,
    )


def _pci_shown(ctx: ProbeContext) -> bool:
    return bool(ctx.glob("/sys/bus/pci/devices/*"))


def _accel_nodes(ctx: ProbeContext) -> list[str]:
    paths = (path for path in ctx.glob("/dev/accel[0-9]*") if re.fullmatch(r"/dev/accel\d+", path))
    return [path for path in paths if ctx.node(path) is not None]


def _unproven(facts: slice_facts.SliceFacts, notes: Sequence[str]) -> Detected | None:
    """No chip: absent, unless somebody names a type or a group could not be looked into."""
    if facts.accelerator_type is None:
        return Detected(partial=True, notes=tuple(notes)) if notes else None
    claim = (
        f"the accelerator type is said to be {facts.accelerator_type}, and neither PCI nor a device node that sysfs"
        " vouches for shows a chip; pass the nodes and /sys of the host into the container"
    )
    return Detected(notes=(*notes, claim))


def _decided(chip: Chip, named: Generation | None) -> Chip:
    """Let the accelerator type decide where a PCI id fits two generations."""
    if chip.generation is V2_OR_V3 and named is not None and named.key in ("v2", "v3"):
        return replace(chip, generation=named)
    return chip


def _devices(ctx: ProbeContext, chips: Sequence[Chip], attributes: Mapping[str, str | int]) -> tuple[Device, ...]:
    ids = [_id(chip) for chip in chips]
    devices = []
    for index, chip in enumerate(chips):
        nodes, missing = _nodes(ctx, chip, index)
        reason = _unusable(ctx, chip, nodes, missing)
        devices.append(
            Device(
                id=ids[index],
                index=index,
                model=chip.generation.model,
                memory_bytes=chip.generation.memory_bytes,
                pci_bus_id=chip.address,
                numa_node=chip.numa_node,
                links={ids[other]: strength for other, strength in links(index, len(chips)).items()},
                nodes=nodes,
                health=Health.UNHEALTHY if reason else Health.HEALTHY if chip.address else Health.UNKNOWN,
                health_reason=reason,
                attributes={"generation": chip.generation.key, **attributes},
            )
        )
    return tuple(devices)


def _id(chip: Chip) -> str:
    """There is no public serial number; the PCI address is the same after a reboot."""
    return f"tpu-{chip.address}" if chip.address else f"tpu-{(chip.node or '').rpartition('/')[2]}"


def _nodes(ctx: ProbeContext, chip: Chip, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The nodes of a chip, and those that are missing. Both families are looked at, whatever the generation."""
    if chip.node:
        return (chip.node,), ()
    groups = tuple(f"/dev/vfio/{number}" for number in chip.groups)
    present = tuple(path for path in groups if ctx.node(path))
    accel = f"/dev/accel{index}"
    if not present and ctx.node(accel):
        return (accel,), ()
    expected = groups if present or chip.generation.vfio else (accel,)
    return present, tuple(path for path in expected if path not in present)


def _unusable(ctx: ProbeContext, chip: Chip, nodes: Sequence[str], missing: Sequence[str]) -> str:
    """Why a chip cannot be used, with the way out; empty when it can."""
    if chip.driver is None and not nodes:
        runtime = chip.generation.runtime
        version = f" (for {chip.generation.model}: {runtime})" if runtime else ""
        return (
            f"no driver is bound to {chip.address} and it has no device node; create the VM with the TPU software"
            f" version of its generation{version}, or reinstall the driver after a kernel upgrade"
        )
    if missing or not nodes:
        what = " and ".join(missing) or "its device node"
        return f"{what} is missing; pass it into the container with --device, or restart the TPU VM"
    if any(path.startswith("/dev/vfio/") for path in nodes) and ctx.node(_VFIO) is None:
        return f"{_VFIO} is missing, without which no group can be opened; pass it into the container with --device"
    shut = [path for path in nodes if (node := ctx.node(path)) and not (node.readable and node.writable)]
    if shut:
        return (
            f"this user may not open {' and '.join(shut)} for reading and writing; look at the owner with"
            f" 'ls -l {shut[0]}' and join the group, or run as root"
        )
    return ""


def _number(node: str | None) -> int:
    return int(re.sub(r"\D", "", node or "") or 0)
