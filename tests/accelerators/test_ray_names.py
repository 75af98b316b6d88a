"""Request code that was written against ray.util.accelerators finds its constants here, with the same strings."""

from __future__ import annotations

from importlib.util import find_spec

import anyaccel
import pytest
from anyaccel import accelerators

RAY = {
    "nvidia": {
        "NVIDIA_TESLA_V100": "V100", "NVIDIA_TESLA_P100": "P100", "NVIDIA_TESLA_T4": "T4", "NVIDIA_TESLA_P4": "P4",
        "NVIDIA_TESLA_K80": "K80", "NVIDIA_TESLA_A10G": "A10G", "NVIDIA_TESLA_A100": "A100", "NVIDIA_L4": "L4",
        "NVIDIA_L40S": "L40S", "NVIDIA_A100": "A100", "NVIDIA_A100_40G": "A100-40G", "NVIDIA_A100_80G": "A100-80G",
        "NVIDIA_H100": "H100", "NVIDIA_H200": "H200", "NVIDIA_H20": "H20", "NVIDIA_B200": "B200",
        "NVIDIA_B300": "B300", "NVIDIA_GB200": "GB200", "NVIDIA_GB300": "GB300",
        "NVIDIA_RTX_PRO_6000": "RTX-PRO-6000",
    },
    "amd": {
        "AMD_INSTINCT_MI100": "AMD-Instinct-MI100", "AMD_INSTINCT_MI210": "AMD-Instinct-MI210",
        "AMD_INSTINCT_MI250": "AMD-Instinct-MI250X-MI250", "AMD_INSTINCT_MI250x": "AMD-Instinct-MI250X",
        "AMD_INSTINCT_MI300A": "AMD-Instinct-MI300A", "AMD_INSTINCT_MI300x": "AMD-Instinct-MI300X-OAM",
        "AMD_INSTINCT_MI300x_HF": "AMD-Instinct-MI300X-HF", "AMD_INSTINCT_MI308x": "AMD-Instinct-MI308X",
        "AMD_INSTINCT_MI325x": "AMD-Instinct-MI325X-OAM", "AMD_INSTINCT_MI350x": "AMD-Instinct-MI350X-OAM",
        "AMD_INSTINCT_MI355x": "AMD-Instinct-MI355X-OAM",
        "AMD_RADEON_R9_200_HD_7900": "AMD-Radeon-R9-200-HD-7900", "AMD_RADEON_HD_7900": "AMD-Radeon-HD-7900",
    },
    "intel": {"INTEL_MAX_1550": "Intel-GPU-Max-1550", "INTEL_MAX_1100": "Intel-GPU-Max-1100"},
    "gaudi": {"INTEL_GAUDI": "Intel-GAUDI"},
    "neuron": {"AWS_NEURON_CORE": "aws-neuron-core"},
    "tpu": {
        "GOOGLE_TPU_V2": "TPU-V2", "GOOGLE_TPU_V3": "TPU-V3", "GOOGLE_TPU_V4": "TPU-V4", "GOOGLE_TPU_V5P": "TPU-V5P",
        "GOOGLE_TPU_V5LITEPOD": "TPU-V5LITEPOD", "GOOGLE_TPU_V6E": "TPU-V6E", "GOOGLE_TPU_V7X": "TPU-V7X",
    },
    "ascend": {"HUAWEI_NPU_910B": "Ascend910B", "HUAWEI_NPU_910B4": "Ascend910B4"},
    "metax": {"METAX_C500": "MXC500", "METAX_C550": "MXC550"},
    "furiosa": {"FURIOSA_RNGD": "FURIOSA_RNGD"},
    "mobilint": {"MOBILINT_ARIES": "MOBILINT_ARIES", "MOBILINT_REGULUS": "MOBILINT_REGULUS"},
}  # fmt: skip
"""Ray's constants by the vendor of ours that has their accelerators."""
APPLE = (
    "APPLE_M1", "APPLE_M1_PRO", "APPLE_M1_MAX", "APPLE_M1_ULTRA", "APPLE_M2", "APPLE_M2_PRO", "APPLE_M2_MAX",
    "APPLE_M2_ULTRA", "APPLE_M3", "APPLE_M3_PRO", "APPLE_M3_MAX", "APPLE_SILICON",
)  # fmt: skip
"""Ray's constants for accelerators that are not on Linux."""

INSTANCE_TYPES = [
    ("p4d.24xlarge", "nvidia", "A100", 8, 40),
    ("p4de.24xlarge", "nvidia", "A100", 8, 80),
    ("g6e.12xlarge", "nvidia", "L40S", 4, None),
    ("a2-megagpu-16g", "nvidia", "A100", 16, 40),
    ("Standard_ND96isr_MI300X_v5", "amd", "AMD-Instinct-MI300X-OAM", 8, None),
    ("trn2.48xlarge", "neuron", "aws-neuron-core", 64, 24),
    ("inf1.xlarge", "neuron", "aws-neuron-core", 4, 2),
    ("ct6e-standard-8t", "tpu", "TPU-V6E", 8, 32),
    ("dl1.24xlarge", "gaudi", "Intel-GAUDI", 8, 32),
]


def installed(vendor):
    return find_spec(f"anyaccel_{vendor}") is not None


some_installed = pytest.mark.skipif(
    not any(map(installed, RAY)),
    reason="needs plug-ins of vendors whose accelerators Ray names, such as anyaccel-nvidia",
)


# One test for all of them: the first constant that is asked for has every installed plug-in say its own.
@some_installed
def test_constants_have_rays_strings_and_can_be_asked_for():
    for vendor in filter(installed, RAY):
        assert {name: getattr(accelerators, name) for name in RAY[vendor]} == RAY[vendor]
        for tag in RAY[vendor].values():
            (device,) = anyaccel.detect(f"sim:{tag}").devices
            assert (device.vendor, tag in device.tags) == (vendor, True)


def test_the_list_is_rays():
    """62 constants and one deprecated alias; a release of Ray before 2.60 has fewer."""
    known = {name: tag for names in RAY.values() for name, tag in names.items()}
    assert len(APPLE) + len(known) == 63
    rays = pytest.importorskip("ray.util.accelerators.accelerators", reason="needs Ray, to compare with its own list")
    own = {name: tag for name, tag in vars(rays).items() if name.isupper() or name.endswith(("x", "x_HF"))}
    own = {name: tag for name, tag in own.items() if isinstance(tag, str) and not name.startswith("_")}
    assert {name: tag for name, tag in own.items() if name not in APPLE} == {n: t for n, t in known.items() if n in own}


def test_a_constant_of_a_vendor_without_a_plugin_says_so():
    for name in APPLE:
        with pytest.raises(AttributeError, match=f"no installed plug-in knows the accelerator {name}"):
            getattr(accelerators, name)


@some_installed
def test_a_cloud_machine_is_known_before_it_exists():
    for name, vendor, tag, count, gib in INSTANCE_TYPES:
        if installed(vendor):
            found = accelerators.instance_type(name)
            assert (found.vendor, found.tag, found.count) == (vendor, tag, count)
            devices = anyaccel.detect(found.machine).devices
            assert (len(devices), {device.type for device in devices}) == (count, {tag})
            assert {device.memory_bytes for device in devices} == {found.memory_bytes}
            assert gib is None or found.memory_bytes == gib << 30


def test_every_instance_type_can_be_simulated():
    """The name that a simulation takes means the very product, not another one of the same tag."""
    known = accelerators._installed().instance_types
    if not known:
        pytest.skip("needs plug-ins that know instance types, such as anyaccel-nvidia")
    for vendor in sorted({each.vendor for each in known.values()}):
        machines = [each for each in known.values() if each.vendor == vendor]
        text = ",".join(each.machine.removeprefix("sim:") for each in machines)
        devices = iter(anyaccel.detect(f"sim:{text}").devices)
        for each in machines:
            assert {next(devices).memory_bytes for _ in range(each.count)} == {each.memory_bytes}, each
