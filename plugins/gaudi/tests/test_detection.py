"""Detection against directory trees and real programs named hl-smi."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from anyaccel.model import Device, Health
from anyaccel_gaudi import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
IDENTITY = "bus_id,index,module_id,name,serial,uuid,memory.total"


def detect(machine, seconds: float | None = None):
    detected = plugin.anyaccel_detect(machine.context(seconds))
    assert detected is not None
    return detected


def only(machine, seconds: float = 10.0) -> Device:
    (device,) = detect(machine, seconds).devices
    return device


def test_sysfs_alone_answers_and_hl_smi_is_not_run(machine) -> None:
    machine.hpu("0000:19:00.0", minor=3, module_id="5", numa_node="1")
    machine.hl_smi(f"touch {machine.tree}/ran")

    device = only(machine)

    assert device.id == "gaudi-0000:19:00.0"
    assert (device.index, device.attributes["accel"], device.numa_node) == (5, 3, 1)
    assert device.nodes == ("/dev/accel/accel3", "/dev/accel/accel_controlD3")
    assert device.health is Health.HEALTHY
    assert device.memory_bytes == 98304 << 20
    assert not (machine.tree / "ran").exists()


def test_a_node_number_of_two_digits_is_read_whole(machine) -> None:
    machine.hpu("0000:19:00.0", minor=12, module_id="0")

    assert only(machine).nodes[0] == "/dev/accel/accel12"


def test_the_same_id_before_and_after_the_driver_numbers_devices_anew(machine, tmp_path) -> None:
    machine.hpu("0000:19:00.0", minor=0, module_id="5")
    machine.hpu("0000:1a:00.0", minor=1, module_id="4")
    after = type(machine)(tmp_path / "after")
    after.hpu("0000:19:00.0", minor=1, module_id="5")
    after.hpu("0000:1a:00.0", minor=0, module_id="4")

    assert {device.id: device.index for device in detect(machine).devices} == {
        device.id: device.index for device in detect(after).devices
    }


@pytest.mark.parametrize("folder", ["/sys/devices/virtual/accel/accel7/device", "/sys/class/habanalabs/hl7"])
def test_drivers_that_keep_attributes_elsewhere_are_read_there(machine, folder: str) -> None:
    pci = machine.hpu("0000:19:00.0", minor=None)
    (machine.tree / f"{pci}/status".lstrip("/")).unlink()
    machine.write(f"{folder}/pci_addr", "0000:19:00.0\n")
    machine.write(f"{folder}/module_id", "2\n")
    machine.write(f"{folder}/status", "Operational\n")
    compute = "/dev/accel/accel7" if "accel7" in folder else "/dev/hl7"
    machine.link(compute, "/dev/null")

    device = only(machine)

    assert (device.index, device.nodes, device.health) == (2, (compute,), Health.HEALTHY)


def test_a_neighbor_in_the_accel_class_lends_no_number(machine) -> None:
    machine.hpu("0000:19:00.0", minor=None, module_id="2")
    # An NPU of a processor is in the same class.
    machine.write("/sys/class/accel/accel0/device/vendor", "0x8086\n")
    machine.link("/dev/accel/accel0", "/dev/null")

    device = only(machine)

    assert device.nodes == ()
    assert "has not registered it" in device.health_reason


def test_scale_out_ports_belong_to_their_device(machine) -> None:
    pci = machine.hpu("0000:19:00.0", module_id="0")
    (machine.tree / f"{pci}/infiniband_verbs/uverbs11".lstrip("/")).mkdir(parents=True)
    machine.link("/dev/infiniband/uverbs11", "/dev/null")

    assert only(machine).nodes[-1] == "/dev/infiniband/uverbs11"


def test_the_inference_chips_of_the_vendor_are_left_out_and_named(machine) -> None:
    machine.hpu("0000:19:00.0", device="0x0001", minor=0)
    machine.hpu("0000:1a:00.0", minor=1, module_id="0")

    detected = detect(machine)

    assert [device.id for device in detected.devices] == ["gaudi-0000:1a:00.0"]
    # Goya has the vendor's id and a driver of its own.
    assert detected.notes == ("HL-1000 (Goya) at 0000:19:00.0 is no HPU and left out",)


def test_a_device_in_the_hands_of_vfio_is_listed_unhealthy(machine) -> None:
    pci = machine.hpu("0000:19:00.0", module_id="0")
    (machine.tree / f"{pci}/driver".lstrip("/")).unlink()
    machine.link(f"{pci}/driver", "../../../bus/pci/drivers/vfio-pci")

    assert "'vfio-pci'" in only(machine).health_reason


@pytest.mark.parametrize("text", ["three", "-1", "0x2", "999"])
def test_a_module_id_that_is_no_slot_is_not_believed(machine, text: str) -> None:
    machine.hpu("0000:19:00.0", module_id=text)

    device = only(machine)

    assert device.health is Health.UNHEALTHY
    assert f"must be the number of a slot (got '{text}')" in device.health_reason
    assert plugin.anyaccel_tags(device)[0] == "Intel-GAUDI2"


def test_two_devices_with_one_module_id_are_both_withheld(machine) -> None:
    machine.hpu("0000:19:00.0", minor=0, module_id="0")
    machine.hpu("0000:1a:00.0", minor=1, module_id="0")
    machine.hpu("0000:1b:00.0", minor=2, module_id="1")

    devices = detect(machine).devices

    # The two have labels behind the last slot of a board.
    assert [device.index for device in devices] == [1, 8, 9]
    assert [device.health for device in devices] == [Health.HEALTHY, Health.UNHEALTHY, Health.UNHEALTHY]
    assert "module id 0 is that of 2 devices" in devices[1].health_reason
    assert devices[0].links == {}


def test_a_status_that_no_document_knows_is_not_healthy(machine) -> None:
    machine.hpu("0000:19:00.0", module_id="0", status="on fire")

    assert "reports 'on fire'" in only(machine).health_reason


def test_hl_smi_tells_what_sysfs_does_not_in_any_order_of_rows(machine) -> None:
    machine.hpu("0000:19:00.0", device="0x1060", minor=0)
    machine.hpu("0000:1a:00.0", device="0x1060", minor=1)
    machine.hl_smi(
        f'[ "$*" = "-Q {IDENTITY} -f csv,noheader,nounits" ] || exit 9\n'
        'echo "0000:1A:00.0, 1, 4, HL-325L, N/A, 01P4-HL3090A0-18-U4V298-03-04-04, 131072"\n'
        'echo "0000:19:00.0, 0, 6, HL-325L, N/A, 01P4-HL3090A0-18-U4V193-22-07-00, 131072 MiB"'
    )

    first, second = detect(machine).devices

    assert (first.id, first.index, first.model) == ("gaudi-0000:1a:00.0", 4, "HL-325L")
    assert first.attributes["uuid"] == "01P4-HL3090A0-18-U4V298-03-04-04"
    assert "serial" not in first.attributes
    assert (second.index, second.memory_bytes) == (6, 128 << 30)


def test_an_id_does_not_depend_on_whether_hl_smi_answers(machine) -> None:
    machine.hpu("0000:19:00.0")
    machine.hl_smi("exit 1")
    without = only(machine).id
    machine.hl_smi('echo "0000:19:00.0, 0, 0, HL-225, AM50016138, 01P0-HL2080A0-15-TF8A81-09-07-06, 98304"')

    assert only(machine).id == without


BROKEN = {
    "garbage": ("echo '| HL-SMI Version:   hl-1.12.1 |'", "must answer one line of 7 values"),
    "binary": (r"printf '\377\376\000\n'", "must answer one line of 7 values"),
    "cut off": ("printf '0000:19:00.0, 0, 0, HL'", "must answer one line of 7 values"),
    "word for a number": ("echo '0000:19:00.0, 0, zero, HL-225, , , 98304'", "a number for module_id"),
    "negative": ("echo '0000:19:00.0, 0, -1, HL-225, , , 98304'", "a count for module_id"),
    "twice": ("for i in 0 1; do echo 0000:19:00.0, 0, 0, HL-225, , , 98304; done", "each device once"),
    "exits": ("echo 'no driver' >&2; exit 3", "exit status 3 (no driver)"),
    "killed": ("kill -9 $$", "exit status -9 (without a message)"),
}


@pytest.mark.parametrize(("script", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_hl_smi_is_named_and_leaves_the_module_unknown(machine, script: str, message: str) -> None:
    machine.hpu("0000:19:00.0", minor=0)
    machine.hpu("0000:1a:00.0", minor=1, module_id="7")
    machine.hl_smi(script)

    detected = detect(machine)

    assert message in detected.notes[0]
    assert detected.partial
    assert {device.id: device.health for device in detected.devices} == {
        "gaudi-0000:19:00.0": Health.UNHEALTHY,
        "gaudi-0000:1a:00.0": Health.HEALTHY,
    }


def test_hl_smi_that_hangs_is_killed_before_the_deadline_of_detection(machine) -> None:
    machine.hpu("0000:19:00.0")
    machine.hl_smi("exec sleep 60")

    detected = detect(machine, seconds=2.0)

    given = re.search(r"hl-smi did not end within (\d\.\d) s and was killed", detected.notes[0])
    assert float(given[1]) <= 1.0


def test_a_missing_hl_smi_is_said(machine) -> None:
    machine.hpu("0000:19:00.0")

    assert "hl-smi is not on the PATH" in detect(machine).notes[0]


def test_an_hl_smi_that_cannot_be_executed_is_said(machine) -> None:
    machine.hpu("0000:19:00.0")
    machine.hl_smi("")
    (machine.tree / "usr/bin/hl-smi").write_bytes(b"\x7fELF of another machine")

    assert "hl-smi cannot be run" in detect(machine).notes[0]


def test_an_unknown_pci_id_is_listed_under_the_name_that_hl_smi_gives(machine) -> None:
    machine.hpu("0000:19:00.0", device="0x1070", module_id="0")
    machine.hl_smi('echo "0000:19:00.0, 0, 0, HL-401 beta, N/A, N/A, N/A"')

    device = only(machine)

    assert plugin.anyaccel_tags(device) == ("HL-401-beta",)
    assert device.memory_bytes is None


@pytest.mark.parametrize(("mebibytes", "tag"), [("98304", "Intel-GAUDI2"), ("131072", "Intel-GAUDI3")])
def test_the_disputed_pci_id_is_told_by_its_memory(machine, mebibytes: str, tag: str) -> None:
    machine.hpu("0000:19:00.0", device="0x1030", module_id="0")
    machine.hl_smi(f'echo "0000:19:00.0, 0, 0, N/A, N/A, N/A, {mebibytes}"')

    assert plugin.anyaccel_tags(only(machine))[0] == tag


def test_the_disputed_pci_id_is_a_gaudi2_without_the_tool(machine) -> None:
    machine.hpu("0000:19:00.0", device="0x1030", module_id="0")

    device = only(machine)

    assert (device.memory_bytes, plugin.anyaccel_tags(device)[0]) == (96 << 30, "Intel-GAUDI2")
    assert device.model == "Habana-1030"
    assert "baseboard" not in device.attributes


def test_cards_in_slots_claim_no_links(machine) -> None:
    for minor in range(4):
        machine.hpu(f"0000:1{minor}:00.0", device="0x1063", minor=minor, module_id=str(minor))

    assert all(device.links == {} and device.model == "HL-338" for device in detect(machine).devices)


def test_module_id_node_number_and_pci_address_are_three_different_orders() -> None:
    devices = plugin.anyaccel_detect(context(load_recording(RECORDINGS / "gaudi2-8hpu"))).devices

    by_node = sorted(devices, key=lambda device: int(device.attributes["accel"]))
    assert [device.index for device in by_node] == [0, 4, 1, 5, 2, 6, 3, 7]  # huggingface/optimum-habana#1089
    by_address = sorted(devices, key=lambda device: device.id)
    assert [device.index for device in by_address] == [5, 1, 0, 4, 2, 6, 3, 7]
    assert [device.attributes["accel"] for device in by_address] == [3, 2, 0, 1, 4, 5, 6, 7]


def test_a_node_that_this_user_may_not_open_is_no_healthy_device() -> None:
    recording = load_recording(RECORDINGS / "gaudi2-8hpu")
    recording["paths"]["/dev/accel/accel0"]["access"] = "r"

    first, *others = plugin.anyaccel_detect(context(recording)).devices

    assert first.health_reason == "you may not open /dev/accel/accel0"
    assert first.health_remedy.startswith("ask the administrator")
    assert [device.health for device in others] == [Health.HEALTHY] * 7


def test_a_module_id_that_cannot_be_read_is_asked_of_hl_smi_and_the_fault_stays_told() -> None:
    recording = load_recording(RECORDINGS / "gaudi3-2hpu-no-module-id-in-sysfs")
    recording["paths"]["/sys/bus/pci/devices/0000:19:00.0/module_id"] = {"errno": "ENODEV"}

    detected = plugin.anyaccel_detect(context(recording))

    assert detected.partial
    assert [device.index for device in detected.devices] == [4, 6]
    assert "cannot be read (No such device)" in detected.devices[1].health_reason
