"""Names, tags, sharing and containers."""

from __future__ import annotations

import pytest
from anyaccel import accelerators
from anyaccel.plugin import Device, Fractional
from anyaccel.vendors.simulate import find_cards, simulate
from anyaccel_ascend import plugin

MIB = 1 << 20
SMI = """#!/bin/sh
case "$*" in
"info -m") printf 'NPU ID    Chip ID    Chip Logic ID    Chip Name\\n0    0    0    Ascend\\n' ;;
"info") cat <<EOF ;;
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     {name:<20}| OK            | 85.9        47                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          2859 / 32768         |
EOF
esac
"""


@pytest.mark.parametrize(
    ("name", "device", "soc", "family"),
    [
        ("910B3", "0xd802", "Ascend910B3", "910b"),
        ("Ascend 910B3", "0xd802", "Ascend910B3", "910b"),
        ("Ascend 910B3", "0xd805", "Ascend910B3", "910b"),
        ("910B4-1", "0xd802", "Ascend910B4-1", "910b"),
        ("910B2C", "0xd802", "Ascend910B2C", "910b"),
        ("A2G3", "0xd802", "Ascend910B3", "910b"),
        ("Alan A2G3", "0xd805", "Ascend910B3", "910b"),
        ("I2", "0xd500", "Ascend310P", "310p"),
        ("310P3", "0xd500", "Ascend310P3", "310p"),
        ("Ascend 310P1", "0xd805", "Ascend310P1", "310p"),
        ("MiniD", "0xd805", "Ascend310", "310"),
        ("310B1", "0xd805", "Ascend310B1", "310b"),
        ("910A", "0xd801", "Ascend910A", "910"),
        ("910ProB", "0xd801", "Ascend910A", "910"),
        ("910B", "0xd801", "Ascend910B", "910"),
        ("910B", "0xd805", "Ascend910B", "910"),
        ("Ascend910", "0xd803", "Ascend910C", "a3"),
        ("910_9392", "0xd805", "Ascend910C", "a3"),
        ("Ascend910", "0xd805", "Ascend910", ""),
        ("Ascend950PR", "0xd806", "Ascend950PR", "950"),
        ("Ascend", "0xd802", "Ascend910B", "910b"),
    ],
)
def test_a_chip_is_named_as_acl_names_it(machine, name, device, soc, family):
    (found,) = plugin.anyaccel_detect(machine(SMI.format(name=name), cards=1, device=device)).devices
    assert plugin.anyaccel_tags(found)[0] == found.attributes["soc"] == soc
    assert found.attributes["family"] == family


def test_910b3_is_not_an_a3():
    assert plugin.anyaccel_tags(Device(id="x", index=0, model="910B3")) == ("Ascend910B3", "Ascend910B", "910B3")


def test_the_first_generation_910b_is_told_from_the_family_that_has_its_name(devices):
    """acl.get_soc_name() returns Ascend910B for a chip of 2019; later chips have a digit."""
    (product,) = (each for each in plugin.anyaccel_products() if each.name == "Ascend910B")
    assert product.constants == {"HUAWEI_NPU_910B": accelerators.HUAWEI_NPU_910B} == {"HUAWEI_NPU_910B": "Ascend910B"}
    first, later = devices("910b-first-generation-8npu")[0], devices("910b4-8npu")[0]
    assert first.memory_bytes == product.memory_bytes
    assert plugin.anyaccel_tags(first) == ("Ascend910B", "Ascend910A")
    assert plugin.anyaccel_tags(later) == ("Ascend910B4", "Ascend910B", "910B4")


@pytest.mark.parametrize(("model", "tag"), [("910_9392", "Ascend910_9392"), ("910ProB", "Ascend910ProB")])
def test_variants_go_by_their_own_names_too(model, tag):
    assert tag in plugin.anyaccel_tags(Device(id="x", index=0, model=model))


def test_a_vnpu_does_not_go_by_the_name_of_a_whole_chip(devices):
    part = devices("310p3-vnpu-host")[3]
    assert plugin.anyaccel_tags(part) == ("Ascend310P3-vir04", "Ascend310P-vir04", "Ascend310P-vnpu", "vnpu")
    assert "Ascend310P-vir04" in plugin.anyaccel_tags(devices("310p3-vnpu-container")[0])


@pytest.mark.parametrize(
    ("name", "template", "mib"),
    [
        ("910b4-vnpu-host", "vir10_3c_16g", 16384),
        ("910b4-vnpu-host", "vir05_1c_8g", 8192),
        ("910b4-vnpu-host", "vir10_4c_16g_m", 16384),
        ("910b4-vnpu-host", "vir12_3c", None),
        ("310p3-vnpu-host", "vir01", 2690),
        ("310p3-vnpu-host", "vir02_1c", 5381),
        ("310p3-vnpu-host", "vir04", 10763),
        ("310p3-vnpu-host", "new", None),
    ],
)
def test_memory_of_a_vnpu_follows_its_template(answering, name, template, mib):
    row = f"Vnpu ID\n| 100 | 0 | ffffffffffff | 1 | {template} |\n"
    answers = {f"info -t info-vnpu -i {card} -c 0": row for card in (0, 7)}
    found = plugin.anyaccel_detect(answering(name, answers)).devices
    (part,) = (device for device in found if device.attributes.get("vnpu_id") == 100)
    assert part.memory_bytes == (mib * MIB if mib else None)


def test_sharing_is_by_agreement_except_where_a_chip_is_split(devices):
    parent, *parts = devices("310p3-vnpu-host")
    assert plugin.anyaccel_fractional(devices("910b4-8npu")[0]) is Fractional.SHARED
    assert plugin.anyaccel_fractional(parent) is Fractional.PARTITIONED
    assert {plugin.anyaccel_fractional(part) for part in parts} == {Fractional.NO}


def test_a_container_gets_nodes_mounts_and_physical_numbers_and_no_mask(devices):
    found = devices("910b4-container-2-of-8")
    edits = plugin.anyaccel_container(found[::-1])
    assert edits.env == {"ASCEND_VISIBLE_DEVICES": "4,5"}
    control = {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist"}
    assert set(edits.nodes) == {"/dev/davinci5", "/dev/davinci4", *control}
    assert {mount.source for mount in edits.mounts} >= {"/usr/local/Ascend/driver", "/usr/local/dcmi"}
    assert all(mount.read_only for mount in edits.mounts)


def test_a_container_gets_only_control_nodes_that_exist(devices):
    assert "/dev/dvpp_cmdlist" not in plugin.anyaccel_container(devices("950dt-ub-8npu")).nodes


def test_a_container_with_vnpus_says_virtual(devices):
    found = devices("310p3-vnpu-host")
    edits = plugin.anyaccel_container(found[1:3])
    assert edits.env == {"ASCEND_VISIBLE_DEVICES": "100,101", "ASCEND_RUNTIME_OPTIONS": "VIRTUAL"}
    assert {"/dev/vdavinci100", "/dev/vdavinci101"} < set(edits.nodes)


def test_a_container_without_npus_is_told_so():
    edits = plugin.anyaccel_container(())
    assert (edits.env, edits.nodes, edits.mounts) == ({"ASCEND_VISIBLE_DEVICES": "void"}, (), ())


@pytest.mark.parametrize(
    "name", sorted({value for product in plugin.anyaccel_products() for value in product.constants.values()})
)
def test_every_constant_can_be_simulated(name):
    """``anyaccel.accelerators`` has these names, those of families among them."""
    # A name of a family means the product that carries its constant.
    cards = find_cards(name, 1, plugin.anyaccel_products())
    assert cards is not None
    (device,) = simulate("ascend", [cards]).devices
    assert name in plugin.anyaccel_tags(device)
