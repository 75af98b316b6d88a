"""Find the NeuronCores of this machine.

Device nodes say which chips this process may open; ``neuron-ls`` says the most about them, the driver's sysfs and the
PCI ids enough where the tool is missing or broken. The unit that is given out is the logical core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from anyaccel.plugin import Detected, DeviceNode, PciFunction, ProbeContext

from anyaccel_neuron import neuron_ls, sysfs
from anyaccel_neuron.cores import Chip, devices
from anyaccel_neuron.products import PCI_FAMILIES, Family, family_of_instance

PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"
"""Instance type, as the firmware of EC2 instances on Nitro says it."""

REBUILD_DRIVER = (
    "install the headers of the running kernel, reinstall the package aws-neuronx-dkms, then run 'sudo modprobe neuron'"
)


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
        devices=devices(ctx, chips),
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
