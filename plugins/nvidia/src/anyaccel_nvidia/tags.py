"""Accelerator-type tags from the names that NVML gives."""

from __future__ import annotations

import re

from anyaccel.plugin import Device

MIG_PREFIX = "MIG-"
GIB = 1 << 30

_MODEL = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*[0-9][A-Z0-9]*)")
_MEMORY_CLASSES = {"A100": (40, 80)}
"""Families of which Ray knows names with the memory: ``A100-40G``, ``A100-80G``."""


def is_mig(device: Device) -> bool:
    """Whether a device is a MIG device and not a whole GPU."""
    return device.id.startswith(MIG_PREFIX)


def ray_tag(name: str) -> str:
    """The type as Ray 2.60 derives it from a name (``python/ray/_private/accelerators/nvidia_gpu.py``).

    After the first word: words in capitals up to and including the first one that holds a digit, cut at a hyphen.
    Where nothing fits: the whole name without ``NVIDIA``. Blanks become hyphens. What no tag may hold is dropped,
    which Ray does not do (``Orin (nvgpu)``).
    """
    match = _MODEL.match(name)
    found = match[1] if match else ""
    if len(found) <= 1:
        found = re.sub(r"^NVIDIA\s+", "", name)
    return _clean(found)


def tags(device: Device) -> tuple[str, ...]:
    """Tags of a device: Ray's, the exact model, the memory class.

    A MIG device never carries the tag of its whole GPU, so that nobody who asks for an ``A100`` gets a seventh of
    one: its first tag is ``A100-MIG-1g.5gb``.
    """
    name, _, profile = device.model.partition(" MIG ")
    family = ray_tag(name)
    model = _clean(re.sub(r"^(NVIDIA|Tesla)\s+", "", name))
    if is_mig(device):
        suffixes = [f"MIG-{profile}", "MIG"] if profile else ["MIG"]
        found = [f"{family}-{suffixes[0]}", f"{model}-{suffixes[0]}", *suffixes]
    else:
        found = [family, model, *_memory_tags(family, device.memory_bytes), family.removeprefix("GeForce-")]
    return tuple(dict.fromkeys(cleaned for tag in found if (cleaned := _clean(tag)))) or ("NVIDIA",)


def _memory_tags(family: str, memory_bytes: int | None) -> list[str]:
    if memory_bytes is None or family not in _MEMORY_CLASSES:
        return []
    nearest = min(_MEMORY_CLASSES[family], key=lambda size: abs(size * GIB - memory_bytes))
    return [f"{family}-{nearest}G"]


def _clean(text: str) -> str:
    """Make a tag: ``1g.5gb+me`` becomes ``1g.5gb.me``, as in the names of Kubernetes resources."""
    return re.sub(r"[^A-Za-z0-9._-]", "", re.sub(r"\s+", "-", text.strip()).replace("+", ".")).lstrip("._-")
