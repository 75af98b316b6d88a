"""Detection: the kernel's files first, then npu-smi, which alone knows how the runtime numbers the NPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anyaccel.plugin import Detected, Device, Health, PciFunction, ProbeContext

from anyaccel_ascend import files, npu_smi, partitions
from anyaccel_ascend.npu_smi import MappedChip, ShownChip, Table, ToolFailureError
from anyaccel_ascend.products import ASCEND_310P, ASCEND_910C, LINK_STRENGTH, PCI_DEVICES, Generation, identify


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the files show.

    Attributes:
        functions: PCI functions by address.
        nodes: Numbers in ``/dev/davinci<N>``.
        container: Whether we are in a container.
        common: Attributes that all devices get.
    """

    functions: dict[str, PciFunction]
    nodes: list[int]
    container: bool
    common: dict[str, str]

    def generation(self, address: str | None = None) -> Generation | None:
        """Generation of a function, or the one that all functions have; None when unknown."""
        function = self.functions.get(address or "")
        if function:
            return PCI_DEVICES[function.device]
        known = {PCI_DEVICES[function.device] for function in self.functions.values()}
        return known.pop() if len(known) == 1 else None


def detect(ctx: ProbeContext) -> Detected | None:
    """Find the NPUs of a machine.

    Raises:
        ValueError: When npu-smi prints what cannot be understood: no inventory is better than a wrong one.
    """
    functions = files.functions(ctx)
    nodes = files.nodes(ctx)
    version = files.driver_version(ctx)
    if not functions and not nodes:
        return Detected(driver_version=version) if files.driver_present(ctx) else None
    machine = Machine(
        functions={function.address: function for function in functions},
        nodes=nodes,
        container=files.in_container(ctx),
        common={
            "control_nodes": ",".join(path for path in files.CONTROL_NODES if ctx.exists(path)),
            "host_paths": ",".join(path for path in files.HOST_PATHS if ctx.exists(path)),
        },
    )
    if not nodes:
        return replace(_without_nodes(machine), driver_version=version)
    try:
        mapping = npu_smi.ask(ctx, "NPU ID", "info", "-m")
        shown = npu_smi.ask(ctx, "Bus-Id", "info") if mapping else None
    except ToolFailureError as failure:
        return replace(_failed(machine, str(failure)), driver_version=version)
    if mapping is None or shown is None:
        return replace(_by_files(ctx, machine), driver_version=version)
    table = npu_smi.parse_table(shown.stdout)
    chips, unavailable = npu_smi.parse_mapping(mapping.stdout)
    found = _by_tool(ctx, machine, chips, table)
    notes = list(found.notes)
    if unavailable:
        notes.append(f"Cards that npu-smi calls unavailable: {unavailable}. See dmesg, and reset them.")
    if table.warning:
        notes.append(f"npu-smi warns: {table.warning}. Reinstall the Ascend driver.")
    partial = found.partial or table.partial or bool(unavailable or mapping.returncode or shown.returncode)
    return replace(found, driver_version=version or table.version, partial=partial, notes=tuple(notes))


def device_id(address: str | None, chip: int, number: int, generation: Generation | None) -> str:
    """Identity of a chip: its PCI address, with the chip on it where a function can carry two.

    Without PCI, as on pods with a unified bus, the number of its node takes its place: unlike the runtime's number
    it stays when another card is lost, and is the same inside a container.
    """
    if address is None:
        return f"ascend-davinci{number}"
    return f"ascend-{address}-{chip}" if generation is ASCEND_310P else f"ascend-{address}"


def _by_tool(ctx: ProbeContext, machine: Machine, mapping: Sequence[MappedChip], table: Table) -> Detected:
    numbered = _logic_ids(mapping)
    shown = {(chip.card, chip.chip): chip for chip in table.chips}
    phys = _phys(ctx, machine, numbered, shown)
    unclaimed = [address for address in machine.functions if address not in {chip.bus_id for chip in table.chips}]
    unread = [chip for chip in numbered if (chip.card, chip.chip) not in shown]
    alone = unclaimed[0] if len(unclaimed) == len(unread) == 1 and not machine.container else None
    devices = []
    for chip in numbered:
        row = shown.get((chip.card, chip.chip))
        number = phys.get((chip.card, chip.chip))
        devices.append(_device(ctx, machine, chip, row, number=number, address=row.bus_id if row else alone))
    _refuse_duplicates(devices)
    devices = _linked(ctx, devices)
    if not machine.container and len(unclaimed) > len(unread):
        lost = [machine.functions[address] for address in unclaimed]
        devices += [_lost(machine, function, len(devices) + place) for place, function in enumerate(lost)]
    devices = partitions.split(ctx, devices)
    notes = [f"{device.id}: {device.attributes['warning']}." for device in devices if "warning" in device.attributes]
    return Detected(devices=tuple(devices), partial=bool(unread), notes=tuple(notes))


def _logic_ids(mapping: Sequence[MappedChip]) -> list[MappedChip]:
    """Give each chip its logic id; releases that do not print it number the chips in the order of physical ids."""
    if all(chip.logic_id is not None for chip in mapping):
        return sorted(mapping, key=lambda chip: chip.logic_id or 0)
    ordered = sorted(mapping, key=lambda chip: (chip.phy_id if chip.phy_id is not None else chip.card, chip.chip))
    return [replace(chip, logic_id=place) for place, chip in enumerate(ordered)]


def _phys(
    ctx: ProbeContext, machine: Machine, chips: Sequence[MappedChip], shown: dict[tuple[int, int], ShownChip]
) -> dict[tuple[int, int], int]:
    """Physical numbers by card and chip: printed, else read from sysfs, else from the nodes that are here.

    The driver numbers what a container may use by ascending physical number (uda_init_ns_node_dev in its source), so
    as many nodes as chips are in the same order. Otherwise the physical number stays unknown: a guess would open
    somebody else's node.
    """
    found: dict[tuple[int, int], int] = {}
    for place, chip in enumerate(chips):
        key = (chip.card, chip.chip)
        row = shown.get(key)
        number = chip.phy_id if chip.phy_id is not None else row.phy_id if row else None
        if number is None and row and row.bus_id and len(machine.nodes) != len(chips):
            number = files.kernel_number(ctx, row.bus_id)
        if number is None and len(machine.nodes) == len(chips):
            number = machine.nodes[place]
        if number is not None:
            found[key] = number
    return found


def _device(
    ctx: ProbeContext,
    machine: Machine,
    chip: MappedChip,
    row: ShownChip | None,
    *,
    number: int | None,
    address: str | None,
) -> Device:
    function = machine.functions.get(address or "")
    # Only A3 prints physical ids under the name of a chip of 2019.
    hint = ASCEND_910C if chip.phy_id is not None and chip.name == "Ascend910" else None
    known = identify(row.name if row else chip.name, machine.generation(address) or hint)
    index = chip.logic_id or 0
    name = device_id(address, chip.chip, number if number is not None else index, known.generation)
    reasons = [files.node_fault(ctx, number)] if number is not None else []
    if row is None:
        reasons.append("npu-smi lists it and cannot read it; see dmesg, and reset it with 'npu-smi set -t reset'")
    else:
        reasons.append(row.fault)
    reason = next((text for text in reasons if text), "")
    partition = number is not None and number >= files.FIRST_VNPU
    parent = name if known.template or partition else None
    attributes: dict[str, str | int | float | bool] = {
        **machine.common,
        "soc": known.soc,
        "family": known.generation.family,
        "family_tag": known.generation.tag,
        "card": chip.card,
        "chip": chip.chip,
    }
    if number is not None:
        attributes["phy_id"] = number
    if known.template:
        attributes["template"] = known.template
    if row and row.health == "Warning":
        attributes["warning"] = "npu-smi reports a minor fault (Warning); it can still be used"
    return Device(
        id=f"{name}-vnpu{number if partition else ''}" if parent else name,
        index=index,
        model=row.name if row else chip.name,
        memory_bytes=row.memory_bytes if row else None,
        pci_bus_id=address,
        numa_node=function.numa_node if function else None,
        parent=parent,
        nodes=(f"/dev/davinci{number}",) if number in machine.nodes else (),
        health=Health.UNHEALTHY if reason else Health.HEALTHY,
        health_reason=reason,
        attributes=attributes,
    )


def _refuse_duplicates(devices: Sequence[Device]) -> None:
    for name, count in Counter(device.id for device in devices).items():
        if count > 1:
            raise ValueError(
                f"'npu-smi info' must show each chip at an address of its own (got {name!r} {count} times); restart the"
                " driver"
            )


def _linked(ctx: ProbeContext, devices: Sequence[Device]) -> list[Device]:
    """Add the connections, where npu-smi tells them; without them the NPUs work all the same."""
    try:
        answer = npu_smi.ask(ctx, "Legend", "info", "-t", "topo") if len(devices) > 1 else None
    except (ToolFailureError, ValueError):
        return list(devices)
    matrix = npu_smi.parse_topology(answer.stdout) if answer else {}
    names = {f"NPU{device.index}": device.id for device in devices}
    names |= {f"Phy-ID{device.attributes['phy_id']}": device.id for device in devices if "phy_id" in device.attributes}
    links = {
        names[row]: {
            names[column]: LINK_STRENGTH[kind]
            for column, kind in kinds.items()
            if column in names and kind in LINK_STRENGTH
        }
        for row, kinds in matrix.items()
        if row in names
    }
    return [replace(device, links=links.get(device.id, {})) for device in devices]


def _unusable(machine: Machine, function: PciFunction, index: int, reason: str) -> Device:
    generation = PCI_DEVICES[function.device]
    return Device(
        id=device_id(function.address, 0, 0, generation),
        index=index,
        model=generation.tag,
        pci_bus_id=function.address,
        numa_node=function.numa_node,
        health=Health.UNHEALTHY,
        health_reason=reason,
        attributes={
            **machine.common,
            "soc": generation.tag,
            "family": generation.family,
            "family_tag": generation.tag,
            "addressable": False,
        },
    )


def _lost(machine: Machine, function: PciFunction, index: int) -> Device:
    reason = "it is on the PCI bus and the driver has lost it; see dmesg, and power-cycle the machine"
    if function.driver == "vfio-pci":
        reason = "it is bound to vfio-pci, for a virtual machine; unbind it there to use it here"
    return _unusable(machine, function, index, reason)


def _without_nodes(machine: Machine) -> Detected:
    """NPUs on the PCI bus without a single node: not mounted into a container, or without a driver."""
    count = len(machine.functions)
    if machine.container:
        note = (
            f"The {count} NPUs of this host are not mounted into this container; start it with --runtime=ascend and"
            " -e ASCEND_VISIBLE_DEVICES=0, or with --device /dev/davinci0 and the control nodes."
        )
        return Detected(notes=(note,))
    reason = "the Ascend driver is not loaded; install it, or see dmesg"
    devices = [
        _lost(machine, function, index)
        if function.driver == "vfio-pci"
        else _unusable(machine, function, index, reason)
        for index, function in enumerate(machine.functions.values())
    ]
    return Detected(devices=tuple(devices))


def _failed(machine: Machine, reason: str) -> Detected:
    """NPUs of which npu-smi says that it cannot tell: listed, and not given out."""
    devices = [_unusable(machine, function, index, reason) for index, function in enumerate(machine.functions.values())]
    if machine.container or not devices:  # PCI shows the whole host there
        devices = [
            replace(_from_node(machine, number, index), health=Health.UNHEALTHY, health_reason=reason)
            for index, number in enumerate(machine.nodes)
        ]
    return Detected(devices=tuple(devices), partial=True)


def _by_files(ctx: ProbeContext, machine: Machine) -> Detected:
    """NPUs of a machine without npu-smi: as many as there are nodes, numbered in the order of the nodes.

    Which node belongs to which PCI function is known to root alone, or where there is one function; elsewhere the
    node has to serve as identity.
    """
    addresses = {
        number: address for address in machine.functions if (number := files.kernel_number(ctx, address)) is not None
    }
    if len(machine.functions) == len(machine.nodes) == 1:
        addresses = {machine.nodes[0]: next(iter(machine.functions))}
    devices = []
    for index, number in enumerate(machine.nodes):
        device = _from_node(machine, number, index, addresses.get(number))
        fault = files.node_fault(ctx, number)
        devices.append(replace(device, health=Health.UNHEALTHY, health_reason=fault) if fault else device)
    note = (
        "npu-smi is not here: memory, health and exact models are unknown."
        " Add its directory to PATH, or mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container."
    )
    return Detected(devices=tuple(devices), partial=True, notes=(note,))


def _from_node(machine: Machine, number: int, index: int, address: str | None = None) -> Device:
    generation = machine.generation(address)
    known = identify(generation.tag if generation else "", generation)
    function = machine.functions.get(address or "")
    partition = number >= files.FIRST_VNPU
    return Device(
        id=device_id(address, 0, number, known.generation),
        index=index,
        model=known.generation.tag,
        pci_bus_id=address,
        numa_node=function.numa_node if function else None,
        parent=f"ascend-davinci{(number - files.FIRST_VNPU) // files.VNPUS_PER_DEVICE}" if partition else None,
        nodes=(f"/dev/davinci{number}",),
        attributes={
            **machine.common,
            "soc": known.soc,
            "family": known.generation.family,
            "family_tag": known.generation.tag,
            "phy_id": number,
        },
    )
