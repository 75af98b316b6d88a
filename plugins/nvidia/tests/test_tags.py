"""Accelerator types: Ray's first, and no type shared by two products."""

import re

import pytest
from anyaccel.plugin import Device
from anyaccel_nvidia import plugin

RAY = {
    "Tesla K80": "K80",
    "Tesla P4": "P4",
    "Tesla P40": "P40",
    "Tesla P100-PCIE-16GB": "P100",
    "Tesla P100-SXM2-16GB": "P100",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100",
    "Tesla V100-PCIE-16GB": "V100",
    "Tesla V100S-PCIE-32GB": "V100S",
    "Tesla T4": "T4",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A2": "A2",
    "NVIDIA A16": "A16",
    "NVIDIA A30": "A30",
    "NVIDIA A40": "A40",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA L20": "L20",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100",
    "NVIDIA H100 NVL": "H100",
    "NVIDIA H800": "H800",
    "NVIDIA H20": "H20",
    "NVIDIA H20-3e": "H20",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "NVIDIA GB300": "GB300",
    "NVIDIA GB10": "GB10",
    "NVIDIA GeForce RTX 4090": "GeForce-RTX-4090",
    "NVIDIA GeForce RTX 4090 D": "GeForce-RTX-4090-D",
    "NVIDIA GeForce RTX 5090": "GeForce-RTX-5090",
    "NVIDIA GeForce RTX 3090": "GeForce-RTX-3090",
    "GeForce RTX 2080 Ti": "GeForce-RTX-2080-Ti",
    "NVIDIA GeForce RTX 2080 Ti": "GeForce-RTX-2080-Ti",
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000",
    "Quadro RTX 6000": "RTX-6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX-PRO-6000",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000",
    "NVIDIA RTX PRO 4500 Blackwell": "RTX-PRO-4500",
    "NVIDIA TITAN RTX": "TITAN-RTX",
    "NVIDIA TITAN V": "TITAN-V",
    "GRID T4-8Q": "T4",
    "NVIDIA A10-24Q": "A10",
    "NVIDIA Thor": "Thor",
    "NVIDIA Graphics Device": "Graphics-Device",
    "Orin (nvgpu)": "Orin-nvgpu",  # Ray keeps the brackets, which no label may hold
}


@pytest.mark.parametrize("name", RAY)
def test_the_type_is_rays(name):
    tags = plugin.anyaccel_tags(Device(id="GPU-1", index=0, model=name))
    assert tags[0] == RAY[name]
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tag) for tag in tags)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("GeForce GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("GeForce RTX 2070 SUPER", "NVIDIA GeForce RTX 2070 SUPER"),
        ("TITAN Xp", "NVIDIA TITAN Xp"),
        ("RTX A6000", "NVIDIA RTX A6000"),
        ("Quadro RTX 6000", "NVIDIA Quadro RTX 6000"),
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),
        ("Tesla V100-SXM2-16GB", "NVIDIA V100-SXM2-16GB"),
        ("Tesla V100-SXM2-16GB", "NVIDIA Tesla V100-SXM2-16GB"),
        ("Tesla T4", "NVIDIA T4"),
    ],
)
def test_a_type_does_not_change_with_the_way_in_which_a_driver_writes_the_name(old, new):
    kind = "MIG-1" if " MIG " in old else "GPU-1"
    tags = [plugin.anyaccel_tags(Device(id=kind, index=0, model=name)) for name in (old, new)]
    assert tags[0] == tags[1]


@pytest.mark.parametrize("prefix", ["", "NVIDIA "])
def test_a_card_never_goes_by_the_name_of_a_smaller_one(prefix):
    """Ray gives an old driver's GTX 1080 Ti the type GTX-1080."""
    # Tags of a pair must be disjoint, or a request for the smaller card could get the larger one's name.
    for smaller, larger in (("GTX 1080", "GTX 1080 Ti"), ("RTX 2080", "RTX 2080 SUPER"), ("RTX 4090 D", "RTX 4090")):
        tags = [
            set(plugin.anyaccel_tags(Device(id="GPU-1", index=0, model=f"{prefix}GeForce {name}")))
            for name in (smaller, larger)
        ]
        assert not tags[0] & tags[1]


def test_models_of_one_type_are_told_apart_by_further_tags():
    tags = {
        name: plugin.anyaccel_tags(Device(id="GPU-1", index=0, model=name))
        for name in ("NVIDIA RTX 6000 Ada Generation", "Quadro RTX 6000", "NVIDIA GeForce RTX 4090")
    }
    assert tags["NVIDIA RTX 6000 Ada Generation"] == ("RTX-6000", "RTX-6000-Ada-Generation")
    assert tags["Quadro RTX 6000"] == ("RTX-6000", "Quadro-RTX-6000")
    assert tags["NVIDIA GeForce RTX 4090"] == ("GeForce-RTX-4090", "RTX-4090")


@pytest.mark.parametrize(("mebibytes", "tag"), [(40536, "A100-40G"), (40960, "A100-40G"), (81920, "A100-80G")])
def test_the_memory_classes_of_the_a100_are_tags(mebibytes, tag):
    device = Device(id="GPU-1", index=0, model="NVIDIA A100-SXM4-80GB", memory_bytes=mebibytes << 20)
    assert tag in plugin.anyaccel_tags(device)


@pytest.mark.parametrize("profile", ["1g.5gb", "1c.3g.20gb", "1g.5gb+me"])
def test_a_mig_device_never_goes_by_the_name_of_its_whole_gpu(profile):
    device = Device(id="MIG-1", index=0, model=f"NVIDIA A100-SXM4-40GB MIG {profile}", memory_bytes=5 << 30)
    tags = plugin.anyaccel_tags(device)
    assert tags[0] == f"A100-MIG-{profile.replace('+', '.')}"
    # A request for an A100 must not be served by a slice.
    assert not {"A100", "A100-SXM4-40GB", "A100-40G"} & set(tags)


def test_a_gb200_is_no_b200():
    assert "B200" not in plugin.anyaccel_tags(Device(id="GPU-1", index=0, model="NVIDIA GB200"))


def test_tags_are_per_device_on_a_mixed_machine(devices_of):
    tags = [plugin.anyaccel_tags(device)[0] for device in devices_of("mixed-3gpu-modes")]
    assert tags == ["A100", "RTX-A6000", "T4"]


def test_a_device_without_a_sensible_name_has_a_tag_all_the_same():
    assert plugin.anyaccel_tags(Device(id="GPU-1", index=0, model="()")) == ("NVIDIA",)
