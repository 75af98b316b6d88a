"""Detection on machines unlike the recordings, which the conformance suite covers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from anyaccel.plugin import Health
from anyaccel_ascend import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
NAMES = sorted(path.name for path in RECORDINGS.iterdir())
PCI = "/sys/bus/pci/devices"
GIB = 1 << 30
MIB = 1 << 20


def functions(recording, *entries):
    """Add PCI functions: address, device id, driver or None, virtual or not."""
    for address, device, driver, virtual in entries:
        folder = f"{PCI}/{address}"
        files = {"vendor": "0x19e5", "device": device, "class": "0x120000"}
        recording["paths"] |= {f"{folder}/{name}": {"text": f"{text}\n"} for name, text in files.items()}
        links = {"driver": f"../../../bus/pci/drivers/{driver}" if driver else "", "physfn": "../x" if virtual else ""}
        recording["paths"] |= {f"{folder}/{name}": {"link": link} for name, link in links.items() if link}
    return recording


@pytest.mark.parametrize("name", NAMES)
def test_every_unhealthy_device_says_what_to_do(name):
    found = plugin.anyaccel_detect(context(load_recording(RECORDINGS / name)))
    for device in found.devices if found else ():
        assert (device.health is Health.UNHEALTHY) == bool(device.health_reason) == bool(device.health_remedy)


def test_in_a_container_numbers_begin_at_zero_and_ids_and_nodes_stay(devices):
    inside, outside = devices("910b4-container-2-of-8"), devices("910b4-8npu")
    assert [device.index for device in inside] == [0, 1]
    assert [(device.id, device.nodes) for device in inside] == [(device.id, device.nodes) for device in outside[4:6]]


def test_ids_and_nodes_do_not_change_when_a_card_drops(devices):
    before, after = (
        {device.id: device.nodes for device in devices(name)} for name in ("910a-8npu", "910a-card-dropped")
    )
    lost = "ascend-0000:62:00.0"
    assert after == {**before, lost: ()}


def test_without_npu_smi_root_knows_the_same_ids_as_npu_smi(devices):
    assert [device.id for device in devices("910b4-no-npu-smi-root")] == [
        device.id for device in devices("910b4-container-2-of-8")
    ]


def test_a_vnpu_in_its_container_has_the_ids_of_the_host(devices):
    (only,) = devices("310p3-vnpu-container")
    assert {only.id, only.parent} < {device.id for device in devices("310p3-vnpu-host")}


def test_a_vnpu_in_a_container_without_npu_smi_has_a_parent():
    recording = load_recording(RECORDINGS / "310p3-vnpu-container")
    recording["commands"] = []
    recording["paths"] = {path: entry for path, entry in recording["paths"].items() if not path.startswith(PCI)}
    (only,) = plugin.anyaccel_detect(context(recording)).devices
    assert (only.id, only.parent) == ("ascend-davinci0-vnpu102", "ascend-davinci0")


def test_closed_nodes_name_the_group():
    recording = load_recording(RECORDINGS / "910b2-8npu")
    for path, entry in recording["paths"].items():
        if re.fullmatch(r"/dev/davinci\d+", path):
            entry["access"] = ""
    found = plugin.anyaccel_detect(context(recording))
    assert {device.health for device in found.devices} == {Health.UNHEALTHY}
    assert "HwHiAiUser" in found.devices[0].health_remedy


def test_vnpus_whose_template_only_root_may_read_are_still_devices():
    recording = load_recording(RECORDINGS / "910b4-vnpu-host")
    recording["commands"] = [entry for entry in recording["commands"] if "info-vnpu" not in entry["argv"]]
    found = plugin.anyaccel_detect(context(recording)).devices
    assert [device.memory_bytes for device in found[8:]] == [None] * 4
    assert plugin.anyaccel_tags(found[8])[-1] == "vnpu"


def test_a_physical_number_without_a_source_stays_unknown():
    """A card is lost and its node remains: only root could map nodes to cards."""
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
            recording["paths"][f"{PCI}/{address}/{name}"] = {"text": f"{value}\n"}
    found = plugin.anyaccel_detect(context(recording)).devices
    assert [device.nodes for device in found[:4]] == [(f"/dev/davinci{number}",) for number in (0, 1, 2, 4)]


def test_cards_of_partners_count():
    recording = load_recording(RECORDINGS / "910b4-no-driver")
    recording["paths"][f"{PCI}/0000:42:00.0/vendor"] = {"text": "0x203f\n"}
    assert "ascend-0000:42:00.0" in [device.id for device in plugin.anyaccel_detect(context(recording)).devices]


@pytest.mark.parametrize("driver", [None, "vfio-pci", "devdrv_device_driver"])
@pytest.mark.parametrize("device", ["0xd805", "0xd802"])
@pytest.mark.parametrize("name", ["910b4-8npu", "910b4-npu-smi-hangs", "910b4-no-npu-smi", "910b4-no-driver"])
def test_virtual_functions_beside_their_card_are_no_devices(name, device, driver):
    plain = plugin.anyaccel_detect(context(load_recording(RECORDINGS / name)))
    split = functions(load_recording(RECORDINGS / name), ("0000:c1:00.1", device, driver, True))
    found = plugin.anyaccel_detect(context(split))
    assert found.devices == plain.devices
    told = [note for note in found.notes if note not in plain.notes]
    assert ["0000:c1:00.1" in note for note in told] == [True] * (driver == "vfio-pci")


def test_a_virtual_function_inside_a_virtual_machine_is_a_device():
    machine = {"paths": {}, "commands": []}
    inside = functions(
        {**load_recording(RECORDINGS / "910b4-no-driver"), **machine}, ("0000:00:07.0", "0xd805", "", False)
    )
    assert [device.id for device in plugin.anyaccel_detect(context(inside)).devices] == ["ascend-0000:00:07.0"]


def test_a_card_for_a_virtual_machine_does_not_hide_a_chip_that_cannot_be_read():
    """A card is bound to vfio-pci, another is listed and unread: the addresses are not confused."""
    recording = functions(load_recording(RECORDINGS / "910b2-faults"), ("0000:e1:00.0", "0xd802", "vfio-pci", False))
    found = {device.id: device for device in plugin.anyaccel_detect(context(recording)).devices}
    assert len(found) == 9
    assert "cannot read it" in found["ascend-0000:42:00.0"].health_reason
    assert "for a virtual machine" in found["ascend-0000:e1:00.0"].health_reason
