"""Inferentia and Trainium chips, the tags of their cores, and the EC2 instance types that carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyaccel.plugin import Device, Product

GIB = 1 << 30

RAY_TAG = "aws-neuron-core"
"""The one accelerator type that Ray knows for every NeuronCore (``ray.util.accelerators.AWS_NEURON_CORE``)."""

UNKNOWN_MODEL = "NeuronDevice"
"""What ``lspci`` prints for every chip; the model where nothing tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One generation of chips.

    Attributes:
        device_name: Name of the chip in the driver's sysfs: ``Trainium2``.
        instance_family: EC2 instance family: ``trn2``.
        pci_ids: PCI device ids under vendor 0x1d0f (``neuron_device.h`` of the driver).
        physical_cores: NeuronCores of one chip.
        memory_bytes: Memory of one chip, shared by its cores.
        lnc: Physical cores in one logical core unless configured otherwise.
        chips: Numbers of chips that one instance has.
    """

    device_name: str
    instance_family: str
    pci_ids: tuple[int, ...]
    physical_cores: int
    memory_bytes: int
    lnc: int = 1
    chips: tuple[int, ...] = (1,)

    @property
    def lncs(self) -> tuple[int, ...]:
        """Configurations of logical cores that the chip takes, the default first."""
        return (2, 1) if self.lnc == 2 else (1,)  # noqa: PLR2004 - the one other size that exists

    @property
    def trainium(self) -> bool:
        """Whether it is a training chip, whose collectives only run on certain numbers of cores."""
        return self.instance_family.startswith("trn")


FAMILIES: Mapping[str, Family] = {
    family.device_name.lower(): family
    for family in (
        Family(
            device_name="Trainium1",
            instance_family="trn1",
            pci_ids=(0x7164,),
            physical_cores=2,
            memory_bytes=32 * GIB,
            chips=(1, 16),
        ),
        Family(
            device_name="Inferentia2",
            instance_family="inf2",
            pci_ids=(0x7264,),
            physical_cores=2,
            memory_bytes=32 * GIB,
            chips=(1, 6, 12),
        ),
        Family(
            device_name="Trainium2",
            instance_family="trn2",
            pci_ids=(0x7364,),
            physical_cores=8,
            memory_bytes=96 * GIB,
            lnc=2,
            chips=(1, 16),
        ),
        Family(
            device_name="Trainium3",
            instance_family="trn3",
            pci_ids=(0x7564, 0x7565),
            physical_cores=8,
            memory_bytes=144 * GIB,
            lnc=2,
            chips=(4, 16),
        ),
        Family(
            device_name="Inferentia",
            instance_family="inf1",
            pci_ids=(0x7064, 0x7065, 0x7066, 0x7067),
            physical_cores=4,
            memory_bytes=8 * GIB,
            chips=(1, 4, 16),
        ),
    )
}
"""Chips by their sysfs name in lower case. The architecture string does not do: Inferentia2 and Trainium2 share it."""

PCI_VENDOR = 0x1D0F
"""Amazon. Network adapters and disks of an instance have it too, so the device id decides."""

PCI_FAMILIES: Mapping[int, Family] = {pci_id: family for family in FAMILIES.values() for pci_id in family.pci_ids}

INSTANCE_TYPES: Mapping[str, Mapping[str, int]] = {
    "inf1": {"inf1.xlarge": 4, "inf1.2xlarge": 4, "inf1.6xlarge": 16, "inf1.24xlarge": 64},
    "inf2": {"inf2.xlarge": 2, "inf2.8xlarge": 2, "inf2.24xlarge": 12, "inf2.48xlarge": 24},
    "trn1": {"trn1.2xlarge": 2, "trn1.32xlarge": 32, "trn1n.32xlarge": 32},
    "trn2": {"trn2.3xlarge": 4, "trn2.48xlarge": 64, "trn2u.48xlarge": 64},
}
"""EC2 instance types by family, with their number of logical cores at the default configuration."""


def family_of_instance(instance_type: str) -> Family | None:
    """The family of an EC2 instance type or family: ``trn1n.32xlarge`` and ``Trn1`` are Trainium1."""
    name = instance_type.strip().lower().partition(".")[0]
    return next((family for family in FAMILIES.values() if name.startswith(family.instance_family)), None)


def family_of(device: Device) -> Family | None:
    """The family of a detected or simulated core."""
    return FAMILIES.get(str(device.attributes.get("device_name", device.model)).lower())


def cores_per_chip(device: Device) -> int:
    """Logical cores of the chip that a core belongs to."""
    return max(1, int(device.attributes.get("cores_per_device", 1)))


def chip_index(device: Device) -> int:
    """Index of the chip that a core belongs to: core ids run through the chips one after the other."""
    return device.index // cores_per_chip(device)


def tags(device: Device) -> tuple[str, ...]:
    """Name a core's accelerator types.

    The first is Ray's, which does not tell chips apart; then the chip as Slurm's ``nrt`` plug-in names it, the instance
    family, and on chips that know it the size of the logical core, since a program compiled for one does not load on
    the other.
    """
    family = family_of(device)
    if family is None:
        return (RAY_TAG,)
    names = [RAY_TAG, family.device_name.lower(), family.instance_family]
    if len(family.lncs) > 1 and "lnc" in device.attributes:
        names.append(f"{names[1]}-lnc{device.attributes['lnc']}")
    return tuple(names)


def products() -> tuple[Product, ...]:
    """List the chips in each configuration of logical cores, Ray's two first."""
    return tuple(_product(family, lnc) for family in FAMILIES.values() for lnc in family.lncs)


def _product(family: Family, lnc: int) -> Product:
    cores = family.physical_cores // lnc
    chip = family.device_name.lower()
    aliases = (chip, family.instance_family) if lnc == family.lnc else ()
    return Product(
        name=RAY_TAG,
        model=family.device_name,
        memory_bytes=family.memory_bytes // cores,
        counts=tuple(chips * cores for chips in family.chips),
        aliases=(*aliases, f"{chip}-lnc{lnc}") if len(family.lncs) > 1 else aliases,
        id_template="neuron-{pci}-nc{index}",
        link=1,
        attributes=core_attributes(family, lnc),
        constants={"AWS_NEURON_CORE": RAY_TAG},
        instance_types=INSTANCE_TYPES.get(family.instance_family, {}) if lnc == family.lnc else {},
    )


def core_attributes(family: Family, lnc: int) -> dict[str, str | int]:
    """Attributes that every core of a chip has, detected or simulated."""
    return {
        "device_name": family.device_name,
        "family": family.instance_family,
        "lnc": lnc,
        "cores_per_device": family.physical_cores // lnc,
    }
