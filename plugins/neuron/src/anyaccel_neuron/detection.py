"""Find the NeuronCores of this machine.

Device nodes say which chips this process may open; ``neuron-ls`` says the most about them, the driver's sysfs and the
PCI ids enough where the tool is missing or broken. The unit that is given out is the logical core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from anyaccel.plugin import Detected, Device, DeviceNode, Health, PciFunction, ProbeContext

from anyaccel_neuron import health, neuron_ls, sysfs
from anyaccel_neuron.products import PCI_FAMILIES, UNKNOWN_MODEL, Family, core_attributes, family_of_instance

PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"
"""Instance type, as the firmware of EC2 instances on Nitro says it."""

SAME_CHIP, LINKED_CHIP = 2, 1

REBUILD_DRIVER = (
    "install the headers of the running kernel, reinstall the package aws-neuronx-dkms, then run 'sudo modprobe neuron'"
)


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


def detect(ctx: ProbeContext) -> Detected | None:
    """Find the cores.

    Raises:
        RuntimeError: When there are chips and nothing tells how many cores they have.
        ValueError: When the configuration of logical cores is malformed.
    """
    nodes = sysfs.nodes(ctx)
    functions = sysfs.pci_functions(ctx)
    loaded = ctx.exists(sysfs.MODULE) or any(function.driver == sysfs.DRIVER for function in functions)
    if not (nodes or functions or loaded):
        return None
    listing = neuron_ls.ask(ctx) if nodes else neuron_ls.Listing()
    chips = _chips(ctx, nodes, functions, listing)
    chips += _without_driver(ctx, functions, chips, loaded=bool(nodes) or loaded)
    chips = _identified(ctx, chips)
    return Detected(
        devices=_devices(ctx, chips),
        driver_version=sysfs.driver_version(ctx),
        partial=any(chip.fault for chip in chips),
        notes=_notes(nodes, functions, chips, listing),
    )


def _notes(
    nodes: Mapping[int, DeviceNode], functions: Sequence[PciFunction], chips: Sequence[Chip], listing: neuron_ls.Listing
) -> tuple[str, ...]:
    notes = [listing.problem] if listing.problem else []
    if functions and not nodes and not chips:
        notes.append(
            f"the machine has {len(functions)} Neuron devices and none is here: start the container with"
            " --device=/dev/neuron0 and so on"
        )
    return tuple(notes)


def _chips(
    ctx: ProbeContext,
    nodes: Mapping[int, DeviceNode],
    functions: Sequence[PciFunction],
    listing: neuron_ls.Listing,
) -> list[Chip]:
    """Describe the chips that have a device node; others belong to other containers, whatever sysfs shows."""
    by_address = {function.address: function for function in functions}
    sole = functions[0] if len(functions) == len(nodes) == 1 else None
    entries = sysfs.entries(ctx)
    chips = []
    for index, node in nodes.items():
        listed = listing.chips.get(index)
        fault = listing.faults.get(index, "")
        if not (node.readable and node.writable):
            fault = fault or f"{node.path} may not be opened by this user: run 'sudo chmod 0666 {node.path}'"
        function = by_address.get(listed.bdf) if listed and listed.bdf else sole
        entry = sysfs.entry_of(node, index, entries)
        chips.append(Chip(index=index, node=node, entry=entry, listed=listed, fault=fault, function=function))
    common = _common_family(ctx, functions, entries)
    return _with_cores(ctx, [replace(chip, family=_family(ctx, chip) or common) for chip in chips], listing)


def _family(ctx: ProbeContext, chip: Chip) -> Family | None:
    """Tell the family of one chip from what is known of that chip alone."""
    by_name = sysfs.family(ctx, chip.entry) if chip.entry else None
    by_type = family_of_instance(chip.listed.instance_type) if chip.listed and chip.listed.instance_type else None
    return by_name or by_type or (PCI_FAMILIES[chip.function.device] if chip.function else None)


def _common_family(
    ctx: ProbeContext, functions: Sequence[PciFunction], entries: Sequence[sysfs.Entry]
) -> Family | None:
    """Tell the family of every chip of the machine: an instance has one, which PCI, sysfs and the firmware name."""
    named = [PCI_FAMILIES[function.device] for function in functions] or [
        family for entry in entries if (family := sysfs.family(ctx, entry))
    ]
    if named:
        return named[0] if len({family.device_name for family in named}) == 1 else None
    return family_of_instance(sysfs.text(ctx, PRODUCT_NAME))


def _with_cores(ctx: ProbeContext, chips: Sequence[Chip], listing: neuron_ls.Listing) -> list[Chip]:
    """Fill in the ids of the cores, from the tool or else counted through the chips."""
    sized = [_sized(ctx, chip) for chip in chips]
    known = [(chip.lnc, count) for chip, count in sized if count]
    if sized and not known:
        paths = ", ".join(chip.node.path for chip in chips if chip.node)
        why = listing.problem or "; ".join(listing.faults.values()) or "neuron-ls lists none of them"
        raise RuntimeError(f"nothing tells how many NeuronCores {paths} have: {why}")
    # A chip that nothing is known of is like its siblings, and unusable: it must not shift the ids of the others.
    lnc, usual = Counter(known).most_common(1)[0][0] if known else (None, 0)
    taken = {core for chip in chips if chip.listed for core in chip.listed.cores or ()}
    result = []
    for chip, count in sized:
        complete = chip
        if not count:
            fault = chip.fault or f"neither neuron-ls nor sysfs tells the cores of device {chip.index}: reset it"
            complete = replace(chip, fault=fault, lnc=lnc)
        ids = chip.listed.cores if chip.listed else None
        if ids is None:
            size = count or usual
            start = chip.index * size
            if not taken.isdisjoint(range(start, start + size)):
                start = max(taken) + 1
            ids = tuple(range(start, start + size))
            taken.update(ids)
        result.append(replace(complete, cores=ids))
    return result


def _sized(ctx: ProbeContext, chip: Chip) -> tuple[Chip, int]:
    """Tell the size of a chip's logical cores, and how many there are; 0 when unknown."""
    family, listed = chip.family, chip.listed
    if listed is None:
        if family is None:
            return chip, 0
        lnc = sysfs.logical_core_size(ctx, family)
        return replace(chip, lnc=lnc), family.physical_cores // lnc
    if family is None:
        return replace(chip, lnc=listed.lnc), listed.count
    if listed.lnc and listed.cores is None and listed.count == family.physical_cores:
        # Tools of SDK 2.21 print the physical cores beside the configuration ("NEURON CORES 8, LOGICAL NC 4").
        return replace(chip, lnc=listed.lnc), listed.count // listed.lnc
    return replace(chip, lnc=listed.lnc or max(1, family.physical_cores // listed.count)), listed.count


def _without_driver(
    ctx: ProbeContext, functions: Sequence[PciFunction], chips: Sequence[Chip], *, loaded: bool
) -> list[Chip]:
    """Describe the chips on the PCI bus that no driver serves: they are here and cannot be used.

    Where the driver is loaded, only those count whose binding sysfs shows to be missing: the others belong to
    containers. Their ids follow those of the usable chips, since the runtime does not count them.
    """
    bindings_shown = any(function.driver for function in functions)
    known = {chip.bdf for chip in chips}
    start = max((core for chip in chips for core in chip.cores), default=-1) + 1
    index = max((chip.index for chip in chips), default=-1) + 1
    found = []
    for function in functions:
        if function.address in known or function.driver == sysfs.DRIVER:
            continue
        if loaded and not function.driver and not bindings_shown:
            continue
        if function.driver:
            fault = f"it is bound to the driver {function.driver}: bind it to {sysfs.DRIVER}"
        elif loaded:
            fault = "the Neuron driver did not take it: look for its address in dmesg, then stop and start the instance"
        else:
            fault = f"the Neuron driver is not loaded: {REBUILD_DRIVER}"
        family = PCI_FAMILIES[function.device]
        lnc = sysfs.logical_core_size(ctx, family)
        cores = tuple(range(start, start + family.physical_cores // lnc))
        found.append(Chip(index=index, fault=fault, function=function, family=family, lnc=lnc, cores=cores))
        start, index = start + len(cores), index + 1
    return found


def _identified(ctx: ProbeContext, chips: Sequence[Chip]) -> list[Chip]:
    """Name each chip: by serial number, else by PCI address, else, where neither is known, by its index on the host."""
    serials = [sysfs.serial(ctx, chip.entry) if chip.entry else "" for chip in chips]
    named = []
    for chip, serial in zip(chips, serials, strict=True):
        index = chip.entry.index if chip.entry else chip.index
        lasting = serial if serials.count(serial) == 1 else ""
        named.append(replace(chip, id=f"neuron-{lasting or chip.bdf or f'device{index}'}"))
    return named


def _devices(ctx: ProbeContext, chips: Sequence[Chip]) -> tuple[Device, ...]:
    linked = _linked(ctx, chips)
    cores = {chip.index: [f"{chip.id}-nc{core}" for core in range(len(chip.cores))] for chip in chips}
    devices = []
    for chip in chips:
        state, reason = health.verdict(ctx, chip.entry)
        if chip.fault:
            state, reason = Health.UNHEALTHY, chip.fault
        links = {core: LINKED_CHIP for other in sorted(linked[chip.index]) for core in cores[other]}
        for position, (core_id, index) in enumerate(zip(cores[chip.index], chip.cores, strict=True)):
            siblings = {core: SAME_CHIP for core in cores[chip.index] if core != core_id}
            devices.append(
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
                    health=state,
                    health_reason=reason,
                    attributes=_attributes(chip, position),
                )
            )
    return tuple(devices)


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
