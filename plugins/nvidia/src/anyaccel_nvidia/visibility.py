"""Which GPUs ``CUDA_VISIBLE_DEVICES`` leaves visible, by CUDA's own rules.

Source: CUDA C++ Programming Guide, "CUDA Environment Variables", and the parser of PyTorch, which was checked against
the driver (pytorch/pytorch#92315).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from anyaccel.plugin import Device

from .tags import is_mig

MASK = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"

_CONTAINER_WORDS = ("all", "none", "void")
_NOTHING = ("", "-1", "NoDevFiles")
"""Values that hide every GPU on purpose."""
_NUMBER = re.compile(r"[+-]?[0-9]+")
_LEGACY_MIG = re.compile(r"MIG-(GPU-[^/]+)/([0-9]+)/([0-9]+)")


def nvml_index(device: Device) -> int:
    """Index that NVML, and CUDA in PCI order, give the GPU of a device."""
    return int(device.attributes.get("nvml_index", device.index))


def in_cuda(device: Device) -> bool:
    """Whether CUDA numbers the device: not when another kernel driver has it."""
    return "driver" not in device.attributes


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Ids of the devices that an environment leaves visible, in CUDA's order; None when nothing is hidden.

    The list is read from the left; the first bad entry ends it; an entry that comes twice voids all of it. One
    process sees one MIG device, the first that it names.

    Raises:
        ValueError: When GPUs of several models are named by index and CUDA's order is its default, fastest first:
            then nobody can tell which ones are meant.
    """
    value = environ.get(MASK)
    if value is None:
        return None
    known = sorted((device for device in devices if in_cuda(device)), key=lambda device: device.index)
    entries = [entry.strip() for entry in value.split(",")]
    first = entries[0]
    if first.startswith("GPU-"):
        return _read(entries, lambda entry: _by_prefix(entry, [d for d in known if d.id.startswith("GPU-")], "GPU-"))
    if first.startswith("MIG-"):
        return _read(entries, lambda entry: _by_mig_id(entry, known))[:1]
    chosen = _read(entries, lambda entry: _by_number(entry, known))
    _check_order(environ, value, chosen, known)
    if chosen and chosen[0].startswith("MIG-"):
        return chosen[:1]
    return [found for found in chosen if not found.startswith("MIG-")]


def complaint(environ: Mapping[str, str], devices: Sequence[Device]) -> tuple[str, str] | None:
    """What is odd about a mask that CUDA takes without a word, and what to write instead; None when nothing is.

    Raises:
        ValueError: As :func:`visible` does.
    """
    value = environ.get(MASK, "").strip()
    if value in _NOTHING:
        return None
    ids = visible(environ, devices) or []
    entries = [entry.strip() for entry in value.split(",")]
    if value in _CONTAINER_WORDS:
        return f"{MASK}={value} hides every GPU: that word belongs to NVIDIA_VISIBLE_DEVICES.", f"unset {MASK}"
    if not ids and len(set(entries)) < len(entries):
        return f"{MASK}={value!r} names a GPU twice, which hides every GPU.", f"name each GPU once in {MASK}"
    if len(ids) < len(entries):
        seen = f"{MASK}={value!r} leaves {len(ids)} of its {len(entries)} entries visible"
        rule = "CUDA stops at the first one that it does not know, and takes one MIG device."
        return f"{seen}: {rule}", f"write ids from 'nvidia-smi -L' into {MASK}, or indexes with {ORDER}=PCI_BUS_ID"
    return None


def _read(entries: Sequence[str], find: Callable[[str], Device | None]) -> list[str]:
    found: list[str] = []
    for entry in entries:
        device = find(entry)
        if device is None:
            break
        if device.id in found:
            return []
        found.append(device.id)
    return found


def _by_number(entry: str, devices: Sequence[Device]) -> Device | None:
    """CUDA reads a number as C's strtoul does: ``1gpu`` is 1. On a GPU with MIG it means the first MIG device."""
    match = _NUMBER.match(entry)
    number = int(match[0]) if match else -1
    return next((device for device in devices if nvml_index(device) == number), None)


def _by_prefix(entry: str, devices: Sequence[Device], kind: str) -> Device | None:
    """A UUID may be cut short as long as it fits one device only."""
    found = [device for device in devices if entry.startswith(kind) and device.id.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _by_mig_id(entry: str, devices: Sequence[Device]) -> Device | None:
    legacy = _LEGACY_MIG.fullmatch(entry)
    if legacy is None:
        return _by_prefix(entry, [device for device in devices if is_mig(device)], "MIG-")
    wanted = (legacy[1], int(legacy[2]), int(legacy[3]))
    for device in devices:
        own = (device.parent, device.attributes.get("gpu_instance"), device.attributes.get("compute_instance"))
        if own == wanted:
            return device
    return None


def _check_order(environ: Mapping[str, str], value: str, chosen: Sequence[str], devices: Sequence[Device]) -> None:
    models = {device.model.partition(" MIG ")[0] for device in devices}
    gpus = {nvml_index(device) for device in devices}
    if environ.get(ORDER) == PCI_ORDER or len(models) <= 1 or not chosen or len(chosen) == len(gpus):
        return
    raise ValueError(
        f"{MASK}={value!r} names GPUs by index, and this machine has different ones ({', '.join(sorted(models))}),"
        f" which CUDA numbers fastest first, in an order that only CUDA knows; set {ORDER}={PCI_ORDER}, or use UUIDs"
    )
