"""Accelerator types, the shapes of their slices, and Ray's names for them."""

import pytest
from anyaccel_tpu import plugin, pod_type, slice_shape


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
    products = plugin.anyaccel_products()
    known = {name: (each.name, count) for each in products for name, count in each.instance_types.items()}
    assert known[machine_type] == expected
