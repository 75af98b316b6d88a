"""The products: PCI ids, names, accelerator-type tags, vNPU templates, and the machines they come in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from anyaccel.plugin import Device, Product

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of chips.

    Attributes:
        family: Name that CANN packages use: ``910b``, ``310p`` ...
        tag: Accelerator type of a chip of which nothing else is known.
    """

    family: str
    tag: str


ASCEND_310 = Generation(family="310", tag="Ascend310")
ASCEND_310B = Generation(family="310b", tag="Ascend310B")
ASCEND_310P = Generation(family="310p", tag="Ascend310P")
ASCEND_910A = Generation(family="910", tag="Ascend910A")
ASCEND_910B = Generation(family="910b", tag="Ascend910B")
ASCEND_910C = Generation(family="a3", tag="Ascend910C")
ASCEND_950 = Generation(family="950", tag="Ascend950")
ASCEND_910 = Generation(family="", tag="Ascend910")

PCI_DEVICES = {
    0xD100: ASCEND_310,
    0xD105: ASCEND_310B,
    0xD500: ASCEND_310P,
    0xD501: ASCEND_310P,
    0xD801: ASCEND_910A,
    0xD802: ASCEND_910B,
    0xD803: ASCEND_910C,
    0xD804: ASCEND_910B,
    0xD805: ASCEND_910,
    0xD806: ASCEND_950,
    0xD807: ASCEND_950,
    0xD808: ASCEND_950,
}
"""PCI device ids, from devdrv_pci.h of the open CANN driver; pci.ids knows none of them.

The vendor id alone says nothing: it is also on every network card, management console and root port of Huawei.
"""
VIRTUAL_FUNCTION = 0xD805
VENDORS = (0x19E5, 0x20C6, 0x203F, 0x20E9)
"""Huawei, and the partners that sell the same chips under their own vendor id."""

_BY_NAME = (
    (re.compile(r"310B"), ASCEND_310B),
    (re.compile(r"310P"), ASCEND_310P),
    (re.compile(r"310$"), ASCEND_310),
    (re.compile(r"910(A|Pro|Premium)|910B$"), ASCEND_910A),
    (re.compile(r"910B\d"), ASCEND_910B),
    (re.compile(r"910(C|_93)"), ASCEND_910C),
    (re.compile(r"950"), ASCEND_950),
)
_TEMPLATE = re.compile(r"[ -]?(vir\d+\w*)$")
_CHINA = ((re.compile(r"^A2G(\d)"), r"910B\1"), (re.compile(r"^I2(\d?)"), r"310P\1"), (re.compile(r"^MiniD$"), "310"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What the name of a chip says.

    Attributes:
        soc: SoC version as ``acl.get_soc_name()`` spells it, such as ``Ascend910B3``.
        generation: The generation.
        template: vNPU template when the chip is a partition, or empty.
    """

    soc: str
    generation: Generation
    template: str = ""


def identify(name: str, generation: Generation | None = None) -> Chip:
    """Say what chip goes by a name.

    The same text stands for several chips, so what PCI says comes first: a bare ``Ascend910`` is a chip of 2019 or
    one die of an A3, and ``910B`` without a digit is an old 910A, not the A2 family.

    Args:
        name: Name that npu-smi shows: ``910B3``, ``Ascend 910B3``, ``Ascend910``, ``310Pvir04``, ``A2G3`` ...
        generation: What the PCI id says, or None when unknown.
    """
    text = re.sub(r"^((Ascend|Alan)\s*)+", "", name.strip())
    template = match[1] if (match := _TEMPLATE.search(text)) else ""
    text = _TEMPLATE.sub("", text)
    for pattern, replacement in _CHINA:
        text = pattern.sub(replacement, text)
    named = next((candidate for pattern, candidate in _BY_NAME if pattern.match(text)), None)
    known = generation if generation not in (None, ASCEND_910) else None
    generation = known or named or generation or ASCEND_910
    plain = re.fullmatch(r"(310[BP]|910B|950)[0-9A-Za-z-]+", text) is not None and generation is not ASCEND_910A
    soc = f"Ascend{text}" if plain else generation.tag
    return Chip(soc=soc, generation=generation, template=template)


def tags(device: Device) -> tuple[str, ...]:
    """Name the accelerator types of a device.

    The first is what ``acl.get_soc_name()``, and therefore Ray, would say, as far as npu-smi lets us know; on an A3
    it does not show the number in ``Ascend910_9392``, so ``Ascend910C`` comes first there. A vNPU never goes by the
    name of a whole chip.
    """
    attributes = device.attributes
    chip = identify(device.model)
    soc, family = str(attributes.get("soc", chip.soc)), str(attributes.get("family_tag", chip.generation.tag))
    template = str(attributes.get("template", ""))
    if template:
        return tuple(dict.fromkeys((f"{soc}-{template}", f"{family}-{template}", f"{family}-vnpu", "vnpu")))
    raw = re.sub(r"[^A-Za-z0-9._-]", "", device.model)
    stem = re.sub(r"(?<=\d)C$", "", soc)
    variant = re.fullmatch(r"(?:Ascend)?(910(?:Pro[AB]|PremiumA|_93\d+))", raw)
    short = () if raw in ("910B", "Ascend910", "Ascend") or not raw else (raw,)
    return tuple(dict.fromkeys((soc, stem, family, *((f"Ascend{variant[1]}",) if variant else ()), *short)))


def template_memory(template: str, generation_family: str, parent_bytes: int | None) -> int | None:
    """Memory of a vNPU, from its template.

    Names such as ``vir10_3c_16g`` say it. Those of 310P and 910A name AI cores only, and the driver gives each the
    same share of the memory: ``vir04`` on a 310P with 21527 MB shows 10763 MB.

    Returns:
        Bytes, or None when the template does not tell.
    """
    if match := re.search(r"_(\d+)g(_|$)", template):
        return int(match[1]) * GIB
    cores = {"310p": 8, "910": 32}.get(generation_family)
    match = re.match(r"vir(\d+)", template)
    if match is None or cores is None or parent_bytes is None:
        return None
    return parent_bytes // MIB * int(match[1]) // cores * MIB


def _product(
    generation: Generation, model: str, memory_gib: int | None, counts: tuple[int, ...], link: int = 0
) -> Product:
    soc = identify(model, generation).soc
    stem = re.sub(r"(?<=\d)C$", "", soc)
    return Product(
        name=soc,
        model=model,
        memory_bytes=memory_gib * GIB if memory_gib else None,
        counts=counts,
        aliases=tuple(dict.fromkeys(alias for alias in (stem, model) if alias not in (soc, "Ascend910"))),
        id_template="ascend-{pci}",
        node_templates=("/dev/davinci{index}",),
        link=link,
        attributes={"soc": soc, "family": generation.family, "family_tag": generation.tag},
        constants={_constant(tag): tag for tag in (soc, generation.tag)},
    )


def _constant(tag: str) -> str:
    """``HUAWEI_NPU_910B4`` for ``Ascend910B4``, as Ray has it (``ray/util/accelerators/accelerators.py``)."""
    return f"HUAWEI_NPU_{tag.removeprefix('Ascend').replace('-', '_')}"


LINK_STRENGTH = {"SIO": 3, "HCCS": 2, "XLink": 2, "UB": 2, "HCCS_SW": 1}
"""How npu-smi names connections between dies; those through PCIe or the host count as none."""

_HCCS = LINK_STRENGTH["HCCS"]
PRODUCTS = (
    _product(ASCEND_310, "310", 8, (1, 4)),
    _product(ASCEND_310B, "310B1", None, (1,)),
    _product(ASCEND_310P, "310P1", 24, (1, 2, 4, 8)),
    _product(ASCEND_310P, "310P3", 24, (1, 2, 4, 8)),
    _product(ASCEND_910A, "910A", 32, (1, 4, 8), _HCCS),
    _product(ASCEND_910B, "910B1", 64, (1, 8), _HCCS),
    _product(ASCEND_910B, "910B2", 64, (1, 8), _HCCS),
    _product(ASCEND_910B, "910B2C", 64, (8, 16), _HCCS),
    _product(ASCEND_910B, "910B3", 64, (1, 8), _HCCS),
    _product(ASCEND_910B, "910B4", 32, (1, 8), _HCCS),
    _product(ASCEND_910B, "910B4-1", 64, (1, 8), _HCCS),
    _product(ASCEND_910C, "Ascend910", 64, (8, 16), LINK_STRENGTH["HCCS_SW"]),
    _product(ASCEND_950, "Ascend950PR", 128, (1, 8)),
    _product(ASCEND_950, "Ascend950DT", 96, (1, 8)),
)
"""Memory of the 950 as npu-smi 25.7 shows it (131072 and 98304 MB); none for the 310B, which comes in several sizes."""
