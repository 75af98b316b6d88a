"""Detection: the kernel's files first, then npu-smi, which alone knows how the runtime numbers the NPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from anyaccel.plugin import Detected, Device, Health, ProbeContext

from anyaccel_ascend import fallback, files, npu_smi, partitions
from anyaccel_ascend.fallback import Machine, device_id
from anyaccel_ascend.npu_smi import MappedChip, ToolFailureError
from anyaccel_ascend.npu_table import ShownChip, Table, parse_table
from anyaccel_ascend.products import ASCEND_910C, LINK_STRENGTH, identify


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
        return replace(fallback.without_nodes(machine), driver_version=version)
    try:
        mapping = npu_smi.ask(ctx, "NPU ID", "info", "-m")
        shown = npu_smi.ask(ctx, "Bus-Id", "info") if mapping else None
    except ToolFailureError as failure:
        return replace(fallback.failed(machine, str(failure)), driver_version=version)
    if mapping is None or shown is None:
        return replace(fallback.by_files(ctx, machine), driver_version=version)
    table = parse_table(shown.stdout)
    chips, unavailable = npu_smi.parse_mapping(mapping.stdout)
    found = _by_tool(ctx, machine, chips, table)
    notes = list(found.notes)
    if unavailable:
        notes.append(f"Cards that npu-smi calls unavailable: {unavailable}. See dmesg, and reset them.")
    if table.warning:
        notes.append(f"npu-smi warns: {table.warning}. Reinstall the Ascend driver.")
    partial = found.partial or table.partial or bool(unavailable or mapping.returncode or shown.returncode)
    return replace(found, driver_version=version or table.version, partial=partial, notes=tuple(notes))


def _by_tool(ctx: ProbeContext, machine: Machine, mapping: Sequence[MappedChip], table: Table) -> Detected:
    numbered = _logic_ids(mapping)
    shown = {(chip.card, chip.chip): chip for chip in table.chips}
    phys = _phys(ctx, machine, numbered, shown)
    claimed = {row.bus_id for chip in numbered if (row := shown.get((chip.card, chip.chip)))}
    unclaimed = [address for address in machine.functions if address not in claimed]
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
        devices += [fallback.lost(machine, function, len(devices) + place) for place, function in enumerate(lost)]
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
