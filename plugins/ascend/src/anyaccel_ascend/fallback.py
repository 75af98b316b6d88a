"""NPUs as far as the kernel's files alone show them: without npu-smi, or where it says that it cannot tell."""

from __future__ import annotations

from dataclasses import dataclass, replace

from anyaccel.plugin import Detected, Device, Health, PciFunction, ProbeContext

from anyaccel_ascend import files
from anyaccel_ascend.products import ASCEND_310P, PCI_DEVICES, Generation, identify


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


def device_id(address: str | None, chip: int, number: int, generation: Generation | None) -> str:
    """Identity of a chip: its PCI address, with the chip on it where a function can carry two.

    Without PCI, as on pods with a unified bus, the number of its node takes its place: unlike the runtime's number
    it stays when another card is lost, and is the same inside a container.
    """
    if address is None:
        return f"ascend-davinci{number}"
    return f"ascend-{address}-{chip}" if generation is ASCEND_310P else f"ascend-{address}"


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


def lost(machine: Machine, function: PciFunction, index: int) -> Device:
    """A card that is on the PCI bus and that npu-smi does not list."""
    reason = "it is on the PCI bus and the driver has lost it; see dmesg, and power-cycle the machine"
    if function.driver == "vfio-pci":
        reason = "it is bound to vfio-pci, for a virtual machine; unbind it there to use it here"
    return _unusable(machine, function, index, reason)


def without_nodes(machine: Machine) -> Detected:
    """NPUs on the PCI bus without a single node: not mounted into a container, or without a driver."""
    count = len(machine.functions)
    if machine.container:
        note = (
            f"The {count} NPUs of this host are not mounted into this container. Start it with --runtime=ascend and"
            " -e ASCEND_VISIBLE_DEVICES=0, or with --device /dev/davinci0 and the control nodes."
        )
        return Detected(notes=(note,))
    reason = "the Ascend driver is not loaded; install it, or see dmesg"
    devices = [
        lost(machine, function, index) if function.driver == "vfio-pci" else _unusable(machine, function, index, reason)
        for index, function in enumerate(machine.functions.values())
    ]
    return Detected(devices=tuple(devices))


def failed(machine: Machine, reason: str) -> Detected:
    """NPUs of which npu-smi says that it cannot tell: listed, and not given out."""
    devices = [_unusable(machine, function, index, reason) for index, function in enumerate(machine.functions.values())]
    if machine.container or not devices:  # PCI shows the whole host there
        devices = [
            replace(_from_node(machine, number, index), health=Health.UNHEALTHY, health_reason=reason)
            for index, number in enumerate(machine.nodes)
        ]
    return Detected(devices=tuple(devices), partial=True)


def by_files(ctx: ProbeContext, machine: Machine) -> Detected:
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
