"""What chip a name and a PCI id mean: its SoC version, its accelerator types, the template of a partition."""

from __future__ import annotations

import re
from typing import NamedTuple

from anyaccel.kit import Catalog, Entry

CATALOG = Catalog(__file__)
"""Its products that are not listed are the families, whose keys the others have."""
GIB, MIB = 1 << 30, 1 << 20
_TEMPLATE = re.compile(r"[ -]?(vir\d+\w*)$")
_CHINA = ((r"^A2G(\d)", r"910B\1"), (r"^I2(\d?)", r"310P\1"), (r"^MiniD$", "310"))
"""Names of the Chinese market."""
_AI_CORES = {"310p": 8, "910": 32}
"""Of the families whose templates name nothing else."""


class Chip(NamedTuple):
    """What the name of a chip says."""

    soc: str  # as acl.get_soc_name() spells it, such as Ascend910B3
    family: str  # as CANN packages name it; empty when unknown
    tag: str  # of the family
    template: str  # of the vNPU, when the chip is a partition


def identify(name: str, told: Entry | None = None) -> Chip:
    """Say what chip goes by a name.

    The same text stands for several chips, so what PCI says comes first: a bare ``Ascend910`` is a chip of 2019 or
    one die of an A3.

    Args:
        name: Name that npu-smi shows: ``910B3``, ``Ascend 910B3``, ``Ascend910``, ``310Pvir04``, ``A2G3`` ...
        told: The family that the PCI id says, or None when unknown.
    """
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
    """Memory of a vNPU in bytes, from its template and the memory of the chip; None when the template does not tell.

    Names such as ``vir10_3c_16g`` say it. Those of 310P and 910A name AI cores only, and the driver gives each the
    same share of the memory: ``vir04`` on a 310P with 21527 MB shows 10763 MB.
    """
    if match := re.search(r"_(\d+)g(_|$)", template):
        return int(match[1]) * GIB
    match, cores = re.match(r"vir(\d+)", template), _AI_CORES.get(family)
    return whole // MIB * int(match[1]) // cores * MIB if match and cores and whole else None
