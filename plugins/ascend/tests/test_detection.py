"""What detection makes of recorded machines, fact by fact."""

from __future__ import annotations

import re
from pathlib import Path

import anyaccel_ascend as plugin
import pytest
from anyaccel.plugin import Health
from anyaccel.testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
GIB = 1 << 30
MIB = 1 << 20


def by_index(devices):
    return {device.index: device for device in devices}


def test_a_machine_without_ascend_hardware_is_absent(recorded):
    assert plugin.anyaccel_detect(recorded("huawei-server-without-npu")) is None


def test_a_driver_without_npu_is_present_and_empty(detected):
    found = detected("driver-without-npu")
    assert found.devices == ()
    assert found.driver_version == "25.2.0"


def test_network_cards_and_consoles_of_the_same_vendor_are_no_npus(devices):
    assert len(devices("910b4-8npu")) == 8


def test_order_is_the_runtimes_and_not_that_of_pci_addresses(devices):
    found = devices("910b2-8npu")
    assert [device.index for device in found] == list(range(8))
    assert [device.pci_bus_id for device in found[:3]] == ["0000:c1:00.0", "0000:01:00.0", "0000:c2:00.0"]
    assert [device.numa_node for device in found] == [6, 0, 6, 0, 4, 2, 4, 2]


def test_bus_ids_are_compared_in_lower_case(devices):
    first = devices("910b4-8npu")[0]
    assert (first.id, first.pci_bus_id, first.numa_node) == ("ascend-0000:c1:00.0", "0000:c1:00.0", 6)


def test_nodes_beyond_nine_are_found_and_sorted_as_numbers(devices):
    found = devices("910c-16die")
    assert [device.nodes for device in found] == [(f"/dev/davinci{number}",) for number in range(16)]


def test_mcu_rows_are_no_devices(devices):
    assert {device.model for device in devices("910b4-8npu")} == {"910B4"}
    assert {device.model for device in devices("310p3-duo-4card")} == {"310P3"}


def test_both_dies_of_an_a3_package_are_devices_with_their_own_address(devices):
    first, second = devices("910c-16die")[:2]
    assert (first.id, second.id) == ("ascend-0000:9d:00.0", "ascend-0000:9f:00.0")
    assert (first.attributes["card"], second.attributes["card"]) == (0, 0)
    assert first.memory_bytes == second.memory_bytes == 64 * GIB


def test_a3_dies_of_a_package_are_linked_best(devices):
    found = devices("910c-16die")
    assert found[0].links[found[1].id] > found[0].links[found[2].id] > 0


def test_an_a3_is_recognized_by_its_pci_id_although_its_name_is_that_of_an_older_chip(devices):
    assert devices("910c-16die")[0].model == "Ascend910"
    assert plugin.anyaccel_tags(devices("910c-16die")[0])[0] == "Ascend910C"


def test_a_die_that_npu_smi_shows_twice_is_one_device(devices):
    (only,) = devices("910c-container-one-die")
    assert (only.id, only.index) == ("ascend-0000:9d:00.0", 0)


def test_two_chips_behind_one_address_are_told_apart_and_have_ddr(devices):
    first, second = devices("310p3-duo")
    assert (first.id, second.id) == ("ascend-0000:01:00.0-0", "ascend-0000:01:00.0-1")
    assert (first.memory_bytes, second.memory_bytes) == (44280 * MIB, 43693 * MIB)
    assert (first.attributes["card"], second.attributes["card"]) == (2, 2)


def test_card_numbers_with_holes_are_not_indexes(devices):
    found = devices("310p3-duo-4card")
    assert [device.attributes["card"] for device in found] == [1, 1, 2, 2, 4, 4, 5, 5]
    assert [device.index for device in found] == list(range(8))


def test_910a_with_hbm_and_ddr_counts_hbm_and_links_its_two_groups(devices):
    found = devices("910a-8npu")
    assert {device.memory_bytes for device in found} == {32 * GIB}
    assert set(found[0].links) == {device.id for device in found[1:4]}


def test_in_a_container_numbers_begin_at_zero_and_ids_and_nodes_stay(devices):
    inside, outside = devices("910b4-container-2-of-8"), by_index(devices("910b4-8npu"))
    assert [device.index for device in inside] == [0, 1]
    assert [device.id for device in inside] == [outside[4].id, outside[5].id]
    assert [device.nodes for device in inside] == [("/dev/davinci4",), ("/dev/davinci5",)]
    assert [device.attributes["phy_id"] for device in inside] == [4, 5]


def test_a_container_without_npus_says_how_to_mount_them(detected):
    found = detected("910b4-container-without-npus")
    assert found.devices == ()
    assert "ASCEND_VISIBLE_DEVICES" in found.notes[0]


def test_a_dropped_card_is_listed_and_the_others_keep_their_nodes(devices):
    found = devices("910a-card-dropped")
    assert [device.nodes for device in found[:7]] == [(f"/dev/davinci{number}",) for number in (0, 1, 2, 4, 5, 6, 7)]
    lost = found[7]
    assert (lost.id, lost.health, lost.nodes) == ("ascend-0000:62:00.0", Health.UNHEALTHY, ())
    assert "lost it" in lost.health_reason


def test_ids_do_not_change_when_a_card_drops(devices):
    assert {device.id for device in devices("910a-8npu")} == {device.id for device in devices("910a-card-dropped")}


def test_minor_faults_stay_usable_and_others_do_not(detected):
    found = by_index(detected("910b2-faults").devices)
    assert [found[index].health.value for index in range(8)] == [
        "healthy",
        "healthy",
        "unhealthy",
        "healthy",
        "unhealthy",
        "healthy",
        "unhealthy",
        "unhealthy",
    ]
    assert found[7].id == "ascend-0000:42:00.0"
    assert detected("910b2-faults").partial
    assert any("minor fault" in note for note in detected("910b2-faults").notes)
    assert any("driver package" in note for note in detected("910b2-faults").notes)


def test_the_columns_of_the_950_are_read_by_their_headers(detected):
    found = detected("950pr-3npu")
    assert [device.memory_bytes for device in found.devices] == [131072 * MIB, 131072 * MIB, 114688 * MIB]
    assert [device.index for device in found.devices] == [0, 1, 2]
    assert found.partial
    assert "unavailable: 1" in found.notes[0]


def test_npus_without_pci_go_by_their_node(devices):
    found = devices("950dt-ub-8npu")
    assert [device.id for device in found] == [f"ascend-davinci{number}" for number in range(8)]
    assert {device.pci_bus_id for device in found} == {None}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("910b4-occupied", "occupied by another container"),
        ("910b4-driver-broken", "did not initialize"),
        ("910b4-npu-smi-hangs", "does not answer"),
        ("910b2-no-permission", "HwHiAiUser"),
        ("910b4-no-driver", "driver is not loaded"),
    ],
)
def test_npus_of_which_nothing_can_be_learned_are_listed_with_the_reason(devices, name, words):
    found = devices(name)
    assert found
    assert {device.health for device in found} == {Health.UNHEALTHY}
    assert sum(words in device.health_reason for device in found) >= len(found) - 1


def test_an_npu_of_a_virtual_machine_is_told_from_one_without_driver(devices):
    assert [device.id for device in devices("910b4-no-driver") if "vfio-pci" in device.health_reason] == [
        "ascend-0000:c1:00.0"
    ]


def test_an_occupied_container_lists_its_own_npus_and_not_those_of_the_host(devices):
    assert [device.nodes for device in devices("910b4-occupied")] == [("/dev/davinci4",), ("/dev/davinci5",)]


def test_without_npu_smi_nodes_are_devices_of_unknown_health(detected):
    found = detected("910b4-no-npu-smi")
    assert [(device.id, device.index) for device in found.devices] == [("ascend-davinci4", 0), ("ascend-davinci5", 1)]
    assert {(device.health, device.memory_bytes) for device in found.devices} == {(Health.UNKNOWN, None)}
    assert found.partial
    assert "npu-smi is not here" in found.notes[0]


def test_without_npu_smi_root_knows_the_same_ids_as_npu_smi(devices):
    assert [device.id for device in devices("910b4-no-npu-smi-root")] == [
        device.id for device in devices("910b4-container-2-of-8")
    ]


def test_closed_nodes_name_the_group():
    recording = load_recording(RECORDINGS / "910b2-8npu")
    for path, entry in recording["paths"].items():
        if re.fullmatch(r"/dev/davinci\d+", path):
            entry["access"] = ""
    found = plugin.anyaccel_detect(context(recording))
    assert {device.health for device in found.devices} == {Health.UNHEALTHY}
    assert "HwHiAiUser" in found.devices[0].health_reason


def test_vnpus_of_a_host_are_devices_with_a_parent_that_cannot_be_used_whole(devices):
    parent, *parts = devices("310p3-vnpu-host")
    assert parent.health is Health.UNHEALTHY
    assert "split into the vNPUs 100, 101, 102" in parent.health_reason
    assert {device.parent for device in parts} == {parent.id}
    assert [device.nodes for device in parts] == [(f"/dev/vdavinci{number}",) for number in (100, 101, 102)]
    assert [device.memory_bytes for device in parts] == [2690 * MIB, 5381 * MIB, 10763 * MIB]
    assert {device.health for device in parts} == {Health.HEALTHY}


def test_vnpus_belong_to_the_chip_that_their_number_says(devices):
    found = devices("910b4-vnpu-host")
    parents = {device.attributes["vnpu_id"]: device.parent for device in found if "vnpu_id" in device.attributes}
    assert parents == {100: found[0].id, 101: found[0].id, 116: found[1].id, 117: found[1].id}
    assert {device.memory_bytes for device in found[8:]} == {16 * GIB}


def test_a_vnpu_in_its_container_is_an_ordinary_number_with_a_parent(devices):
    (only,) = devices("310p3-vnpu-container")
    assert (only.index, only.nodes) == (0, ("/dev/davinci102",))
    assert only.memory_bytes == 10763 * MIB
    host = {device.id for device in devices("310p3-vnpu-host")}
    assert only.id in host
    assert only.parent in host


def test_vnpus_whose_template_only_root_may_read_are_still_devices():
    recording = load_recording(RECORDINGS / "910b4-vnpu-host")
    recording["commands"] = [entry for entry in recording["commands"] if "info-vnpu" not in entry["argv"]]
    found = plugin.anyaccel_detect(context(recording)).devices
    assert [device.memory_bytes for device in found[8:]] == [None] * 4
    assert plugin.anyaccel_tags(found[8])[-1] == "vnpu"


def test_a_physical_number_that_nobody_tells_stays_unknown():
    """A card is lost and its node is still there: which of the nodes is whose, only root could say."""
    recording = load_recording(RECORDINGS / "910a-card-dropped")
    recording["paths"]["/dev/davinci3"] = {"char": [236, 3]}
    found = plugin.anyaccel_detect(context(recording)).devices
    assert {device.nodes for device in found} == {()}
    assert not any("phy_id" in device.attributes for device in found)
    assert [device.index for device in found if device.health is Health.HEALTHY] == [0, 1, 2, 3, 5, 6]


def test_root_knows_the_physical_number_in_that_case():
    recording = load_recording(RECORDINGS / "910a-card-dropped")
    recording["paths"]["/dev/davinci3"] = {"char": [236, 3]}
    addresses = [device.pci_bus_id for device in plugin.anyaccel_detect(context(recording)).devices]
    for address, number in zip(addresses, (0, 1, 2, 4, 5, 6, 7, 3), strict=True):
        for name, value in (("dev_id", number), ("davinci_dev_num", 1)):
            recording["paths"][f"/sys/bus/pci/devices/{address}/{name}"] = {"text": f"{value}\n"}
    found = plugin.anyaccel_detect(context(recording)).devices
    assert [device.nodes for device in found[:4]] == [(f"/dev/davinci{number}",) for number in (0, 1, 2, 4)]


def test_partner_cards_count_and_virtual_functions_only_where_they_are_alone():
    recording = load_recording(RECORDINGS / "910b4-no-driver")
    base = "/sys/bus/pci/devices"
    recording["paths"][f"{base}/0000:42:00.0/vendor"] = {"text": "0x203f\n"}
    extra = {"vendor": "0x19e5", "device": "0xd805", "class": "0x120000"}
    recording["paths"] |= {f"{base}/0000:42:00.1/{name}": {"text": f"{text}\n"} for name, text in extra.items()}
    ids = [device.id for device in plugin.anyaccel_detect(context(recording)).devices]
    assert "ascend-0000:42:00.0" in ids
    assert "ascend-0000:42:00.1" not in ids
    alone = {path: entry for path, entry in recording["paths"].items() if "0000:42:00.1" in path}
    assert [device.id for device in plugin.anyaccel_detect(context({**recording, "paths": alone})).devices] == [
        "ascend-0000:42:00.1"
    ]
