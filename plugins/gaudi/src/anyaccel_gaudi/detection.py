"""What Gaudi devices are on a machine: PCI and sysfs first, the vendor's tool only where they leave a question open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from anyaccel.plugin import Detected, Device, Health, PciFunction, ProbeContext

from anyaccel_gaudi import smi, sysfs
from anyaccel_gaudi.environment import NO_MODULE
from anyaccel_gaudi.modules import UNKNOWN, links
from anyaccel_gaudi.products import BOARDS, MEMORY, OTHER_CHIPS, generation_by_memory, generation_by_name

GAUDINET = "/etc/habanalabs/gaudinet.json"
"""Network addresses of the scale-out ports, where the machine has them."""

_MIB = 1 << 20
_BOARD_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the files of one PCI function say.

    Attributes:
        function: The PCI function.
        node: Number under which the driver registered it, or None.
        module: Module id, or None when the files do not say.
        health: Health as far as the files tell.
        reason: Why it cannot be used; the first reason that was met.
        partial: Whether some of its files could not be read.
    """

    function: PciFunction
    node: sysfs.Node | None = None
    module: int | None = None
    health: Health = Health.UNKNOWN
    reason: str = ""
    partial: bool = False


def detect(ctx: ProbeContext) -> Detected | None:
    """Find the Gaudi devices of a machine.

    The count comes from PCI, so that a device which the driver dropped after a failed reset stays listed. A device
    is never opened: that would take it away from the job that uses it.
    """
    functions = sysfs.functions(ctx)
    version = sysfs.driver_version(ctx)
    if not functions:
        return Detected(driver_version=version) if ctx.exists(sysfs.MODULE) else None
    others = [function for function in functions if function.device in OTHER_CHIPS]
    notes = [f"{OTHER_CHIPS[chip.device]} at {chip.address} is no Gaudi and left out" for chip in others]
    found = [look(ctx, function) for function in functions if function.device not in OTHER_CHIPS]
    rows, trouble = _ask_tool(ctx, found)
    if trouble:
        notes.append(trouble)
    found = _settle_modules([_module_from_tool(reading, rows) for reading in found])
    gaudinet = ctx.exists(GAUDINET)
    devices = [_device(ctx, reading, rows.get(reading.function.address), gaudinet=gaudinet) for reading in found]
    return Detected(
        devices=tuple(_connect(_number(devices))),
        driver_version=version,
        partial=any(reading.partial for reading in found),
        notes=tuple(notes),
    )


def look(ctx: ProbeContext, function: PciFunction) -> Reading:
    """Read what sysfs and ``/dev`` say about one PCI function; a fault here concerns this device alone."""
    if function.driver != sysfs.DRIVER:
        return Reading(function=function, health=Health.UNHEALTHY, reason=_unbound(function.driver))
    node, module, health = None, None, Health.UNKNOWN
    fault = reason = ""
    try:
        node = sysfs.node_of(ctx, function.address)
        module, fault = _module_from_sysfs(ctx, function.address, node)
        health, reason = sysfs.health(sysfs.attribute(ctx, function.address, node, "status"))
    except OSError as error:
        fault = fault or sysfs.unreadable(error)
    reason = fault or reason or _closed(ctx, node)
    return Reading(
        function=function,
        node=node,
        module=module,
        health=Health.UNHEALTHY if reason else health,
        reason=reason,
        partial=bool(fault),
    )


def _module_from_sysfs(ctx: ProbeContext, address: str, node: sysfs.Node | None) -> tuple[int | None, str]:
    """Read the module id; None when this driver does not show it. The second value says what is wrong with it."""
    try:
        text = sysfs.attribute(ctx, address, node, "module_id")
    except OSError as error:
        return None, sysfs.unreadable(error)
    if text is None:
        return None, ""
    if text.isdecimal() and int(text) != NO_MODULE:
        return int(text), ""
    return None, f"module_id in sysfs must be the number of a slot (got {text!r}); reload the habanalabs driver"


def _unbound(driver: str | None) -> str:
    if driver is None:
        return "no driver is bound to it; install the habanalabs driver and run 'modprobe habanalabs'"
    return f"it is bound to the driver {driver!r}, which keeps it for another use; bind it to habanalabs"


def _closed(ctx: ProbeContext, node: sysfs.Node | None) -> str:
    """Say why the compute node cannot be opened, as far as that shows without opening it."""
    if node is None:
        return "the driver has not registered it; look for habanalabs in 'dmesg', then reload the driver"
    entry = ctx.node(node.compute)
    if entry is None:
        return (
            f"its device node {node.compute} is missing; pass it to this container, or look for habanalabs in 'dmesg'"
            " where it vanished after a reset"
        )
    if not (entry.readable and entry.writable):
        return f"you may not open {node.compute}; ask the administrator for read and write permission on it"
    return ""


def _ask_tool(ctx: ProbeContext, found: Iterable[Reading]) -> tuple[dict[str, smi.Row], str]:
    """Ask hl-smi where sysfs left a question open: a module id, or a PCI id that names no product for certain.

    Returns:
        Rows by PCI address, and one sentence about what went wrong. What the tool cannot say stays unknown, and
        nothing that the files said is lost with it.
    """
    bound = [reading for reading in found if reading.function.driver == sysfs.DRIVER]
    if all(reading.module is not None and reading.function.device in BOARDS for reading in bound):
        return {}, ""
    try:
        rows = smi.query(ctx, smi.IDENTITY)
        for row in (rows or {}).values():
            smi.whole(row, "module_id")
            smi.whole(row, "memory.total")
    except (RuntimeError, ValueError) as error:
        return {}, str(error)
    if rows is None:
        return {}, "sysfs leaves a module id or a product open, and hl-smi is not on the PATH to tell"
    return rows, ""


def _module_from_tool(reading: Reading, rows: Mapping[str, smi.Row]) -> Reading:
    row = rows.get(reading.function.address)
    if reading.module is not None or row is None or reading.function.driver != sysfs.DRIVER:
        return reading
    module = smi.whole(row, "module_id")
    return replace(reading, module=None if module == NO_MODULE else module)


def _settle_modules(found: list[Reading]) -> list[Reading]:
    """Mark the devices that no variable can name: those without a module id, and those that share one."""
    holders = Counter(reading.module for reading in found if reading.module is not None)
    return [
        reading
        if reading.module is not None and holders[reading.module] == 1
        else replace(
            reading,
            module=None,
            health=Health.UNHEALTHY,
            reason=reading.reason or _nameless(reading.module, holders),
            partial=reading.partial or reading.function.driver == sysfs.DRIVER,
        )
        for reading in found
    ]


def _nameless(module: int | None, holders: Counter[int]) -> str:
    fact = "its module id is unknown"
    if module is not None:
        fact = f"its module id {module} is that of {holders[module]} devices"
    return (
        f"{fact}, so no process can be confined to it; make 'hl-smi -Q bus_id,module_id -f csv' work, or use a kernel"
        " (6.8 or later) or driver that shows each device's module_id in sysfs"
    )


def _device(ctx: ProbeContext, reading: Reading, row: smi.Row | None, *, gaudinet: bool) -> Device:
    function, node = reading.function, reading.node
    board = BOARDS.get(function.device)
    row = row or {}
    mebibytes = smi.whole(row, "memory.total") if row else None
    memory = mebibytes * _MIB if mebibytes else board.memory_bytes if board else None
    model = row.get("name") or (board.model if board else f"Habana-{function.device:04x}")
    generation = board.generation if board else generation_by_name(model) or generation_by_memory(memory)
    facts = {
        "accel": node.minor if node else None,
        "generation": generation,
        "baseboard": board.baseboard if board else None,
        "serial": row.get("serial"),
        "uuid": row.get("uuid"),
        "gaudinet": GAUDINET if gaudinet else None,
        UNKNOWN: True if reading.module is None else None,
    }
    return Device(
        id=f"gaudi-{function.address}",
        index=-1 if reading.module is None else reading.module,
        model=model,
        memory_bytes=memory or MEMORY.get(generation or ""),
        pci_bus_id=function.address,
        numa_node=function.numa_node,
        nodes=_nodes(ctx, function.address, node),
        health=reading.health,
        health_reason=reading.reason,
        attributes={name: value for name, value in facts.items() if value is not None},
    )


def _nodes(ctx: ProbeContext, address: str, node: sysfs.Node | None) -> tuple[str, ...]:
    """The compute node first, then the control node and the network ports that are there."""
    if node is None:
        return ()
    others = [node.control, *sysfs.uverbs(ctx, address)]
    return (node.compute, *(path for path in others if ctx.exists(path)))


def _number(devices: Iterable[Device]) -> list[Device]:
    """Give devices without a module id numbers that no module has, so that indexes stay unique."""
    devices = sorted(devices, key=lambda device: (device.index < 0, device.index, device.id))
    free = max([_BOARD_SIZE, *(device.index + 1 for device in devices)])
    nameless = [device for device in devices if device.index < 0]
    numbered = [replace(device, index=free + position) for position, device in enumerate(nameless)]
    return devices[: len(devices) - len(nameless)] + numbered


def _connect(devices: list[Device]) -> list[Device]:
    """Fill in the links among the devices of the baseboard.

    Cards in PCIe slots are joined only where somebody plugged a bridge across four of them, which no file tells, so
    nothing is claimed for them.
    """
    joined = {
        device.index: device.id
        for device in devices
        if device.attributes.get("baseboard") and not device.attributes.get(UNKNOWN)
    }
    ranks = links(joined)
    return [
        replace(device, links={joined[other]: rank for other, rank in ranks[device.index].items()})
        if joined.get(device.index) == device.id
        else device
        for device in devices
    ]
