"""Read and write ``CUDA_VISIBLE_DEVICES`` by CUDA's own rules.

Source: CUDA C++ Programming Guide, "CUDA Environment Variables", and the parser of PyTorch, which was checked against
the driver (pytorch/pytorch#92315). CUDA reads from the left; the first bad entry ends the list; a repeated entry voids
the whole list; the first entry decides whether GPUs, MIG devices or numbers are named; a process sees one MIG device,
the first in the list.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from anyaccel.kit import Fault, FaultError, Ids, Mask, Numbers
from anyaccel.kit.masks import Form
from anyaccel.plugin import Device

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"

_CONTAINER_WORDS = ("all", "none", "void")
_NOTHING = ("", "-1", "NoDevFiles")
"""Values that hide every GPU on purpose."""


def is_mig(device: Device) -> bool:
    """Return True for a MIG device, False for a whole GPU."""
    return device.id.startswith("MIG-")


def nvml_index(device: Device) -> int:
    """Return the index of a device's GPU in NVML, and in CUDA's PCI order."""
    return int(device.attributes.get("nvml_index", device.index))


def _strtoul(entry: str) -> int:
    """Read a number as C's strtoul does, like CUDA: ``1gpu`` is 1."""
    match = re.match(r"[+-]?\d+", entry, re.ASCII)
    return int(match[0]) if match else -1


def _legacy_id(device: Device) -> str:
    """Return the id of a MIG device in drivers before 470.42."""
    gpu, compute = (device.attributes.get(name) for name in ("gpu_instance", "compute_instance"))
    return f"MIG-{device.parent}/{gpu}/{compute}"


def _mask(*forms: Form) -> Mask:
    return Mask(VARIABLE, *forms, malformed="stop", unknown="stop", repeated="void")


GPUS = _mask(Ids(pattern="GPU-.*", shortest=1))
MIGS = _mask(Ids(_legacy_id, pattern="MIG-GPU-.*"), Ids(pattern="MIG-.*", shortest=1))
NUMBERS = _mask(Numbers(nvml_index, pattern=r"[+-]?\d.*", value=_strtoul))


def read(environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device] | None:
    """Return the devices visible in an environment, in CUDA's order; None if nothing is hidden.

    A number of a GPU with MIG on means its first MIG device.

    Raises:
        FaultError: The mask names GPUs of several models by number, and CUDA's order is the default, fastest first:
            only CUDA knows which GPUs are meant.
    """
    value = environ.get(VARIABLE, "").strip()
    known = sorted(devices, key=lambda device: device.index)
    if _repeats(value):
        return []
    if value.startswith("GPU-"):
        return GPUS.read(environ, known)
    if value.startswith("MIG-"):
        return (MIGS.read(environ, known) or [])[:1]
    # Reversed, so that of several MIG devices of a GPU the first one stays.
    numbered = {nvml_index(device): device for device in reversed(known)}
    found = NUMBERS.read(environ, list(numbered.values()))
    if not found:
        return found
    models = sorted({device.model.partition(" MIG ")[0] for device in known})
    if len(models) > 1 and environ.get(ORDER) != PCI_ORDER and len(found) != len(numbered):
        reason = (
            f"{VARIABLE}={environ[VARIABLE]!r} names GPUs by index, and this machine has different ones"
            f" ({', '.join(models)}), which CUDA numbers fastest first, in an order that only CUDA knows"
        )
        raise FaultError(reason, f"set {ORDER}={PCI_ORDER}, or use UUIDs")
    # CUDA takes one MIG device, or whole GPUs; after a whole GPU it skips GPUs with MIG on.
    return found[:1] if is_mig(found[0]) else [device for device in found if not is_mig(device)]


def _repeats(value: str) -> bool:
    """Return True if a well-formed entry comes twice, behind an unknown device or not: ``1,4,1`` on four GPUs.

    CUDA parses the list before it looks for devices: a malformed entry ends the list, a repeated one voids all of it
    (``_parse_visible_devices`` of PyTorch).
    """
    prefix = next((prefix for prefix in ("GPU-", "MIG-") if value.startswith(prefix)), "")
    seen: set[str | int] = set()
    for entry in map(str.strip, value.split(",")):
        name = entry if prefix else _strtoul(entry)
        if name in seen:
            return True
        if not entry.startswith(prefix) or (isinstance(name, int) and name < 0):
            break
        seen.add(name)
    return False


def oddity(value: str, shown: int) -> Fault | None:
    """Return a warning about a mask with fewer visible devices than entries; None for a mask without surprise."""
    entries = [entry.strip() for entry in value.split(",")]
    if value.strip() in _NOTHING:
        return None
    # People copy these words from Docker; CUDA reads them as a bad first entry, and shows no GPU.
    if value.strip() in _CONTAINER_WORDS:
        return Fault(
            f"{VARIABLE}={value} hides every GPU: that word belongs to NVIDIA_VISIBLE_DEVICES", f"unset {VARIABLE}"
        )
    if not shown and len({*entries}) < len(entries):
        return Fault(f"{VARIABLE}={value!r} names a GPU twice, which hides every GPU", f"name each once in {VARIABLE}")
    if shown < len(entries):
        return Fault(
            f"{VARIABLE}={value!r} leaves {shown} of its {len(entries)} entries visible: CUDA stops at the first one"
            " that it does not know, and takes one MIG device",
            f"write ids from 'nvidia-smi -L' into {VARIABLE}, or indexes with {ORDER}={PCI_ORDER}",
        )
    return None
