"""Names, tags, sharing and containers."""

from __future__ import annotations

import re

import anyaccel_ascend as plugin
import pytest
from anyaccel.plugin import Device, EnvContext, Fractional, Term
from anyaccel_ascend.products import PCI_DEVICES, identify, template_memory

GIB = 1 << 30
MIB = 1 << 20
A, B, C, P = (PCI_DEVICES[number] for number in (0xD801, 0xD802, 0xD803, 0xD500))


def simulated(product, count):
    return tuple(
        Device(
            id=product.id_template.format(pci=f"ffff:{index:02x}:00.0", index=index, uuid=index),
            index=index,
            model=product.model,
            memory_bytes=product.memory_bytes,
            nodes=tuple(template.format(index=index) for template in product.node_templates),
            attributes=product.attributes,
        )
        for index in range(count)
    )


@pytest.mark.parametrize("product", plugin.anyaccel_products(), ids=lambda product: product.name)
def test_a_simulated_machine_of_every_product_works(product):
    devices = simulated(product, product.counts[-1])
    assert plugin.anyaccel_tags(devices[0])[0] == product.name
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", tag) for tag in plugin.anyaccel_tags(devices[0]))
    assert plugin.anyaccel_fractional(devices[0]) is Fractional.SHARED
    assert plugin.anyaccel_validate(Term(names=("NPU",)), devices) is None
    edits = plugin.anyaccel_env(devices[::2], EnvContext(devices=devices))
    assert plugin.anyaccel_visible(edits.set, devices) == [device.id for device in devices[::2]]
    assert plugin.anyaccel_container(devices).nodes[: len(devices)] == tuple(d.nodes[0] for d in devices)


def test_product_names_and_aliases_are_distinct():
    names = [product.name for product in plugin.anyaccel_products()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "generation", "soc", "family"),
    [
        ("910B3", B, "Ascend910B3", "910b"),
        ("Ascend 910B3", B, "Ascend910B3", "910b"),
        ("Ascend 910B3", None, "Ascend910B3", "910b"),
        ("910B4-1", B, "Ascend910B4-1", "910b"),
        ("910B2C", B, "Ascend910B2C", "910b"),
        ("A2G3", B, "Ascend910B3", "910b"),
        ("Alan A2G3", None, "Ascend910B3", "910b"),
        ("I2", P, "Ascend310P", "310p"),
        ("310P3", P, "Ascend310P3", "310p"),
        ("Ascend 310P1", None, "Ascend310P1", "310p"),
        ("MiniD", None, "Ascend310", "310"),
        ("310B1", None, "Ascend310B1", "310b"),
        ("910A", A, "Ascend910A", "910"),
        ("910ProB", A, "Ascend910A", "910"),
        ("910B", A, "Ascend910A", "910"),
        ("910B", None, "Ascend910A", "910"),
        ("Ascend910", C, "Ascend910C", "a3"),
        ("910_9392", None, "Ascend910C", "a3"),
        ("Ascend910", None, "Ascend910", ""),
        ("Ascend950PR", None, "Ascend950PR", "950"),
        ("Ascend", B, "Ascend910B", "910b"),
        ("", None, "Ascend910", ""),
    ],
)
def test_a_chip_is_named_as_acl_names_it(name, generation, soc, family):
    chip = identify(name, generation)
    assert (chip.soc, chip.generation.family) == (soc, family)


def test_910b3_is_not_an_a3():
    assert plugin.anyaccel_tags(Device(id="x", index=0, model="910B3")) == ("Ascend910B3", "Ascend910B", "910B3")


def test_rays_constants_are_found_by_their_own_strings():
    tags = plugin.anyaccel_tags(Device(id="x", index=0, model="910B4"))
    assert tags[0] == "Ascend910B4"
    assert "Ascend910B" in tags


@pytest.mark.parametrize(("model", "tag"), [("910_9392", "Ascend910_9392"), ("910ProB", "Ascend910ProB")])
def test_variants_go_by_their_own_names_too(model, tag):
    assert tag in plugin.anyaccel_tags(Device(id="x", index=0, model=model))


def test_a_vnpu_does_not_go_by_the_name_of_a_whole_chip(devices):
    part = devices("310p3-vnpu-host")[3]
    assert plugin.anyaccel_tags(part) == ("Ascend310P3-vir04", "Ascend310P-vir04", "Ascend310P-vnpu", "vnpu")
    assert "Ascend310P-vir04" in plugin.anyaccel_tags(devices("310p3-vnpu-container")[0])


@pytest.mark.parametrize(
    ("template", "family", "parent_mib", "mib"),
    [
        ("vir10_3c_16g", "910b", 32768, 16384),
        ("vir05_1c_8g", "910b", 32768, 8192),
        ("vir10_4c_16g_m", "910b", 32768, 16384),
        ("vir01", "310p", 21527, 2690),
        ("vir02_1c", "310p", 21527, 5381),
        ("vir04", "310p", 21527, 10763),
        ("vir16", "910", 32768, 16384),
        ("vir04", "310p", None, None),
        ("vnpu", "910b", 32768, None),
        ("vir12_3c", "910b", 65536, None),
    ],
)
def test_memory_of_a_vnpu_follows_its_template(template, family, parent_mib, mib):
    parent = parent_mib * MIB if parent_mib else None
    assert template_memory(template, family, parent) == (mib * MIB if mib else None)


def test_sharing_is_by_agreement_except_where_a_chip_is_split(devices):
    parent, *parts = devices("310p3-vnpu-host")
    assert plugin.anyaccel_fractional(devices("910b4-8npu")[0]) is Fractional.SHARED
    assert plugin.anyaccel_fractional(parent) is Fractional.PARTITIONED
    assert {plugin.anyaccel_fractional(part) for part in parts} == {Fractional.NO}


def test_a_container_gets_nodes_mounts_and_physical_numbers_and_no_mask(devices):
    found = devices("910b4-container-2-of-8")
    edits = plugin.anyaccel_container(found[::-1])
    assert edits.env == {"ASCEND_VISIBLE_DEVICES": "4,5"}
    assert edits.nodes[:2] == ("/dev/davinci5", "/dev/davinci4")
    assert set(edits.nodes[2:]) == {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist"}
    assert {mount.source for mount in edits.mounts} >= {"/usr/local/Ascend/driver", "/usr/local/dcmi"}
    assert all(mount.read_only for mount in edits.mounts)


def test_a_container_gets_only_control_nodes_that_exist(devices):
    assert "/dev/dvpp_cmdlist" not in plugin.anyaccel_container(devices("950dt-ub-8npu")).nodes


def test_a_container_with_vnpus_says_virtual(devices):
    found = devices("310p3-vnpu-host")
    edits = plugin.anyaccel_container(found[1:3])
    assert edits.env == {"ASCEND_VISIBLE_DEVICES": "100,101", "ASCEND_RUNTIME_OPTIONS": "VIRTUAL"}
    assert edits.nodes[:2] == ("/dev/vdavinci100", "/dev/vdavinci101")


def test_a_container_without_npus_is_told_so():
    assert plugin.anyaccel_container(()).env == {"ASCEND_VISIBLE_DEVICES": "void"}
    assert plugin.anyaccel_container(()).nodes == ()
