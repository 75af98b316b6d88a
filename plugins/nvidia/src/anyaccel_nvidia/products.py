"""GPUs that people ask for by name: names as NVML reports them, memory as NVML reports it or as it is sold."""

from __future__ import annotations

from collections.abc import Mapping

from anyaccel.plugin import Product

_GIB = 1 << 30
_MIB = 1 << 20

NVLINK, PCIE = 1, 0
"""Strength between any two GPUs of one machine: connected by NVLink (or NVSwitch), or through the host."""

_ONE, _TWO, _FOUR, _EIGHT = (1,), (1, 2), (1, 2, 4), (1, 2, 4, 8)
_SMALL = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")


def _family(name: str) -> dict[str, int]:
    """The sizes of the EC2 families g5, g6 and g6e, which are cut alike."""
    return (
        {f"{name}.{size}": 1 for size in _SMALL}
        | {f"{name}.{size}": 4 for size in ("12xlarge", "24xlarge")}
        | {f"{name}.48xlarge": 8}
    )


_TESLA = ("V100", "P100", "T4", "P4", "K80", "A10G", "A100")
"""Tags that Ray has constants for under the old name of the line (``ray/util/accelerators/accelerators.py``)."""

INSTANCE_TYPES: Mapping[str, Mapping[str, int]] = {
    "NVIDIA B300 SXM6 AC": {"p6-b300.48xlarge": 8},
    "NVIDIA B200": {"p6-b200.48xlarge": 8, "a4-highgpu-8g": 8},
    "NVIDIA GB200": {"a4x-highgpu-4g": 4},
    "NVIDIA H200": {"p5e.48xlarge": 8, "p5en.48xlarge": 8, "a3-ultragpu-8g": 8, "Standard_ND96isr_H200_v5": 8},
    "NVIDIA H100 80GB HBM3": {
        "p5.4xlarge": 1,
        "p5.48xlarge": 8,
        **{f"a3-highgpu-{count}g": count for count in _EIGHT},
        "a3-edgegpu-8g": 8,
        "a3-megagpu-8g": 8,
        "Standard_ND96isr_H100_v5": 8,
    },
    "NVIDIA H100 NVL": {"Standard_NC40ads_H100_v5": 1, "Standard_NC80adis_H100_v5": 2},
    "NVIDIA A100-SXM4-80GB": {
        "p4de.24xlarge": 8,
        **{f"a2-ultragpu-{count}g": count for count in _EIGHT},
        "Standard_ND96amsr_A100_v4": 8,
    },
    "NVIDIA A100-SXM4-40GB": {
        "p4d.24xlarge": 8,
        **{f"a2-highgpu-{count}g": count for count in _EIGHT},
        "a2-megagpu-16g": 16,
        "Standard_ND96asr_v4": 8,
    },
    "NVIDIA A100 80GB PCIe": {
        "Standard_NC24ads_A100_v4": 1,
        "Standard_NC48ads_A100_v4": 2,
        "Standard_NC96ads_A100_v4": 4,
    },
    "NVIDIA L40S": _family("g6e"),
    "NVIDIA L4": {
        **_family("g6"),
        "gr6.4xlarge": 1,
        "gr6.8xlarge": 1,
        **{f"g2-standard-{cpus}": 1 for cpus in (4, 8, 12, 16, 32)},
        "g2-standard-24": 2,
        "g2-standard-48": 4,
        "g2-standard-96": 8,
    },
    "NVIDIA A10G": _family("g5"),
    "Tesla T4": {
        **{f"g4dn.{size}": 1 for size in _SMALL},
        "g4dn.12xlarge": 4,
        "g4dn.metal": 8,
        **{f"Standard_NC{cpus}as_T4_v3": 1 for cpus in (4, 8, 16)},
        "Standard_NC64as_T4_v3": 4,
    },
    "Tesla V100-SXM2-16GB": {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8},
    "Tesla V100-SXM2-32GB": {"p3dn.24xlarge": 8},
    "Tesla K80": {"p2.xlarge": 1, "p2.8xlarge": 8, "p2.16xlarge": 16},
}
"""Instance types of Amazon EC2, Google Compute Engine and Azure with their number of GPUs, by model: as their public
lists have them, also where a machine has more GPUs than are common."""


def _gpu(
    name: str,
    model: str,
    memory_bytes: int,
    counts: tuple[int, ...] = _EIGHT,
    *,
    link: int = PCIE,
    aliases: tuple[str, ...] = (),
) -> Product:
    return Product(
        name=name,
        model=model,
        memory_bytes=memory_bytes,
        counts=counts,
        aliases=aliases,
        id_template="GPU-{uuid}",
        node_templates=("/dev/nvidia{index}",),
        link=link,
        constants=_constants(name, aliases),
        instance_types=INSTANCE_TYPES.get(model, {}),
    )


def _constants(name: str, aliases: tuple[str, ...]) -> dict[str, str]:
    """``NVIDIA_H100``, the old ``NVIDIA_TESLA_T4``, and ``NVIDIA_A100_40G`` where Ray has a name for the size."""
    tags = [name, *(alias for alias in aliases if alias in ("A100-40G", "A100-80G"))]
    constants = {f"NVIDIA_{tag.upper().replace('-', '_')}": tag for tag in tags}
    return constants | ({f"NVIDIA_TESLA_{name}": name} if name in _TESLA else {})


def _mig(family: str, card: str, profile: str, memory_mib: int, most: int) -> Product:
    return Product(
        name=f"{family}-MIG-{profile}",
        model=f"{card} MIG {profile}",
        memory_bytes=memory_mib * _MIB,
        counts=tuple(range(1, most + 1)),
        id_template="MIG-{uuid}",
        node_templates=("/dev/nvidia0",),
        attributes={"mig_profile": profile},
    )


_CARDS = (
    # Hopper and Blackwell. Products of one name are told apart by their aliases; the first is meant without one.
    _gpu("H100", "NVIDIA H100 80GB HBM3", 81559 * _MIB, link=NVLINK, aliases=("H100-80GB-HBM3",)),
    _gpu("H100", "NVIDIA H100 PCIe", 80 * _GIB, aliases=("H100-PCIe",)),
    _gpu("H100", "NVIDIA H100 NVL", 94 * _GIB, aliases=("H100-NVL",)),
    _gpu("H200", "NVIDIA H200", 143771 * _MIB, link=NVLINK),
    _gpu("H200", "NVIDIA H200 NVL", 141 * _GIB, aliases=("H200-NVL",)),
    _gpu("H20", "NVIDIA H20", 96 * _GIB, link=NVLINK),
    _gpu("H20", "NVIDIA H20-3e", 141 * _GIB, link=NVLINK, aliases=("H20-3e",)),
    _gpu("H800", "NVIDIA H800", 80 * _GIB, link=NVLINK),
    _gpu("GH200", "NVIDIA GH200 480GB", 96 * _GIB, _ONE, aliases=("GH200-480GB",)),
    _gpu("GH200", "NVIDIA GH200 144G HBM3e", 144 * _GIB, _TWO, link=NVLINK, aliases=("GH200-144G-HBM3e",)),
    _gpu("B200", "NVIDIA B200", 180 * _GIB, link=NVLINK),
    _gpu("B300", "NVIDIA B300 SXM6 AC", 268 * _GIB, link=NVLINK, aliases=("B300-SXM6-AC",)),
    _gpu("GB200", "NVIDIA GB200", 186 * _GIB, _FOUR, link=NVLINK),
    _gpu("GB300", "NVIDIA GB300", 277 * _GIB, _FOUR, link=NVLINK),
    _gpu(
        "RTX-PRO-6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        96 * _GIB,
        aliases=("RTX-PRO-6000-Blackwell-Server-Edition",),
    ),
    # Ampere and Ada
    _gpu("A100", "NVIDIA A100-SXM4-80GB", 80 * _GIB, link=NVLINK, aliases=("A100-80G", "A100-SXM4-80GB")),
    _gpu("A100", "NVIDIA A100-SXM4-40GB", 40 * _GIB, link=NVLINK, aliases=("A100-40G", "A100-SXM4-40GB")),
    _gpu("A100", "NVIDIA A100 80GB PCIe", 80 * _GIB, aliases=("A100-80GB-PCIe",)),
    _gpu("A100", "NVIDIA A100-PCIE-40GB", 40 * _GIB, aliases=("A100-PCIE-40GB",)),
    _gpu("A800", "NVIDIA A800-SXM4-80GB", 80 * _GIB, link=NVLINK, aliases=("A800-SXM4-80GB",)),
    _gpu("A40", "NVIDIA A40", 48 * _GIB),
    _gpu("A30", "NVIDIA A30", 24 * _GIB),
    _gpu("A16", "NVIDIA A16", 16 * _GIB),
    _gpu("A10G", "NVIDIA A10G", 24 * _GIB),
    _gpu("A10", "NVIDIA A10", 24 * _GIB),
    _gpu("A2", "NVIDIA A2", 16 * _GIB),
    _gpu("L40S", "NVIDIA L40S", 46068 * _MIB),
    _gpu("L40", "NVIDIA L40", 48 * _GIB),
    _gpu("L20", "NVIDIA L20", 48 * _GIB),
    _gpu("L4", "NVIDIA L4", 24 * _GIB),
    # Turing and older
    _gpu("T4", "Tesla T4", 16 * _GIB),
    _gpu("V100", "Tesla V100-SXM2-16GB", 16 * _GIB, link=NVLINK, aliases=("V100-SXM2-16GB",)),
    _gpu("V100", "Tesla V100-SXM2-32GB", 32 * _GIB, link=NVLINK, aliases=("V100-SXM2-32GB",)),
    _gpu("V100S", "Tesla V100S-PCIE-32GB", 32 * _GIB, aliases=("V100S-PCIE-32GB",)),
    _gpu("P100", "Tesla P100-PCIE-16GB", 16 * _GIB, aliases=("P100-PCIE-16GB",)),
    _gpu("P100", "Tesla P100-SXM2-16GB", 16 * _GIB, link=NVLINK, aliases=("P100-SXM2-16GB",)),
    _gpu("P40", "Tesla P40", 24 * _GIB),
    _gpu("P4", "Tesla P4", 8 * _GIB),
    _gpu("K80", "Tesla K80", 12 * _GIB),
    # Workstations and consumers
    _gpu("RTX-A6000", "NVIDIA RTX A6000", 48 * _GIB, _FOUR),
    _gpu("RTX-6000", "NVIDIA RTX 6000 Ada Generation", 48 * _GIB, _FOUR, aliases=("RTX-6000-Ada-Generation",)),
    _gpu("RTX-6000", "Quadro RTX 6000", 24 * _GIB, _FOUR, aliases=("Quadro-RTX-6000",)),
    _gpu("GeForce-RTX-5090", "NVIDIA GeForce RTX 5090", 32 * _GIB, aliases=("RTX-5090",)),
    _gpu("GeForce-RTX-4090", "NVIDIA GeForce RTX 4090", 24 * _GIB, aliases=("RTX-4090",)),
    _gpu("GeForce-RTX-4090-D", "NVIDIA GeForce RTX 4090 D", 24 * _GIB, aliases=("RTX-4090-D",)),
    _gpu("GeForce-RTX-4080-SUPER", "NVIDIA GeForce RTX 4080 SUPER", 16376 * _MIB, _FOUR, aliases=("RTX-4080-SUPER",)),
    _gpu("GeForce-RTX-3090", "NVIDIA GeForce RTX 3090", 24 * _GIB, _FOUR, aliases=("RTX-3090",)),
    _gpu("GeForce-RTX-2080-Ti", "NVIDIA GeForce RTX 2080 Ti", 11 * _GIB, _FOUR, aliases=("RTX-2080-Ti",)),
    _gpu("TITAN-RTX", "NVIDIA TITAN RTX", 24 * _GIB, _FOUR),
    _gpu("TITAN-V", "NVIDIA TITAN V", 12 * _GIB, _FOUR),
    Product(
        name="GB10",
        model="NVIDIA GB10",
        counts=_ONE,
        id_template="GPU-{uuid}",
        node_templates=("/dev/nvidia0",),
        attributes={"unified_memory": True},
    ),
)

# Profiles and their largest number per GPU: NVIDIA/go-nvml, pkg/nvml/mock/gpus. Memory of the A100-40 and A30 from
# there as well, that of the H100 from a machine; of the others as the profile's name says.
_MIGS = (
    *(
        _mig("A100", "NVIDIA A100-SXM4-40GB", profile, memory, most)
        for profile, memory, most in (
            ("1g.5gb", 4864, 7),
            ("2g.10gb", 9856, 3),
            ("3g.20gb", 19968, 2),
            ("4g.20gb", 19968, 1),
            ("7g.40gb", 40192, 1),
        )
    ),
    *(
        _mig("H100", "NVIDIA H100 80GB HBM3", profile, memory, most)
        for profile, memory, most in (
            ("1g.10gb", 9984, 7),
            ("2g.20gb", 20096, 3),
            ("3g.40gb", 40448, 2),
            ("7g.80gb", 80 * 1024, 1),
        )
    ),
    *(
        _mig("H200", "NVIDIA H200", profile, memory * 1024, most)
        for profile, memory, most in (("1g.18gb", 18, 7), ("2g.35gb", 35, 3), ("3g.71gb", 71, 2), ("7g.141gb", 141, 1))
    ),
    *(
        _mig("B200", "NVIDIA B200", profile, memory * 1024, most)
        for profile, memory, most in (("1g.23gb", 23, 7), ("2g.45gb", 45, 3), ("3g.90gb", 90, 2), ("7g.180gb", 180, 1))
    ),
    *(
        _mig("A30", "NVIDIA A30", profile, memory, most)
        for profile, memory, most in (("1g.6gb", 5836, 4), ("2g.12gb", 11672, 2), ("4g.24gb", 23344, 1))
    ),
)

PRODUCTS: tuple[Product, ...] = (*_CARDS, *_MIGS)
