"""What is known about Intel's GPUs without having one: PCI ids, names, memory, tiles.

PCI ids and driver names follow intel/compute-runtime ``shared/source/dll/devices/devices_base.inl`` and pciutils'
``pci.ids``. Where other tables disagree (intel-resource-drivers calls 0bd6 a Max 1450) these two are right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.plugin import Device, Product

GIB = 1 << 30
XE_LINK = 66
"""Strength of a direct Xe Link with 16 lanes, as :mod:`anyaccel_intel.topology` ranks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One product by the PCI ids that it answers to.

    Attributes:
        tag: Canonical accelerator-type tag.
        name: Name that the compute driver reports.
        ids: PCI device ids.
        memory_gib: Memory of one card in GiB; several numbers where the product was sold with several sizes.
        tiles: Tiles on one card.
        aliases: Further tags. The one that ends like ``-A770-Graphics`` is what Ray makes of the driver's name.
        integrated: Whether it is part of a processor and has no memory of its own.
        counts: Numbers of cards that one machine has.
    """

    tag: str
    name: str
    ids: tuple[int, ...]
    memory_gib: tuple[int, ...] = ()
    tiles: int = 1
    aliases: tuple[str, ...] = ()
    integrated: bool = False
    counts: tuple[int, ...] = (1, 2, 4)


def _max(number: str, ids: tuple[int, ...], memory: int, tiles: int) -> Model:
    return Model(
        tag=f"Intel-GPU-Max-{number}",
        name=f"Intel(R) Data Center GPU Max {number}",
        ids=ids,
        memory_gib=(memory,),
        tiles=tiles,
        aliases=(f"Max-{number}",),
        counts=(1, 2, 4, 6, 8),
    )


def _arc(name: str, ids: tuple[int, ...], *memory: int) -> Model:
    short = name.replace(" ", "-")
    return Model(
        tag=f"Intel-GPU-Arc-{short}",
        name=f"Intel(R) Arc(TM) {name} Graphics",
        ids=ids,
        memory_gib=memory,
        aliases=(f"Intel-GPU-{short.rpartition('-')[2]}-Graphics", f"Arc-{short}"),
    )


def _integrated(short: str, name: str, ids: tuple[int, ...]) -> Model:
    return Model(tag=f"Intel-iGPU-{short}", name=name, ids=ids, integrated=True, counts=(1,))


MODELS: tuple[Model, ...] = (
    _max("1550", (0x0BD5, 0x0BD6), 128, 2),
    _max("1550VG", (0x0BD4,), 128, 2),
    _max("1450", (0x0B69,), 128, 2),
    _max("1350", (0x0BD7, 0x0BD8), 96, 2),
    _max("1100", (0x0BD9, 0x0BDA, 0x0BDB), 48, 1),
    _max("1100C", (0x0B6E,), 48, 1),
    Model(
        tag="Intel-GPU-Flex-170",
        name="Intel(R) Data Center GPU Flex 170",
        ids=(0x56C0,),
        memory_gib=(16,),
        aliases=("Flex-170",),
        counts=(1, 2, 4),
    ),
    Model(
        tag="Intel-GPU-Flex-140",
        name="Intel(R) Data Center GPU Flex 140",
        ids=(0x56C1,),
        memory_gib=(6,),
        aliases=("Flex-140",),
        counts=(2, 4),  # two GPUs on one board
    ),
    _arc("A770", (0x56A0,), 8, 16),
    _arc("A750", (0x56A1,), 8),
    _arc("A580", (0x56A2,), 8),
    _arc("A380", (0x56A5,), 6),
    _arc("A310", (0x56A6,), 4),
    Model(
        tag="Intel-GPU-Arc-Pro-A50",  # one PCI id for both boards, and one name
        name="Intel(R) Arc(TM) Pro A40/A50 Graphics",
        ids=(0x56B1,),
        memory_gib=(6,),
        aliases=("Intel-GPU-Arc-Pro-A40", "Arc-Pro-A50", "Arc-Pro-A40"),
    ),
    _arc("Pro A60", (0x56B3,), 12),
    _arc("B580", (0xE20B, 0xE209), 12),
    _arc("B570", (0xE20C,), 10),
    _arc("Pro B60", (0xE211,), 24),
    _arc("Pro B50", (0xE212,), 16),
    _arc("Pro B65", (0xE222,), 32),
    _arc("Pro B70", (0xE223,), 32),
    # Panther Lake: a name like a card's, and no card (intel/compute-runtime#949).
    _integrated("Arc-B390", "Intel(R) Arc(TM) B390 GPU", tuple(range(0xB080, 0xB088))),
    _integrated("Arc", "Intel(R) Arc(TM) Graphics", (0x64A0, 0x7D55, 0x7D51)),
    _integrated("UHD-770", "Intel(R) UHD Graphics 770", (0x4680, 0x4690, 0xA780)),
    _integrated("Iris-Xe", "Intel(R) Iris(R) Xe Graphics", (0xA7A0, 0x46A6)),
)

BY_ID: Mapping[int, Model] = {pci_id: model for model in MODELS for pci_id in model.ids}
BY_NAME: Mapping[str, Model] = {model.name: model for model in MODELS}


def model_of(device: Device) -> Model | None:
    """The product that a device is, by its PCI id first, or None when it is not known."""
    return BY_ID.get(int(str(device.attributes.get("device_id", "0")), 16)) or BY_NAME.get(device.model)


def tags(device: Device) -> tuple[str, ...]:
    """Accelerator-type tags of a device, the canonical one first.

    Data Center GPUs bear the tag that Ray gives them. For Arc, Ray takes the last two words of the driver's name
    (``Intel-GPU-A770-Graphics``); that string is an alias here.
    """
    model = model_of(device)
    integrated = device.attributes.get("integrated") is True
    if model is None:
        found = [_unknown(device, "Intel-iGPU" if integrated else "Intel-GPU")]
    else:
        found = [model.tag, *model.aliases]
        if len(model.memory_gib) > 1 and device.memory_bytes:
            size = min(model.memory_gib, key=lambda gib: abs(gib * GIB - device.memory_bytes))  # type: ignore[operator]
            found.append(f"{model.tag}-{size}GB")
        if device.attributes.get("unit") == "tile":
            found.append(f"{model.tag}-tile")
    return tuple(dict.fromkeys([*found, *(["Intel-iGPU"] if integrated else [])]))


def _unknown(device: Device, family: str) -> str:
    """Tag of a product that is newer than this table: its name without decoration, else its PCI id."""
    bare = re.sub(r"\((R|TM)\)|\[0x[0-9a-f]+\]|Intel|Graphics|Data Center GPU", " ", device.model)
    words = re.findall(r"[A-Za-z0-9._]+", bare)
    return "-".join([family, *(words or [str(device.attributes.get("device_id", "unknown"))])])


def products() -> tuple[Product, ...]:
    """All products as simulated machines have them: Max cards with two tiles show their tiles, as by default."""
    return tuple(_product(model) for model in MODELS)


def _product(model: Model) -> Product:
    attributes: dict[str, str | int | bool] = {
        "device_id": f"0x{model.ids[0]:04x}",
        "integrated": model.integrated,
        "unit": "tile" if model.tiles > 1 else "card",
    }
    if model.tiles > 1:
        attributes["tiles"] = model.tiles
    return Product(
        name=model.tag,
        model=model.name,
        memory_bytes=max(model.memory_gib) * GIB // model.tiles if model.memory_gib else None,
        counts=tuple(count * model.tiles for count in model.counts),
        aliases=model.aliases,
        id_template="intel-{pci}",
        node_templates=("/dev/dri/renderD{index}",),
        link=XE_LINK if "Max" in model.tag else 0,
        attributes=attributes,
        constants={f"INTEL_{alias.upper().replace('-', '_')}": model.tag for alias in model.aliases if "Max-" in alias},
    )
