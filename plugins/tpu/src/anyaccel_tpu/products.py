"""What is known about each TPU generation: PCI ids, memory, names, and the machines that carry it.

PCI ids and memory follow JAX (``jax/_src/hardware_utils.py``) and Google's ``tpu-info``; names of machine types and
accelerator labels follow the GKE documentation; tags follow Ray's ``TPUAcceleratorManager``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from anyaccel.plugin import Product

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation of TPU chips.

    Attributes:
        key: Prefix of its accelerator types, as Ray writes it: ``v5litepod``.
        tag: Accelerator-type tag, equal to Ray's.
        model: Name for people.
        memory_gib: High-bandwidth memory of one chip, or None when it is not published.
        cores: What the number in an accelerator type counts per chip: 2 where it counts TensorCores, 1 where it
            counts chips; None when it is not published.
        dimensions: Axes of the interconnect; None when that is not published.
        counts: Chips that one machine may have.
        max_chips: Chips of the largest slice; None when it is not published.
        vfio: Whether a chip is opened through ``/dev/vfio/<group>`` rather than ``/dev/accel<index>``.
        groups: IOMMU groups per chip, where chips are opened through vfio.
        aliases: Other names.
        runtime: Version of the TPU software to create a VM with, or empty when not known.
    """

    key: str
    tag: str
    model: str
    memory_gib: int | None = None
    cores: int | None = None
    dimensions: int | None = None
    counts: tuple[int, ...] = ()
    max_chips: int | None = None
    vfio: bool = True
    groups: int = 1
    aliases: tuple[str, ...] = ()
    runtime: str = ""

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one chip in bytes, or None."""
        return None if self.memory_gib is None else self.memory_gib * GIB


_KNOWN = (
    Generation(
        key="v2",
        tag="TPU-V2",
        model="TPU v2",
        memory_gib=16,
        cores=2,
        dimensions=2,
        counts=(4,),
        max_chips=256,
        vfio=False,
        aliases=("v2",),
        runtime="tpu-ubuntu2204-base",
    ),
    Generation(
        key="v3",
        tag="TPU-V3",
        model="TPU v3",
        memory_gib=32,
        cores=2,
        dimensions=2,
        counts=(4,),
        max_chips=1024,
        vfio=False,
        aliases=("v3",),
        runtime="tpu-ubuntu2204-base",
    ),
    Generation(
        key="v4",
        tag="TPU-V4",
        model="TPU v4",
        memory_gib=32,
        cores=2,
        dimensions=3,
        counts=(4,),
        max_chips=64 * 64,
        vfio=False,
        aliases=("v4", "tpu-v4-podslice"),
        runtime="tpu-ubuntu2204-base",
    ),
    Generation(
        key="v5litepod",
        tag="TPU-V5LITEPOD",
        model="TPU v5e",
        memory_gib=16,
        cores=1,
        dimensions=2,
        counts=(1, 4, 8),
        max_chips=256,
        aliases=("TPU-V5E", "v5e", "v5litepod", "tpu-v5-lite-podslice", "tpu-v5-lite-device"),
        runtime="v2-alpha-tpuv5-lite",
    ),
    Generation(
        key="v5p",
        tag="TPU-V5P",
        model="TPU v5p",
        memory_gib=95,
        cores=2,
        dimensions=3,
        counts=(1, 2, 4),
        max_chips=140 * 64,
        aliases=("v5p", "tpu-v5p-slice"),
        runtime="v2-alpha-tpuv5",
    ),
    Generation(
        key="v6e",
        tag="TPU-V6E",
        model="TPU v6e",
        memory_gib=32,
        cores=1,
        dimensions=2,
        counts=(1, 4, 8),
        max_chips=256,
        aliases=("v6e", "trillium", "tpu-v6e-slice"),
        runtime="v2-alpha-tpuv6e",
    ),
    Generation(
        key="v7x",
        tag="TPU-V7X",
        model="TPU7x",
        memory_gib=192,
        cores=2,
        dimensions=3,
        counts=(1, 4),
        max_chips=144 * 64,
        groups=2,
        aliases=("v7x", "TPU7X", "ironwood"),
    ),
    # Their PCI ids are public, their memory, bounds and slices are not: found and handed out as whole machines only.
    Generation(key="v8i", tag="TPU-V8I", model="TPU8i", aliases=("TPU8I",)),
    Generation(key="v8t", tag="TPU-V8T", model="TPU8t", aliases=("TPU8T",)),
)
GENERATIONS: Mapping[str, Generation] = MappingProxyType({generation.key: generation for generation in _KNOWN})

V2_OR_V3 = Generation(key="v2-or-v3", tag="TPU-V2-OR-V3", model="TPU v2 or v3", counts=(4,), vfio=False)
"""A chip whose PCI device id is that of both generations and whose subsystem id says neither."""

GOOGLE = 0x1AE0
_V2_V3_DEVICE = 0x0027
_V2_V3_SUBSYSTEMS = {0x004E: "v2", 0x004F: "v3"}
_DEVICES = {
    0x005E: "v4",
    0x0063: "v5litepod",
    0x0062: "v5p",
    0x006F: "v6e",
    0x0076: "v7x",
    0x0083: "v8i",
    0x007C: "v8t",
}


def generation_of(device: int, subsystem: int | None) -> Generation | None:
    """Say which generation a PCI function of Google's is, or None when it is no TPU.

    Google's vendor id alone says nothing: network cards (gVNIC, 0x0042) and fabric controllers (0x0084) carry it too.
    """
    if device == _V2_V3_DEVICE:
        key = _V2_V3_SUBSYSTEMS.get(subsystem) if subsystem is not None else None
        return GENERATIONS[key] if key else V2_OR_V3
    return GENERATIONS[_DEVICES[device]] if device in _DEVICES else None


def by_key(key: object) -> Generation | None:
    """The generation that a device's ``generation`` attribute names."""
    return V2_OR_V3 if key == V2_OR_V3.key else GENERATIONS.get(str(key))


INSTANCE_TYPES: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] = MappingProxyType(
    {
        "v3": (("ct3-hightpu", (4,)), ("ct3p-hightpu", (4,))),
        "v4": (("ct4p-hightpu", (4,)),),
        "v5litepod": (("ct5l-hightpu", (1, 4, 8)), ("ct5lp-hightpu", (1, 4, 8))),
        "v5p": (("ct5p-hightpu", (1, 2, 4)),),
        "v6e": (("ct6e-standard", (1, 4, 8)),),
        "v7x": (("tpu7x-standard", (1, 4)),),
    }
)
"""Families of machine types of Compute Engine and GKE by generation, with the chips that one machine may have."""


def products() -> tuple[Product, ...]:
    """The generations of which memory and machines are published."""
    return tuple(_product(generation) for generation in GENERATIONS.values() if generation.counts)


def _product(generation: Generation) -> Product:
    nodes = ("/dev/vfio/{index}",) if generation.vfio else ("/dev/accel{index}",)
    return Product(
        name=generation.tag,
        model=generation.model,
        memory_bytes=generation.memory_bytes,
        counts=generation.counts,
        aliases=generation.aliases,
        id_template="tpu-{pci}",
        # A chip with two groups cannot be written with {index} alone; no node is better than a wrong one.
        node_templates=nodes if generation.groups == 1 else (),
        link=1,
        attributes={"generation": generation.key},
        constants={f"GOOGLE_{generation.tag.replace('-', '_')}": generation.tag},
        instance_types={
            f"{family}-{chips}t": chips for family, counts in INSTANCE_TYPES.get(generation.key, ()) for chips in counts
        },
    )
