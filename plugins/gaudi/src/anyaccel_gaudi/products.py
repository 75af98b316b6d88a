"""What is known about Gaudi products without a machine: PCI ids, memory, tags, cloud instances."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.plugin import Device, Product

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A board as its PCI device id names it.

    Attributes:
        model: Product name, as hl-smi prints it for the family.
        generation: ``GAUDI``, ``GAUDI2`` or ``GAUDI3``: what follows ``Intel-`` in Ray's type.
        memory_bytes: Nominal device memory.
        baseboard: Whether it sits on a baseboard that joins up to eight of its kind all to all (OAM).
    """

    model: str
    generation: str
    memory_bytes: int
    baseboard: bool = True


MEMORY: Mapping[str, int] = {"GAUDI": 32 * GIB, "GAUDI2": 96 * GIB, "GAUDI3": 128 * GIB}

_GAUDI = Board(model="HL-205", generation="GAUDI", memory_bytes=MEMORY["GAUDI"])
_GAUDI2 = Board(model="HL-225", generation="GAUDI2", memory_bytes=MEMORY["GAUDI2"])
_GAUDI3 = Board(model="HL-325", generation="GAUDI3", memory_bytes=MEMORY["GAUDI3"])
_GAUDI3_BASE = Board(model="HL-328", generation="GAUDI3", memory_bytes=MEMORY["GAUDI3"])
_GAUDI3_CARD = Board(model="HL-338", generation="GAUDI3", memory_bytes=MEMORY["GAUDI3"], baseboard=False)

BOARDS: Mapping[int, Board] = {
    0x1000: _GAUDI,
    0x1001: _GAUDI,
    0x1010: _GAUDI,  # secured firmware
    0x1011: _GAUDI,
    0x1020: _GAUDI2,
    0x1060: _GAUDI3,
    0x1061: _GAUDI3_BASE,
    0x1062: _GAUDI3_BASE,
    0x1063: _GAUDI3_CARD,
}
"""Boards by PCI device id (pciutils/pciids; intel/intel-resource-drivers-for-kubernetes pkg/gaudi/device).

0x1030 is left out on purpose: the resource driver calls it Gaudi3 and the habanalabs installer Gaudi2, so its
memory has to decide.
"""

OTHER_CHIPS: Mapping[int, str] = {0x0001: "HL-1000 (Goya)", 0x0030: "Greco"}
"""Inference chips of the same PCI vendor that no current framework drives."""

INSTANCE_TYPES: Mapping[str, Mapping[str, int]] = {
    "GAUDI": {"dl1.24xlarge": 8},
    "GAUDI3": {"gx3d-160x1792x8gaudi3": 8},
}
"""Cloud instance types and their number of devices by generation: Amazon EC2 DL1; IBM Cloud VPC gx3d profiles."""


def generation_by_memory(memory_bytes: int | None) -> str | None:
    """Tell the generation from the size of the memory, for the PCI id on which the sources disagree."""
    return next((generation for generation, size in MEMORY.items() if size == memory_bytes), None)


def generation_by_name(model: str) -> str | None:
    """Tell the generation from a product name: HL-200 to HL-219 are Gaudi, HL-22x Gaudi2, HL-3xx Gaudi3.

    lablup/all-smi files HL-200 and HL-205 under Gaudi2; they are first-generation boards.
    """
    match = re.match(r"HL-([23])(\d)\d", model)
    if match is None:
        return None
    if match[1] == "3":
        return "GAUDI3"
    return "GAUDI" if match[2] in "01" else "GAUDI2"


def tags(device: Device) -> tuple[str, ...]:
    """Name the accelerator types of a device.

    The first is Ray's: ``Intel-`` and the name that PyTorch gives the device (ray-project/ray,
    ``_private/accelerators/hpu.py``; its only public constant is ``Intel-GAUDI``). Ray has to acquire the device to
    learn it (ray-project/ray#59477); here the PCI id tells.
    """
    generation = device.attributes.get("generation") or generation_by_name(device.model)
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", device.model).strip("-") or "HPU"
    if not generation:
        return (model,)
    name = str(generation)
    return (f"Intel-{name}", name, name.capitalize(), model)


def _product(generation: str, model: str) -> Product:
    return Product(
        name=f"Intel-{generation}",
        model=model,
        memory_bytes=MEMORY[generation],
        counts=(1, 2, 4, 8),
        aliases=(generation, generation.capitalize(), model),
        id_template="gaudi-{pci}",
        node_templates=("/dev/accel/accel{index}", "/dev/accel/accel_controlD{index}"),
        link=1,
        attributes={"generation": generation, "baseboard": True},
        constants={f"INTEL_{generation}": f"Intel-{generation}"},
        instance_types=INSTANCE_TYPES.get(generation, {}),
    )


PRODUCTS = (_product("GAUDI", "HL-205"), _product("GAUDI2", "HL-225"), _product("GAUDI3", "HL-325"))
