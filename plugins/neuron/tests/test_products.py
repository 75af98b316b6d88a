"""Products, tags and instance types."""

import pytest
from anyaccel.plugin import Device
from anyaccel_neuron import plugin

PRODUCTS = plugin.anyaccel_products()
NAMED = {alias: product for product in PRODUCTS for alias in product.aliases}


def test_no_two_products_share_an_alias():
    assert len(NAMED) == sum(len(product.aliases) for product in PRODUCTS)


@pytest.mark.parametrize(
    ("alias", "gib", "counts"),
    [
        ("inferentia", 2, (4, 16, 64)),
        ("inf2", 16, (2, 12, 24)),
        ("trainium1", 16, (2, 32)),
        ("trainium2", 24, (4, 64)),
        ("trainium2-lnc1", 12, (8, 128)),
        ("trn3", 36, (16, 64)),
        ("trainium3-lnc1", 18, (32, 128)),
    ],
)
def test_products_have_the_memory_and_shapes_of_the_documentation(alias, gib, counts):
    assert (NAMED[alias].memory_bytes, NAMED[alias].counts) == (gib << 30, counts)


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.aliases[0])
def test_the_cores_of_a_simulated_machine_are_on_whole_chips(product):
    devices = [
        Device(id=f"core-{index}", index=index, model=product.model, attributes=product.attributes)
        for index in range(product.counts[-1])
    ]
    nodes = plugin.anyaccel_container(devices).nodes
    assert len(nodes) * product.attributes["cores_per_device"] == len(devices)


@pytest.mark.parametrize(
    ("instance_type", "cores"),
    [
        # The seven that Ray counts (ray/_private/accelerators/neuron.py), and those that it does not know.
        ("trn1.2xlarge", 2),
        ("trn1.32xlarge", 32),
        ("trn1n.32xlarge", 32),
        ("inf2.xlarge", 2),
        ("inf2.8xlarge", 2),
        ("inf2.24xlarge", 12),
        ("inf2.48xlarge", 24),
        ("inf1.24xlarge", 64),
        ("trn2.3xlarge", 4),
        ("trn2.48xlarge", 64),
    ],
)
def test_instance_types_have_rays_counts_where_ray_knows_them(instance_type, cores):
    (product,) = (each for each in PRODUCTS if instance_type in each.instance_types)
    assert product.instance_types[instance_type] == cores
    assert cores in product.counts
    assert instance_type.startswith(product.attributes["family"])


def test_a_core_of_an_unknown_chip_has_the_common_tag_only():
    device = Device(id="neuron-x-nc0", index=0, model="NeuronDevice", attributes={"cores_per_device": 2})
    assert plugin.anyaccel_tags(device) == ("aws-neuron-core",)


def test_the_resource_is_rays():
    info = plugin.anyaccel_info()
    assert (info.vendor, info.resource, info.kind) == ("neuron", "neuron_cores", "neuron")
