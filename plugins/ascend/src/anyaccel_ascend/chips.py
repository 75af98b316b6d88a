"""The meaning of a chip's name and PCI id: SoC version, accelerator types, template of a partition."""

from __future__ import annotations

import re
from typing import NamedTuple

from anyaccel.kit import Catalog, Entry

CATALOG = Catalog(__file__)
"""Products that are not listed are families; the listed products have their keys."""
GIB, MIB = 1 << 30, 1 << 20
_TEMPLATE = re.compile(r"[ -]?(vir\d+\w*)$")
_CHINA = ((r"^A2G(\d)", r"910B\1"), (r"^I2(\d?)", r"310P\1"), (r"^MiniD$", "310"))
"""Names of the Chinese market."""
_AI_CORES = {"310p": 8, "910": 32}
"""AI cores of the families whose templates name cores alone."""


class Chip(NamedTuple):
    """The facts in a chip's name."""

    soc: str  # as acl.get_soc_name() spells it, such as Ascend910B3
    family: str  # as CANN packages name it; empty when unknown
    tag: str  # of the family
    template: str  # of the vNPU, when the chip is a partition


def identify(name: str, told: Entry | None = None) -> Chip:
    """Identify the chip behind a name.

    Several chips share a name, so PCI decides first: a bare ``Ascend910`` is a chip of 2019 or a die of an A3.

    Args:
        name: Name in npu-smi: ``910B3``, ``Ascend 910B3``, ``Ascend910``, ``310Pvir04``, ``A2G3`` ...
        told: The family by PCI id, or None if unknown.
    """
    # npu-smi prints the brand twice in some releases.
    text = re.sub(r"^((Ascend|Alan)\s*)+", "", name.strip())
    template = match[1] if (match := _TEMPLATE.search(text)) else ""
    text = _TEMPLATE.sub("", text)
    for pattern, replacement in _CHINA:
        text = re.sub(pattern, replacement, text)
    named = told if told and told.key else CATALOG.by_name(text)
    family = next(entry for entry in CATALOG.entries if entry.key == (named.key if named else ""))
    soc = f"Ascend{text}" if re.fullmatch(family.facts.get("socs", "(?!)"), text, re.ASCII) else family.model
    return Chip(soc, family.key, family.model, template)


def template_memory(template: str, family: str, whole: int | None) -> int | None:
    """Return the memory of a vNPU in bytes, from its template and the memory of the chip; None if unknown.

    Names such as ``vir10_3c_16g`` contain the size. Names of 310P and 910A contain AI cores only, and the driver
    assigns the same share of memory: ``vir04`` on a 310P with 21527 MB shows 10763 MB.
    """
    if match := re.search(r"_(\d+)g(_|$)", template):
        return int(match[1]) * GIB
    match, cores = re.match(r"vir(\d+)", template), _AI_CORES.get(family)
    return whole // MIB * int(match[1]) // cores * MIB if match and cores and whole else None
