"""vNPUs: partitions of a chip with AI cores and memory of their own, kept apart by the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from anyaccel.plugin import Device, Health, ProbeContext

from anyaccel_ascend import files, npu_smi
from anyaccel_ascend.products import template_memory


def split(ctx: ProbeContext, devices: Sequence[Device]) -> list[Device]:
    """Add the vNPUs that this host offers to its containers, and take the chips that they are on out of use.

    A vNPU is ``/dev/vdavinci<N>`` here and ``/dev/davinci<N>`` in the container that it is given to, where the
    runtime numbers it like a whole NPU.
    """
    by_phy = {device.attributes["phy_id"]: device for device in devices if "phy_id" in device.attributes}
    numbers: dict[str, list[int]] = {}
    for number in files.nodes(ctx, "vdavinci"):
        parent = by_phy.get((number - files.FIRST_VNPU) // files.VNPUS_PER_DEVICE)
        if parent is not None and number >= files.FIRST_VNPU:
            numbers.setdefault(parent.id, []).append(number)
    found: list[Device] = []
    first = max((device.index for device in devices), default=-1) + 1
    for parent in devices:
        mine = numbers.get(parent.id, [])
        templates = _templates(ctx, parent) if mine else {}
        for number in mine:
            found.append(_vnpu(parent, number, first + len(found), templates.get(number, "")))
    return [_occupied(device, numbers[device.id]) if device.id in numbers else device for device in devices] + found


def _templates(ctx: ProbeContext, parent: Device) -> Mapping[int, str]:
    """Templates of a chip's vNPUs; npu-smi tells them to root alone."""
    where = ("-i", str(parent.attributes["card"]), "-c", str(parent.attributes["chip"]))
    try:
        answer = npu_smi.ask(ctx, "Vnpu ID", "info", "-t", "info-vnpu", *where)
    except (npu_smi.ToolFailureError, ValueError):
        return {}
    return npu_smi.parse_vnpus(answer.stdout) if answer else {}


def _vnpu(parent: Device, number: int, index: int, template: str) -> Device:
    kept = ("control_nodes", "host_paths", "soc", "family", "family_tag", "card", "chip")
    family = str(parent.attributes["family"])
    return Device(
        id=f"{parent.id}-vnpu{number}",
        index=index,
        model=f"{parent.model} {template or 'vNPU'}",
        memory_bytes=template_memory(template, family, parent.memory_bytes),
        pci_bus_id=parent.pci_bus_id,
        numa_node=parent.numa_node,
        parent=parent.id,
        nodes=(f"/dev/vdavinci{number}",),
        health=parent.health,
        health_reason=parent.health_reason,
        attributes={
            **{name: value for name, value in parent.attributes.items() if name in kept},
            "template": template or "vnpu",
            "vnpu_id": number,
            "addressable": False,
        },
    )


def _occupied(device: Device, numbers: Sequence[int]) -> Device:
    """A chip that has vNPUs can no longer be used whole."""
    reason = (
        f"it is split into the vNPUs {', '.join(map(str, numbers))}; ask for those, or remove them with 'npu-smi set -t"
        f" destroy-vnpu -i {device.attributes['card']} -c {device.attributes['chip']} -v {numbers[0]}'"
    )
    return replace(
        device,
        health=Health.UNHEALTHY,
        health_reason=device.health_reason or reason,
        attributes={**device.attributes, "split": True},
    )
