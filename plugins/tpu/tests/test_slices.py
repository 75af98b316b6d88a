"""Accelerator types, the shapes of their slices, and Ray's names for them."""

import anyaccel_tpu
import pytest
from anyaccel_tpu import pod_type, ray_labels, ray_resources, slice_shape


@pytest.mark.parametrize(
    ("accelerator_type", "chips", "hosts", "topology"),
    [
        ("v2-8", 4, 1, "2x2"),
        ("v3-8", 4, 1, "2x2"),
        ("v2-32", 16, 4, "4x4"),
        ("v3-128", 64, 16, "8x8"),
        ("v2-256", 128, 32, "8x16"),
        ("v3-512", 256, 64, "16x16"),
        ("v3-1024", 512, 128, "16x32"),
        ("v3-2048", 1024, 256, "32x32"),
        ("v4-8", 4, 1, "2x2x1"),
        ("v5p-8", 4, 1, "2x2x1"),
        ("tpu7x-8", 4, 1, "2x2x1"),
        ("v7x-8", 4, 1, "2x2x1"),
        ("v4-16", 8, 2, "2x2x2"),
        ("v5p-32", 16, 4, "2x2x4"),
        ("tpu7x-16", 8, 2, "2x2x2"),
        ("tpu7x-64", 32, 8, "2x4x4"),
        ("v5p-128", 64, 16, "4x4x4"),
        ("v4-256", 128, 32, "4x4x8"),
        ("v5p-512", 256, 64, "4x8x8"),
        ("tpu7x-1024", 512, 128, "8x8x8"),
        ("v4-2048", 1024, 256, None),
        ("v5p-17920", 8960, 2240, None),
        ("tpu7x-2", 1, 1, "1x1x1"),
        ("v5litepod-1", 1, 1, "1x1"),
        ("v5e-4", 4, 1, "2x2"),
        ("v6e-4", 4, 1, "2x2"),
        ("v6e-8", 8, 1, "2x4"),
        ("v5litepod-16", 16, 4, "4x4"),
        ("v6e-32", 32, 8, "4x8"),
        ("v5litepod-256", 256, 64, "16x16"),
    ],
)
def test_shape_of_a_slice(accelerator_type, chips, hosts, topology):
    shape = slice_shape(accelerator_type)
    assert (shape.chips, shape.hosts, shape.topology) == (chips, hosts, topology)


@pytest.mark.parametrize(("chips_per_vm", "hosts"), [(None, 1), (8, 1), (4, 2)])
def test_eight_chips_are_one_host_or_two_as_the_host_says(chips_per_vm, hosts):
    assert slice_shape("v6e-8", chips_per_vm).hosts == hosts


@pytest.mark.parametrize(
    ("accelerator_type", "words"),
    [
        ("h100-8", "a TPU accelerator type must be GENERATION-NUMBER"),
        ("v4", "a TPU accelerator type must be GENERATION-NUMBER"),
        ("v4-0", "a TPU accelerator type must be GENERATION-NUMBER"),
        ("v9z-8", "a TPU accelerator type must be GENERATION-NUMBER"),
        ("v4-9", "counts TensorCores, 2 per chip"),
        ("v6e-3", "one host of TPU v6e has 1, 4, 8 chips"),
        ("v6e-18", "a multiple of 4 chips"),
        ("v6e-512", "at most 256 chips"),
        ("v4-136", "whole 4x4x4 cubes"),
        ("v4-16384", "at most 4096 chips"),
        ("tpu8i-8", "not published"),
    ],
)
def test_a_slice_that_cannot_exist_says_which_rule_it_breaks(accelerator_type, words):
    with pytest.raises(ValueError, match=words):
        slice_shape(accelerator_type)


@pytest.mark.parametrize(
    ("accelerator_type", "written"),
    [("tpu7x-16", "v7x-16"), ("TPU7x-16", "v7x-16"), ("v6e-16", "v6e-16"), ("v5litepod-4", "v5litepod-4")],
)
def test_pod_type_is_written_as_ray_does(accelerator_type, written):
    assert pod_type(accelerator_type) == written


def _host(tree, worker, name="slice-a"):
    for index in range(4):
        tree.pci(f"0000:00:0{index + 4}.0", "0x005e")
        tree.node(f"/dev/accel{index}")
    environ = {"TPU_ACCELERATOR_TYPE": "v4-16", "TPU_WORKER_ID": worker, "TPU_SKIP_MDS_QUERY": "1"}
    return tree.detect({**environ, "TPU_NAME": name} if name else environ).devices


def test_head_resource_is_on_worker_0(tree):
    assert ray_resources(_host(tree, "0")) == {"slice-a": 1.0, "TPU-v4-16-head": 1.0}


def test_head_resource_is_on_no_other_worker(tree):
    assert ray_resources(_host(tree, "1")) == {"slice-a": 1.0}


def test_no_slice_resource_where_a_fact_is_missing(tree):
    assert ray_resources(_host(tree, "0", name=None)) == {}
    assert ray_resources(()) == {}


def test_labels_are_those_of_ray(detected):
    assert ray_labels(detected("tpu7x-16-gke-worker-1")) == {
        "ray.io/tpu-worker-id": "1",
        "ray.io/tpu-topology": "2x2x2",
        "ray.io/tpu-pod-type": "v7x-16",
    }
    assert ray_labels(()) == {}


@pytest.mark.parametrize(
    ("machine_type", "expected"),
    [
        ("ct3-hightpu-4t", ("TPU-V3", 4)),
        ("ct4p-hightpu-4t", ("TPU-V4", 4)),
        ("ct5lp-hightpu-1t", ("TPU-V5LITEPOD", 1)),
        ("ct5lp-hightpu-8t", ("TPU-V5LITEPOD", 8)),
        ("ct5p-hightpu-2t", ("TPU-V5P", 2)),
        ("ct6e-standard-8t", ("TPU-V6E", 8)),
        ("tpu7x-standard-4t", ("TPU-V7X", 4)),
    ],
)
def test_machine_types_name_tag_and_chips(machine_type, expected):
    products = anyaccel_tpu.anyaccel_products()
    known = {name: (each.name, count) for each in products for name, count in each.instance_types.items()}
    assert known[machine_type] == expected
