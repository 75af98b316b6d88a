"""Products, tags and the contract with the core."""

import subprocess
import sys

from anyaccel.plugin import ContainerEdits
from anyaccel_tpu import plugin

PRODUCTS = {product.name: product for product in plugin.anyaccel_products()}
RAY_TAGS = ["TPU-V2", "TPU-V3", "TPU-V4", "TPU-V5LITEPOD", "TPU-V5P", "TPU-V6E", "TPU-V7X"]


def test_products_are_the_tags_of_ray():
    assert list(PRODUCTS) == RAY_TAGS


def test_no_alias_means_two_products():
    names = [name.lower() for product in PRODUCTS.values() for name in (product.name, *product.aliases)]
    assert len(set(names)) == len(names)


def test_machine_types_and_products_agree():
    for product in PRODUCTS.values():
        assert set(product.instance_types.values()) <= set(product.counts)


def test_tags_name_the_slice_type_in_both_spellings(detected):
    tags = plugin.anyaccel_tags(detected("tpu7x-16-gke-worker-1")[0])
    assert tags[0] == "TPU-V7X"
    assert {"v7x-16", "tpu7x-16"} <= set(tags)


def test_container_gets_every_node_and_the_vfio_node_once(detected):
    edits = plugin.anyaccel_container(detected("tpu7x-16-gke-worker-1")[:2])
    assert edits == ContainerEdits(nodes=("/dev/vfio/vfio", *(f"/dev/vfio/{number}" for number in range(4))))


def test_container_of_accel_chips_gets_their_nodes_alone(detected):
    assert plugin.anyaccel_container(detected("v3-8")[1:3]).nodes == ("/dev/accel1", "/dev/accel2")
    assert plugin.anyaccel_container([]).nodes == ()


def test_importing_the_plugin_loads_no_runtime_and_no_network_code():
    code = "import sys, anyaccel_tpu; print(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(out.stdout.split())
    assert "anyaccel_tpu" in loaded
    assert not loaded & {"libtpu", "jax", "torch_xla", "tpu_info", "http.client", "socket", "tomllib"}
