"""Products, their tags, and machines simulated from them."""

from __future__ import annotations

import re
from itertools import chain, combinations

import anyaccel_intel as plugin
import pytest
from anyaccel.plugin import Device, EnvContext
from anyaccel_intel.products import BY_ID, MODELS

GIB = 1 << 30
PRODUCTS = plugin.anyaccel_products()


def simulated(product, count: int) -> tuple[Device, ...]:
    """Devices as the core simulates them from a product."""
    addresses = [f"0000:{index + 1:02x}:00.0" for index in range(count)]
    return tuple(
        Device(
            id=product.id_template.format(pci=pci, index=index, uuid="unused"),
            index=index,
            model=product.model,
            memory_bytes=product.memory_bytes,
            pci_bus_id=pci,
            nodes=tuple(node.format(index=index) for node in product.node_templates),
            attributes=product.attributes,
        )
        for index, pci in enumerate(addresses)
    )


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_first_tag_of_a_simulated_device_is_the_name_of_its_product(product):
    for device in simulated(product, product.counts[-1]):
        found = plugin.anyaccel_tags(device)
        assert found[0] == product.name
        assert set(product.aliases) <= set(found)
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+", tag) for tag in found)


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
def test_subsets_of_a_simulated_machine_come_back_from_their_environment(product):
    devices = simulated(product, min(product.counts[-1], 5))
    for chosen in chain.from_iterable(combinations(devices, count) for count in range(len(devices) + 1)):
        edits = plugin.anyaccel_env(chosen, EnvContext(devices=devices))
        assert plugin.anyaccel_visible(edits.set, devices) == [device.id for device in chosen]


def test_simulated_tiles_count_as_on_a_default_machine():
    (product,) = [product for product in PRODUCTS if product.name == "Intel-GPU-Max-1550"]
    devices = simulated(product, 4)
    edits = plugin.anyaccel_env(devices[2:3], EnvContext(devices=devices))
    assert edits.set["ZE_AFFINITY_MASK"] == "2"
    assert edits.set["ZE_FLAT_DEVICE_HIERARCHY"] == "FLAT"
    assert product.memory_bytes == 64 * GIB


def test_product_names_and_pci_ids_are_unique():
    assert len({product.name for product in PRODUCTS}) == len(PRODUCTS)
    assert len(BY_ID) == sum(len(model.ids) for model in MODELS)


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
        (0xB087, "Intel-iGPU-Arc-B390", set()),
        (0x7D55, "Intel-iGPU-Arc", set()),
        (0xA780, "Intel-iGPU-UHD-770", set()),
        (0xA7A0, "Intel-iGPU-Iris-Xe", set()),
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
    ],
)
def test_unknown_pci_id_is_tagged_by_name_without_decoration(model, tag):
    device = Device(id="x", index=0, model=model, attributes={"device_id": "0x020a"})
    assert plugin.anyaccel_tags(device)[0] == tag


@pytest.mark.parametrize(("memory", "tag"), [(16225243136, "-16GB"), (8 * GIB - 300_000_000, "-8GB")])
def test_product_of_two_sizes_says_which(memory, tag):
    device = Device(id="x", index=0, model="", memory_bytes=memory, attributes={"device_id": "0x56a0"})
    assert plugin.anyaccel_tags(device)[-1] == f"Intel-GPU-Arc-A770{tag}"


def test_b580_is_discrete_and_b390_is_not():
    integrated = {model.tag: model.integrated for model in MODELS}
    assert integrated["Intel-GPU-Arc-B580"] is False
    assert integrated["Intel-GPU-Arc-A580"] is False
    assert integrated["Intel-iGPU-Arc-B390"] is True
