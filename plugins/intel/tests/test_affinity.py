"""ZE_AFFINITY_MASK, value by value."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel_intel import plugin

A, B = "intel-0000:1a:00.0", "intel-0000:8a:00.0"


@pytest.mark.parametrize(
    ("mask", "tiles"),
    [
        ("0", [0]),
        ("1,0", [0, 1]),
        ("0x1", [1]),
        ("01", [1]),
        ("07,010", [7]),
        (" 1,\t0", [0, 1]),
        ("0-3", [0]),
        ("1abc", [1]),
        ("0,", [0]),
        ("1.", [1]),
        ("-1", []),
        ("4294967297", [1]),
    ],
)
def test_numbers_are_read_as_the_driver_reads_them(mask, tiles, devices):
    found = devices("max1550-4card")
    assert plugin.anyaccel_visible({"ZE_AFFINITY_MASK": mask}, found) == [found[tile].id for tile in tiles]


@pytest.mark.parametrize("mask", ["abc", "0,abc", ",0", "0,,1", ".", "0.1.2.3", "0..1", "all", "18446744073709551616"])
def test_masks_that_end_the_driver_are_refused_with_value_and_remedy(mask, devices):
    with pytest.raises(FaultError, match="ZE_AFFINITY_MASK must") as error:
        plugin.anyaccel_visible({"ZE_AFFINITY_MASK": mask}, devices("max1550-4card"))
    assert repr(mask) in error.value.fault.reason
    assert "unset ZE_AFFINITY_MASK" in error.value.fault.remedy


@pytest.mark.parametrize(
    ("mask", "ids"),
    [
        (None, None),
        ("", None),
        ("default", None),
        ("0", [A]),
        ("1,0", [A, B]),
        ("0,0", [A]),
        ("90", []),
        ("90,1", [B]),
        ("0x1", [B]),
        ("0.0,0.1", [A]),
        ("0.1", []),
        ("0.0.0,0.1", []),
        ("0.7", []),
    ],
)
def test_cards_are_visible_when_all_of_them_is(mask, ids, devices):
    environ = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"} | ({"ZE_AFFINITY_MASK": mask} if mask is not None else {})
    found = devices("max1550-2card-xelink-composite")
    assert plugin.anyaccel_visible(environ, found) == ids


@pytest.mark.parametrize(
    ("hierarchy", "mask", "tiles"),
    [
        ("FLAT", "0", [0]),
        ("FLAT", "3,1", [1, 3]),
        ("FLAT", "0.0", []),
        ("COMBINED", "2", [2]),
        ("COMBINED", "0.1", []),
        ("COMPOSITE", "0", [0, 1]),
        ("COMPOSITE", "1.0", [2]),
        ("COMPOSITE", "1.1,0.0", [0, 3]),
        (None, "2", [2]),
        ("nonsense", "2", [2]),
    ],
)
def test_tiles_are_counted_as_the_hierarchy_says(hierarchy, mask, tiles, devices):
    found = devices("max1550-2card-xelink")
    environ = {"ZE_AFFINITY_MASK": mask} | ({"ZE_FLAT_DEVICE_HIERARCHY": hierarchy} if hierarchy else {})
    assert plugin.anyaccel_visible(environ, found) == [found[tile].id for tile in tiles]


def test_single_tile_cards_have_a_tile_0_where_cards_are_counted(devices):
    found = devices("flex140-uhd770")
    assert plugin.anyaccel_visible({"ZE_AFFINITY_MASK": "1.0"}, found) == [found[1].id]


def test_unlisted_integrated_gpu_has_a_number_in_the_order_of_pci_addresses(devices):
    found = devices("two-a770-uhd770")
    environ = {"ZE_AFFINITY_MASK": "0,1", "ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
    assert plugin.anyaccel_visible(environ, found) == [found[0].id]
    assert plugin.anyaccel_visible({"ZE_AFFINITY_MASK": "0,1"}, found) == [device.id for device in found]
