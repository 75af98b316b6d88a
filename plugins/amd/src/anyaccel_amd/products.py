"""What AMD sells: PCI ids, accelerator types, gfx names and memory.

Names by PCI id and revision are those of libdrm's ``amdgpu.ids``. Where Ray knows the id, the tag is the string that
its ``python/ray/_private/accelerators/amd_gpu.py`` derives from it. Memory is what the driver reports where a capture
was at hand (MI25, MI300X), else the figure of AMD's data sheets; a dash where it depends on the host or the edition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from anyaccel.plugin import Device, Product

GIB = 1 << 30
XGMI = 985
"""Strength of one XGMI hop: :func:`anyaccel_amd.kfd.strength` of the kernel's weight 15."""

Attribute = str | int | float | bool

# PCI id [revision] and, behind a slash, the id of the virtual function | tag behind AMD- | model behind AMD |
# gfx | memory in GiB or bytes | devices per machine | aliases. Without a revision a line holds for all that no other
# line names. Lines without a gfx were never supported by ROCm: they have a tag and are no product.
TABLE = """
6860        | Radeon-Instinct-MI25     | Radeon Instinct MI25     | gfx900  | 17163091968  | 1 2 4 8 | MI25
66a1        | Instinct-MI50            | Instinct MI60 / MI50     | gfx906  | 32           | 1 2 4 8 | MI50 MI60
66a1 06     | Radeon-Pro-VII           | Radeon Pro VII           | gfx906  | 16           | 1 2     | Pro-VII
738c        | Instinct-MI100           | Instinct MI100           | gfx908  | 32           | 1 2 4 8 | MI100
7408        | Instinct-MI250X          | Instinct MI250X          | gfx90a  | 64           | 2 4 8   | MI250X
740c        | Instinct-MI250X-MI250    | Instinct MI250X / MI250  | gfx90a  | 64           | 2 4 8   | MI250
740f        | Instinct-MI210           | Instinct MI210           | gfx90a  | 64           | 1 2 4 8 | MI210
74a0        | Instinct-MI300A          | Instinct MI300A          | gfx942  | 128          | 1 2 4   | MI300A
74a1/74b5   | Instinct-MI300X-OAM      | Instinct MI300X          | gfx942  | 206141652992 | 1 2 4 8 | MI300X
74a2/74b6   | Instinct-MI308X-OAM      | Instinct MI308X          | gfx942  | 192          | 1 2 4 8 | MI308X
74a5/74b9   | Instinct-MI325X-OAM      | Instinct MI325X          | gfx942  | 256          | 1 2 4 8 | MI325X
74a8/74bc   | Instinct-MI308X-HF       | Instinct MI308X HF       | gfx942  | 192          | 1 2 4 8 | MI308X-HF
74a9/74bd   | Instinct-MI300X-HF       | Instinct MI300X HF       | gfx942  | 192          | 1 2 4 8 | MI300X-HF
75a0/75b0   | Instinct-MI350X-OAM      | Instinct MI350X          | gfx950  | 288          | 1 2 4 8 | MI350X
75a3/75b3   | Instinct-MI355X-OAM      | Instinct MI355X          | gfx950  | 288          | 1 2 4 8 | MI355X
7448        | Radeon-Pro-W7900         | Radeon Pro W7900         | gfx1100 | 48           | 1 2 4   | W7900
744a        | Radeon-Pro-W7900-DS      | Radeon Pro W7900 Dual Slot | gfx1100 | 48         | 1 2 4   | W7900-DS
744b        | Radeon-Pro-W7900D        | Radeon Pro W7900D        | gfx1100 | 48           | 1 2 4   | W7900D
7449        | Radeon-Pro-W7800-48GB    | Radeon Pro W7800 48GB    | gfx1100 | 48           | 1 2 4   | W7800-48GB
745e        | Radeon-Pro-W7800         | Radeon Pro W7800         | gfx1100 | 32           | 1 2 4   | W7800
744c c8     | Radeon-RX-7900-XTX       | Radeon RX 7900 XTX       | gfx1100 | 24           | 1 2 4   | RX-7900-XTX
744c cc     | Radeon-RX-7900-XT        | Radeon RX 7900 XT        | gfx1100 | 20           | 1 2 4   | RX-7900-XT
744c ce     | Radeon-RX-7900-GRE       | Radeon RX 7900 GRE       | gfx1100 | 16           | 1 2 4   | RX-7900-GRE
744c cf     | Radeon-RX-7900M          | Radeon RX 7900M          | gfx1100 | 16           | 1       | RX-7900M
7550 c0     | Radeon-RX-9070-XT        | Radeon RX 9070 XT        | gfx1201 | 16           | 1 2 4   | RX-9070-XT
7550 c2     | Radeon-RX-9070-GRE       | Radeon RX 9070 GRE       | gfx1201 | -            | 1 2 4   | RX-9070-GRE
7550 c3     | Radeon-RX-9070           | Radeon RX 9070           | gfx1201 | 16           | 1 2 4   | RX-9070
7551 c0     | Radeon-AI-PRO-R9700      | Radeon AI PRO R9700      | gfx1201 | 32           | 1 2 4   | R9700
7551 c1     | Radeon-AI-PRO-R9700S     | Radeon AI PRO R9700S     | gfx1201 | 32           | 1 2 4   | R9700S
7551 c8     | Radeon-AI-PRO-R9600D     | Radeon AI PRO R9600D     | gfx1201 | -            | 1 2 4   | R9600D
7590 c0     | Radeon-RX-9060-XT        | Radeon RX 9060 XT        | gfx1200 | -            | 1 2 4   | RX-9060-XT
7590 c7     | Radeon-RX-9060           | Radeon RX 9060           | gfx1200 | 8            | 1 2 4   | RX-9060
73a1        | Radeon-Pro-V620          | Radeon Pro V620          | gfx1030 | 32           | 1 2 4   | V620
73bf c0     | Radeon-RX-6900-XT        | Radeon RX 6900 XT        | gfx1030 | 16           | 1 2 4   | RX-6900-XT
73bf c1     | Radeon-RX-6800-XT        | Radeon RX 6800 XT        | gfx1030 | 16           | 1 2 4   | RX-6800-XT
73bf c3     | Radeon-RX-6800           | Radeon RX 6800           | gfx1030 | 16           | 1 2 4   | RX-6800
73df c0     | Radeon-RX-6750-XT        | Radeon RX 6750 XT        | gfx1031 | 12           | 1 2 4   | RX-6750-XT
7460/7461   | Radeon-Pro-V710          | Radeon Pro V710          | gfx1101 | 28           | 1 2 4   | V710
1586 c1     | Radeon-8060S             | Radeon 8060S             | gfx1151 | -            | 1       | Radeon-8060S
1586 c2     | Radeon-8050S             | Radeon 8050S             | gfx1151 | -            | 1       | Radeon-8050S
150e c1     | Radeon-890M              | Radeon 890M              | gfx1150 | -            | 1       | Radeon-890M
164e d8     | Radeon-610M              | Radeon 610M              | gfx1036 | -            | 1       | Radeon-610M
6798        | Radeon-R9-200-HD-7900    | Radeon R9 200 / HD 7900  |         | -            | 1       |
6799        | Radeon-HD-7900           | Radeon HD 7900           |         | -            | 1       |
679a        | Radeon-HD-7900           | Radeon HD 7900           |         | -            | 1       |
679b        | Radeon-HD-7900           | Radeon HD 7900           |         | -            | 1       |
"""

INTEGRATED_GFX = frozenset(
    {"gfx902", "gfx909", "gfx90c", "gfx1033", "gfx1035", "gfx1036", "gfx1037", "gfx1103"}
    | {"gfx1150", "gfx1151", "gfx1152", "gfx1153"}
)
"""Graphics cores that only exist inside CPUs. The MI300A is an APU too, and is not meant."""

FULLY_LINKED = ("MI250", "MI300", "MI308X", "MI325X", "MI350X", "MI355X")
"""Products whose devices XGMI connects on every machine; on others a bridge is optional."""

ALSO: Mapping[str, tuple[str, ...]] = {
    "AMD-Radeon-Pro-VII": ("AMD-Instinct-MI50",),
    "AMD-Instinct-MI250X-MI250": ("MI250X",),
}
"""Further tags that are other products' names. Ray looks at the id alone and takes a Radeon Pro VII for an MI50: the
true name comes first, Ray's stays usable. 740c is the id of MI250 and of MI250X."""

INSTANCE_TYPES: Mapping[str, Mapping[str, int]] = {
    "AMD-Instinct-MI300X-OAM": {"Standard_ND96is_MI300X_v5": 8, "Standard_ND96isr_MI300X_v5": 8},
}
"""Cloud instance types whose shape is public (Azure's list of sizes), with their number of devices, by tag."""

CONSTANTS: Mapping[str, str] = {
    "AMD_INSTINCT_MI100": "AMD-Instinct-MI100",
    "AMD_INSTINCT_MI210": "AMD-Instinct-MI210",
    "AMD_INSTINCT_MI250": "AMD-Instinct-MI250X-MI250",
    "AMD_INSTINCT_MI250x": "AMD-Instinct-MI250X",
    "AMD_INSTINCT_MI300A": "AMD-Instinct-MI300A",
    "AMD_INSTINCT_MI300x": "AMD-Instinct-MI300X-OAM",
    "AMD_INSTINCT_MI300x_HF": "AMD-Instinct-MI300X-HF",
    "AMD_INSTINCT_MI308x": "AMD-Instinct-MI308X",
    "AMD_INSTINCT_MI325x": "AMD-Instinct-MI325X-OAM",
    "AMD_INSTINCT_MI350x": "AMD-Instinct-MI350X-OAM",
    "AMD_INSTINCT_MI355x": "AMD-Instinct-MI355X-OAM",
    "AMD_RADEON_R9_200_HD_7900": "AMD-Radeon-R9-200-HD-7900",
    "AMD_RADEON_HD_7900": "AMD-Radeon-HD-7900",
}
"""Ray's names for these tags (``ray/util/accelerators/accelerators.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One line of the table."""

    device_id: int
    revision: int | None
    vf_id: int | None
    tag: str
    model: str
    gfx: str
    memory_bytes: int | None
    counts: tuple[int, ...]
    aliases: tuple[str, ...]


@cache
def chips() -> tuple[Chip, ...]:
    """Every line of the table."""
    return tuple(_chips())


def _chips() -> Iterator[Chip]:
    for line in TABLE.strip().splitlines():
        ids, tag, model, gfx, memory, counts, aliases = (column.strip() for column in line.split("|"))
        device_id, _, vf_id = ids.partition("/")
        device_id, _, revision = device_id.partition(" ")
        size = None if memory == "-" else int(memory)
        yield Chip(
            device_id=int(device_id, 16),
            revision=int(revision, 16) if revision else None,
            vf_id=int(vf_id, 16) if vf_id else None,
            tag=f"AMD-{tag}",
            model=f"AMD {model}",
            gfx=gfx,
            memory_bytes=size * GIB if size is not None and size < GIB else size,
            counts=tuple(int(count) for count in counts.split()),
            aliases=(*aliases.split(), *([f"AMD-{tag[:-4]}"] if tag.endswith("-OAM") else [])),
        )


def chip(device_id: int, revision: int | None) -> Chip | None:
    """Find the product of a PCI device id and revision; that of the card for a virtual function.

    Returns:
        None for an id that is unknown, or stands for several products and the revision for none of them.
    """
    rows = [row for row in chips() if device_id in (row.device_id, row.vf_id)]
    exact = [row for row in rows if row.revision is not None and row.revision == revision]
    return next(iter(exact or [row for row in rows if row.revision is None]), None)


def is_virtual_function(device_id: int) -> bool:
    """Whether a PCI device id is that of a virtual function in an SR-IOV guest."""
    return any(row.vf_id == device_id for row in chips())


def tags(device: Device) -> tuple[str, ...]:
    """Name the accelerator types of a device.

    The product, its aliases, the gfx name (what binaries are compiled for) and, for a partition, its profile such as
    ``cpx_nps4``. A product that the table does not know is ``AMD-<device id>``.
    """
    device_id, revision = _hex(device.attributes, "device_id"), _hex(device.attributes, "revision")
    known = chip(device_id, revision) if device_id is not None else None
    names: list[str] = []
    if known is not None:
        names += [known.tag, *known.aliases, *ALSO.get(known.tag, ())]
    elif device_id is not None:
        names.append(f"AMD-{device_id:04x}")
    names.append(str(device.attributes.get("gfx", "")))
    modes = [str(device.attributes[name]) for name in ("compute_mode", "memory_mode") if name in device.attributes]
    if device.parent is not None and modes:
        names.append("_".join(modes))
    return tuple(dict.fromkeys(name for name in names if name)) or ("AMD-GPU",)


def _hex(attributes: Mapping[str, Attribute], name: str) -> int | None:
    value = attributes.get(name)
    return int(value, 16) if isinstance(value, str) else None


def products() -> tuple[Product, ...]:
    """The products that ROCm runs on, and those that Ray has names for, for simulation and completion."""
    named = {row.tag: row for row in reversed(chips()) if row.tag in CONSTANTS.values()}
    return tuple(_product(row) for row in chips() if row.gfx or named.get(row.tag) is row)


def _product(row: Chip) -> Product:
    attributes: dict[str, Attribute] = {"device_id": f"0x{row.device_id:04x}"}
    if row.gfx:
        attributes["gfx"] = row.gfx
    if row.revision is not None:
        attributes["revision"] = f"0x{row.revision:02x}"
    if row.gfx in INTEGRATED_GFX:
        attributes["integrated"] = True
    return Product(
        name=row.tag,
        model=row.model,
        memory_bytes=row.memory_bytes,
        counts=row.counts,
        aliases=row.aliases,
        id_template="amd-{pci}",
        # Render nodes begin at 128 and have gaps, which no template can say. No real machine has these names.
        node_templates=("/dev/kfd", "/dev/dri/renderD{index}"),
        link=XGMI if any(name in row.tag for name in FULLY_LINKED) else 0,
        attributes=attributes,
        constants={name: tag for name, tag in CONSTANTS.items() if tag in (row.tag, *row.aliases)},
        instance_types=INSTANCE_TYPES.get(row.tag, {}),
    )
