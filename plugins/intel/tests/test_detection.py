"""GPUs by their files, state by state."""

from __future__ import annotations

import pytest
from anyaccel.plugin import Health
from anyaccel_intel import STARTED, WEDGED, plugin

GIB = 1 << 30
KERNEL_LOG = f"dmesg/{WEDGED}|{STARTED}"
FIRST = "/sys/bus/pci/devices/0000:03:00.0"


@pytest.mark.parametrize(
    ("name", "reason", "remedy"),
    [
        ("b580-old-kernel", "no driver is bound to it", "Linux 6.12"),
        ("flex170-no-permission", "you may not open /dev/dri/renderD128", "join the group"),
        ("b580-wedged", "wedged", "/sys/bus/pci/drivers/xe"),
        ("flex170-sriov-4vf", "divided into 4 virtual functions", "sriov_numvfs"),
    ],
)
def test_a_card_that_cannot_be_used_is_listed_with_the_reason(name, reason, remedy, devices):
    first = devices(name)[0]
    assert first.health is Health.UNHEALTHY
    assert reason in first.health_reason
    assert remedy in first.health_remedy


def test_a_card_that_was_bound_again_after_it_was_wedged_is_healthy(devices):
    log = (
        "xe 0000:03:00.0: [drm] *ERROR* CRITICAL: Xe has declared device 0000:03:00.0 as wedged.\n"
        "[drm] Initialized xe 1.1.0 for 0000:03:00.0 on minor 1\n"
    )
    queries = {KERNEL_LOG: {"value": log}}
    assert devices("b580-wedged", queries=queries)[0].health is Health.HEALTHY


@pytest.mark.parametrize("queries", [{KERNEL_LOG: {"value": ""}}, {}])
def test_an_unreadable_kernel_log_blames_no_gpu(queries, devices):
    assert devices("b580-wedged", queries=queries)[0].health is Health.HEALTHY


def test_integrated_gpu_stays_out_beside_a_discrete_one_of_any_vendor(detected):
    for name in ("two-a770-uhd770", "uhd770-beside-other-card"):
        found = detected(name)
        assert not any(device.attributes["integrated"] for device in found.devices)
        assert "ANYACCEL_INTEL_INTEGRATED=1" in found.notes[0]


def test_integrated_gpu_alone_is_listed_without_memory_of_its_own(devices):
    (only,) = devices("uhd770-alone")
    assert only.attributes["integrated"] is True
    assert only.memory_bytes is None


def test_integrated_gpu_is_listed_on_demand_and_counted_last(devices):
    found = devices("two-a770-uhd770", environ={"ANYACCEL_INTEL_INTEGRATED": "1"})
    assert [device.pci_bus_id for device in found] == ["0000:03:00.0", "0000:08:00.0", "0000:00:02.0"]


def test_integrated_gpu_is_counted_first_when_the_pci_address_decides(devices):
    found = devices("two-a770-uhd770-pci-order")
    assert [(device.index, device.pci_bus_id) for device in found] == [
        (0, "0000:00:02.0"),
        (1, "0000:03:00.0"),
        (2, "0000:08:00.0"),
    ]


def test_unlisted_integrated_gpu_keeps_its_number_when_the_pci_address_decides(devices):
    # The runtime still counts the integrated GPU at 00:02.0 as number 0.
    found = devices("two-a770-uhd770", environ={"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"})
    assert [device.index for device in found] == [1, 2]


def test_virtual_functions_of_an_integrated_gpu_are_no_gpus(devices):
    assert [device.id for device in devices("panther-lake-b390-7vf")] == ["intel-0000:00:02.0"]


def test_b390_is_integrated_and_not_taken_for_a_card(devices):
    (only,) = devices("panther-lake-b390-7vf")
    assert plugin.anyaccel_tags(only) == ("Intel-iGPU-Arc-B390", "Intel-iGPU")


def test_card_in_a_virtual_machine_is_discrete_although_on_bus_0(devices):
    (only,) = devices("b580-in-vm")
    assert only.attributes["integrated"] is False
    assert only.memory_bytes == 12809404416


@pytest.mark.parametrize(("flags", "integrated"), [("fpu vme", True), ("fpu hypervisor", False)])
def test_unknown_product_at_the_reserved_address_is_integrated_outside_of_virtual_machines(flags, integrated, devices):
    changes = {
        "/sys/bus/pci/devices/0000:00:02.0/device": {"text": "0xffff\n"},
        "/proc/cpuinfo": {"text": f"processor\t: 0\nflags\t\t: {flags}\n"},
    }
    (only,) = devices("uhd770-alone", changes=changes)
    assert only.attributes["integrated"] is integrated
    assert only.health is Health.UNKNOWN


def test_virtual_functions_of_a_card_are_given_out_in_its_place(devices):
    physical, *virtual = devices("flex170-sriov-4vf")
    assert physical.health is Health.UNHEALTHY
    assert [device.parent for device in virtual] == [physical.id] * 4
    assert [device.memory_bytes for device in virtual] == [500 << 20] * 4
    assert all(device.health is Health.HEALTHY for device in virtual)


def test_functions_of_virtual_machines_are_not_ours_and_are_mentioned(detected):
    found = detected("flex170-sriov-4vf-in-vms")
    assert [device.id for device in found.devices] == ["intel-0000:4d:00.0"]
    assert len(found.notes) == 4
    assert "vfio-pci" in found.notes[0]


def test_one_damaged_card_does_not_hide_or_renumber_the_others(detected):
    found = detected("flex170-damaged-files")
    assert [device.health for device in found.devices] == [
        Health.HEALTHY,
        Health.UNHEALTHY,
        Health.UNHEALTHY,
        Health.HEALTHY,
    ]
    assert [device.index for device in found.devices] == [0, 1, 2, 3]
    assert found.partial
    assert "lmem_total_bytes must hold a number (got 'fourteen')" in found.devices[1].health_reason


def test_card_without_device_node_takes_no_number_of_the_runtime(devices):
    # A plain file in place of the node: the container got the other card.
    changes = {"/dev/dri/renderD128": {}, "/dev/dri/renderD129": {"char": [226, 129], "access": "rw"}}
    found = devices("flex170-container-one-of-two", changes=changes)
    assert [(device.index, device.health) for device in found] == [(0, Health.HEALTHY), (1, Health.UNHEALTHY)]
    assert found[0].id == "intel-0000:04:00.0"


def test_card_without_a_link_by_path_is_not_seen_by_the_runtime(devices):
    changes = {"/dev/dri/by-path/pci-0000:03:00.0-render": {"link": "../renderD128"}}
    found = devices(
        "flex170-container-one-of-two",
        changes={**changes, "/dev/dri/renderD129": {"char": [226, 129], "access": "rw"}},
    )
    assert "/dev/dri/by-path has no link" in found[1].health_reason


def test_damaged_device_id_is_an_error_not_a_wrong_product(devices):
    with pytest.raises(ValueError, match=r"0000:00:10\.0/device must hold a PCI id"):
        devices("b580-in-vm", changes={"/sys/bus/pci/devices/0000:00:10.0/device": {"text": "what\n"}})


def test_connectors_in_the_folder_of_a_card_are_no_device_nodes(devices):
    # Connectors are named like card nodes, with a suffix.
    changes = {f"{FIRST}/drm/card1-DP-1": {"dir": True}}
    (only,) = devices("b580-unseen-by-xpu-smi", changes=changes)
    assert only.nodes == ("/dev/dri/renderD128", "/dev/dri/card1")


def test_pci_window_is_never_taken_for_memory(devices):
    # A small window of 256 MiB, on a card with 12 GiB.
    changes = {f"{FIRST}/resource": {"text": "0x0 0x0 0x0\n0x0 0x0 0x0\n0x4000000000 0x400fffffff 0x14220c\n"}}
    (only,) = devices("b580-unseen-by-xpu-smi", changes=changes)
    assert only.memory_bytes == 12 * GIB


def test_tiles_are_devices_with_a_share_of_the_memory_of_their_card(devices):
    found = devices("max1550-4card")
    assert len(found) == 8
    assert {device.memory_bytes for device in found} == {64 * GIB}
    assert [device.parent for device in found[:3]] == [
        "intel-0000:1a:00.0",
        "intel-0000:1a:00.0",
        "intel-0000:3a:00.0",
    ]


@pytest.mark.parametrize(
    ("hierarchy", "count"), [("COMPOSITE", 4), ("FLAT", 8), ("COMBINED", 8), ("composite", 8), ("", 8)]
)
def test_hierarchy_of_the_environment_decides_between_cards_and_tiles(hierarchy, count, devices):
    assert len(devices("max1550-4card", environ={"ZE_FLAT_DEVICE_HIERARCHY": hierarchy})) == count


def test_mask_that_names_tiles_leaves_parts_of_cards_to_us(devices):
    # The launcher's mask names tile 0 of card 1; that tile alone is left to give out.
    found = devices("max1550-2card-masked-tile")
    environ = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": "1.0"}
    assert plugin.anyaccel_visible(environ, found) == ["intel-0000:8a:00.0-tile0"]


def test_xe_links_are_joined_by_pci_address(devices):
    found = {device.id: device for device in devices("max1550-2card-xelink")}
    links = found["intel-0000:1a:00.0-tile0"].links
    assert links["intel-0000:1a:00.0-tile1"] > links["intel-0000:8a:00.0-tile1"] > links["intel-0000:8a:00.0-tile0"] > 0


def test_two_gpus_behind_one_switch_are_linked(devices):
    left, right = devices("flex140-uhd770")
    assert left.links == {right.id: 10}


def test_driver_version_is_that_of_the_module(detected):
    changes = {"/sys/module/i915/version": {"text": "1.23.10.72\n"}}
    assert detected("flex140-uhd770", changes=changes).driver_version == "1.23.10.72"
    assert detected("flex140-uhd770").driver_version == ""
