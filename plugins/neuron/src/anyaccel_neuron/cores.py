"""The cores of the chips that were found: identity, memory, links and health of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anyaccel.plugin import Device, DeviceNode, Health, PciFunction, ProbeContext

from anyaccel_neuron import health, neuron_ls, sysfs
from anyaccel_neuron.products import UNKNOWN_MODEL, Family, core_attributes

SAME_CHIP, LINKED_CHIP = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One chip and everything that its cores have in common.

    Attributes:
        index: Its index here.
        node: Its device node, or None when it has none.
        entry: What the driver shows of it, or None.
        listed: What the tool lists of it, or None.
        fault: Why it cannot be used, or an empty string.
        function: The PCI function that it is, or None when nothing tells.
        family: Its family, or None when nothing tells.
        lnc: Physical cores in one logical core, or None when nothing tells.
        cores: Ids of its cores, as the runtime counts.
        id: Stable identity.
    """

    index: int
    node: DeviceNode | None = None
    entry: sysfs.Entry | None = None
    listed: neuron_ls.Listed | None = None
    fault: str = ""
    function: PciFunction | None = None
    family: Family | None = None
    lnc: int | None = None
    cores: tuple[int, ...] = ()
    id: str = ""

    @property
    def bdf(self) -> str | None:
        """PCI address, or None when nothing tells."""
        if self.listed and self.listed.bdf:
            return self.listed.bdf
        return self.function.address if self.function else None


def devices(ctx: ProbeContext, chips: Sequence[Chip]) -> tuple[Device, ...]:
    """Make the cores of all chips, each linked to those of its chip and, less closely, to those of linked chips."""
    linked = _linked(ctx, chips)
    cores = {chip.index: [_core_id(chip, position) for position in range(len(chip.cores))] for chip in chips}
    made = []
    for chip in chips:
        state, reason = health.verdict(ctx, chip.entry)
        if chip.fault:
            state, reason = Health.UNHEALTHY, chip.fault
        links = {core: LINKED_CHIP for other in sorted(linked[chip.index]) for core in cores[other]}
        for position, (core_id, index) in enumerate(zip(cores[chip.index], chip.cores, strict=True)):
            siblings = {core: SAME_CHIP for core in cores[chip.index] if core != core_id}
            made.append(
                Device(
                    id=core_id,
                    index=index,
                    model=chip.family.device_name if chip.family else UNKNOWN_MODEL,
                    memory_bytes=_core_memory(chip),
                    pci_bus_id=chip.bdf,
                    numa_node=_numa_node(chip),
                    parent=chip.id,
                    links={**links, **siblings},
                    nodes=(chip.node.path,) if chip.node else (),
                    occupies=_parts(chip, position),
                    health=state,
                    health_reason=reason,
                    attributes=_attributes(chip, position),
                )
            )
    return tuple(made)


def _physical(chip: Chip, position: int) -> range:
    """The physical cores that a logical core consists of, as the driver numbers those of a chip."""
    size = chip.lnc or 1
    return range(position * size, (position + 1) * size)


def _core_id(chip: Chip, position: int) -> str:
    """Name a core by its physical cores: users with different sizes of logical cores must not mean two by one name."""
    physical = _physical(chip, position)
    return f"{chip.id}-nc{'-'.join(map(str, sorted({physical[0], physical[-1]})))}"


def _parts(chip: Chip, position: int) -> tuple[str, ...]:
    """Directories of the physical cores that a core consists of.

    The driver gives the node of a chip the chip's index as its minor number (``neuron_cdev.c``) and makes a directory
    for each physical core (``neuron_sysfs_metrics.c``). A container may give the node another name, not another number.
    """
    if chip.node is None:
        return ()
    directory = f"{sysfs.CLASS}/neuron{chip.node.minor}"
    return tuple(f"{directory}/neuron_core{core}" for core in _physical(chip, position))


def _core_memory(chip: Chip) -> int | None:
    """Memory of one core: its part of what the cores of a chip share."""
    total = chip.listed.memory_bytes if chip.listed and chip.listed.memory_bytes else None
    if total is None and chip.family:
        total = chip.family.memory_bytes
    return total // len(chip.cores) if total else None


def _numa_node(chip: Chip) -> int | None:
    if chip.listed and chip.listed.numa_node is not None:
        return chip.listed.numa_node
    return chip.function.numa_node if chip.function else None


def _attributes(chip: Chip, position: int) -> dict[str, str | int]:
    """What a core's hooks need, and what people ask of it; a fact that is unknown is left out."""
    facts: dict[str, str | int] = core_attributes(chip.family, chip.lnc or 1) if chip.family else {}
    if chip.lnc is not None:
        facts["lnc"] = chip.lnc
    facts.update(cores_per_device=len(chip.cores), device_index=chip.index, core=position)
    if chip.listed and chip.listed.instance_type:
        facts["instance_type"] = chip.listed.instance_type
    return facts


def _linked(ctx: ProbeContext, chips: Sequence[Chip]) -> dict[int, set[int]]:
    """Say which chips are linked, by their index here.

    Tool and driver name neighbours as the host counts, also in a container that counts from 0. They are only believed
    where the host's index of every chip is known, or where all the chips that they name are here.
    """
    linked: dict[int, set[int]] = {chip.index: set() for chip in chips}
    usable = [chip for chip in chips if chip.node]
    if any(chip.family and chip.family.device_name == "Trainium3" for chip in usable):
        # Its chips hang on a switch; the driver shows the torus of older ones.
        return {chip.index: {other.index for other in usable if other is not chip} for chip in chips}
    neighbors = {chip.index: _neighbors(ctx, chip) for chip in usable}
    numbered = all(chip.entry and chip.entry.number for chip in usable)
    here = {chip.entry.index if numbered and chip.entry else chip.index: chip.index for chip in usable}
    complete = all(other in here and other != index for index, others in neighbors.items() for other in others)
    for index, others in neighbors.items():
        for other in others if numbered or complete else ():
            if other in here and here[other] != index:
                linked[index].add(here[other])
                linked[here[other]].add(index)
    return linked


def _neighbors(ctx: ProbeContext, chip: Chip) -> frozenset[int]:
    if chip.listed and chip.listed.connected:
        return chip.listed.connected
    return sysfs.connected(ctx, chip.entry) if chip.entry else frozenset()
