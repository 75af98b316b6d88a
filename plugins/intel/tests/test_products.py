"""Products, names by PCI id, and tags."""

from __future__ import annotations

import pytest
from anyaccel.plugin import Device, EnvContext, Health
from anyaccel_intel import plugin

GIB = 1 << 30
PRODUCTS = plugin.anyaccel_products()


def test_simulated_tiles_count_as_on_a_default_machine():
    (product,) = [product for product in PRODUCTS if product.name == "Intel-GPU-Max-1550"]
    devices = tuple(
        Device(id=f"intel-{index}", index=index, model=product.model, attributes=product.attributes)
        for index in range(4)
    )
    edits = plugin.anyaccel_env(devices[2:3], EnvContext(devices=devices))
    assert edits.set["ZE_AFFINITY_MASK"] == "2"
    assert edits.set["ZE_FLAT_DEVICE_HIERARCHY"] == "FLAT"
    assert product.memory_bytes == 64 * GIB


def test_a_pci_id_has_one_product_or_one_name():
    products = [pci_id for entry in plugin.catalog.entries for pci_id in entry.facts["pci"]]
    named = [int(line.split()[0], 16) for line in plugin.catalog.data["pci_names"].splitlines() if line]
    assert len(products + named) == len({*products, *named})
    assert {pci_id for ids in plugin.catalog.data["ids"].values() for pci_id in ids} <= {*named}
    models = {entry.model for entry in plugin.catalog.entries}
    assert not models & {plugin.catalog.pci_name(pci_id) for pci_id in named}  # a name is no way to another's tags


@pytest.mark.parametrize(
    ("pci_id", "first", "others"),
    [
        (0x0BD5, "Intel-GPU-Max-1550", {"Max-1550"}),
        (0x0BD6, "Intel-GPU-Max-1550", set()),
        (0x0B69, "Intel-GPU-Max-1450", set()),
        (0x0BD4, "Intel-GPU-Max-1550VG", set()),
        (0x0BD9, "Intel-GPU-Max-1100", set()),
        (0x56C0, "Intel-GPU-Flex-170", set()),
        (0x56C1, "Intel-GPU-Flex-140", set()),
        (0x56A0, "Intel-GPU-Arc-A770", {"Intel-GPU-A770-Graphics"}),
        (0x56A2, "Intel-GPU-Arc-A580", {"Intel-GPU-A580-Graphics"}),
        (0x56B1, "Intel-GPU-Arc-Pro-A50", {"Intel-GPU-Arc-Pro-A40"}),
        (0xE20B, "Intel-GPU-Arc-B580", {"Intel-GPU-B580-Graphics"}),
        (0xE209, "Intel-GPU-Arc-B580", set()),
        (0xE211, "Intel-GPU-Arc-Pro-B60", {"Intel-GPU-B60-Graphics"}),
        (0xE223, "Intel-GPU-Arc-Pro-B70", set()),
        (0xB080, "Intel-iGPU-Arc-B390", set()),
        (0xB083, "Intel-iGPU-Arc-B370", set()),
        (0x7D55, "Intel-iGPU-Arc", set()),
        (0xA780, "Intel-iGPU-UHD-770", set()),
        (0xA7A0, "Intel-iGPU-Iris-Xe", set()),
        (0x9A49, "Intel-iGPU-Iris-Xe", set()),
    ],
)
def test_tags_follow_the_pci_id(pci_id, first, others):
    device = Device(id="x", index=0, model="whatever", attributes={"device_id": f"0x{pci_id:04x}"})
    found = plugin.anyaccel_tags(device)
    assert found[0] == first
    assert others <= set(found)


@pytest.mark.parametrize(
    ("model", "tag"),
    [
        ("Intel(R) Graphics [0x020a]", "Intel-GPU-0x020a"),
        ("Intel(R) Arc(TM) C770 Graphics", "Intel-GPU-Arc-C770"),
        ("Intel(R) Data Center GPU Max 1550", "Intel-GPU-Max-1550"),
        ("Intel(R) Arc(TM) A310 LP Graphics", "Intel-GPU-Arc-A310"),  # as newer releases of the driver name it
    ],
)
def test_unknown_pci_id_is_tagged_by_name_without_decoration(model, tag):
    device = Device(id="x", index=0, model=model, attributes={"device_id": "0x020a"})
    assert plugin.anyaccel_tags(device)[0] == tag


@pytest.mark.parametrize(("memory", "tag"), [(16225243136, "-16GB"), (8 * GIB - 300_000_000, "-8GB")])
def test_product_of_two_sizes_says_which(memory, tag):
    device = Device(id="x", index=0, model="", memory_bytes=memory, attributes={"device_id": "0x56a0"})
    assert plugin.anyaccel_tags(device)[-1] == f"Intel-GPU-Arc-A770{tag}"


@pytest.mark.parametrize(
    ("pci_id", "integrated"), [(0xE20B, False), (0x56A2, False), (0xB080, True), (0x5690, False), (0x9BC5, True)]
)
def test_b580_is_discrete_and_b390_is_not(pci_id, integrated, devices):
    """By PCI id alone, at any address."""
    changes = {"/sys/bus/pci/devices/0000:03:00.0/device": {"text": f"0x{pci_id:04x}\n"}}
    (only,) = devices("b580-unseen-by-xpu-smi", changes=changes)
    assert only.attributes["integrated"] is integrated


@pytest.mark.parametrize(
    ("pci_id", "model", "tag", "health"),
    [
        ("0x5690", "Intel(R) Arc(TM) A770M Graphics", "Intel-GPU-Arc-A770M", Health.HEALTHY),
        ("0x56b2", "Intel(R) Arc(TM) Pro A60M Graphics", "Intel-GPU-Arc-Pro-A60M", Health.HEALTHY),
        ("0x56c2", "Intel(R) Data Center GPU Flex 170V", "Intel-GPU-Flex-170V", Health.HEALTHY),
        ("0x4908", "Intel(R) Iris(R) Xe Graphics (DG1)", "Intel-GPU-Iris-Xe-DG1", Health.HEALTHY),
        ("0xe202", "Intel(R) Graphics (Battlemage G21)", "Intel-GPU-Battlemage-G21", Health.HEALTHY),
        ("0x4c8b", "Intel(R) UHD Graphics 730", "Intel-iGPU-UHD-730", Health.HEALTHY),
        ("0x7d45", "Intel(R) Graphics (Meteor Lake-U)", "Intel-iGPU-Meteor-Lake-U", Health.HEALTHY),
        ("0x3e98", "Intel(R) UHD Graphics 630", "Intel-iGPU-UHD-630", Health.UNKNOWN),
        ("0x8a52", "Intel(R) Iris(R) Plus Graphics G7", "Intel-iGPU-Iris-Plus-G7", Health.UNKNOWN),
        ("0x0412", "Intel(R) HD Graphics (Haswell GT2)", "Intel-iGPU-HD-Haswell-GT2", Health.UNHEALTHY),
        ("0x1616", "Intel(R) HD Graphics 5500", "Intel-iGPU-HD-5500", Health.UNHEALTHY),
    ],
)
def test_ids_that_the_drivers_bind_have_a_name_and_the_health_that_can_be_known(pci_id, model, tag, health, devices):
    changes = {"/sys/bus/pci/devices/0000:03:00.0/device": {"text": f"{pci_id}\n"}}
    (only,) = devices("b580-unseen-by-xpu-smi", changes=changes)
    assert (only.model, only.health) == (model, health)
    assert plugin.anyaccel_tags(only)[0] == tag


@pytest.mark.parametrize("pci_id", ["0x5693", "0x5694", "0x4908", "0x4905"])
def test_cards_whose_memory_no_file_has_get_the_products(pci_id, devices):
    """i915 shows memory of these in no file of the upstream kernel."""
    card = "/sys/bus/pci/devices/0000:03:00.0"
    changes = {f"{card}/device": {"text": f"{pci_id}\n"}, f"{card}/tile0/vram0/total_bytes": {"dir": True}}
    (only,) = devices("b580-unseen-by-xpu-smi", changes=changes)
    assert (only.memory_bytes, only.attributes["integrated"]) == (4 * GIB, False)


def test_gpu_that_no_runtime_serves_takes_no_number_and_says_so(devices):
    changes = {"/sys/bus/pci/devices/0000:00:02.0/device": {"text": "0x0412\n"}}
    (only,) = devices("uhd770-alone", changes=changes)
    assert only.attributes["level_zero"] is False
    assert "no release of Level Zero serves its generation" in only.health_reason


def test_the_machines_list_names_what_no_other_list_has(devices):
    queries = {"pci.ids/8086:020a": {"value": "Arctic Sound"}}
    (only,) = devices("unknown-product-020a", queries=queries)
    assert only.model == "Arctic Sound"
    assert plugin.anyaccel_tags(only) == ("Intel-GPU-Arctic-Sound",)
