"""Recorded machines and what the plug-in must make of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anyaccel.model import Device, Health
from anyaccel.testing import context, describe, load_recording
from anyaccel_gaudi import plugin

RECORDINGS = Path(__file__).parent.parent / "recordings"
NAMES = sorted(path.name for path in RECORDINGS.iterdir())


def detect(name: str) -> dict[str, Device]:
    detected = plugin.anyaccel_detect(context(load_recording(RECORDINGS / name)))
    assert detected is not None
    return {device.id.removeprefix("gaudi-0000:"): device for device in detected.devices}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_gives_what_was_checked_by_eye(name: str) -> None:
    expected = json.loads((RECORDINGS / name / "expected.json").read_text())

    assert expected == describe(plugin, context(load_recording(RECORDINGS / name)))


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_indexes_are_unique(name: str) -> None:
    detected = plugin.anyaccel_detect(context(load_recording(RECORDINGS / name)))
    devices = detected.devices if detected else ()

    assert len({device.id for device in devices}) == len({device.index for device in devices}) == len(devices)


def test_module_id_node_number_and_pci_address_are_three_different_orders() -> None:
    devices = detect("gaudi2-8hpu").values()

    by_node = sorted(devices, key=lambda device: int(device.attributes["accel"]))
    assert [device.index for device in by_node] == [0, 4, 1, 5, 2, 6, 3, 7]  # huggingface/optimum-habana#1089
    by_address = sorted(devices, key=lambda device: device.id)
    assert [device.index for device in by_address] == [5, 1, 0, 4, 2, 6, 3, 7]
    assert [device.attributes["accel"] for device in by_address] == [3, 2, 0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("address", "health", "way_out"),
    [
        ("43:00.0", Health.HEALTHY, ""),
        ("44:00.0", Health.UNHEALTHY, "comes back by itself"),
        ("1a:00.0", Health.UNHEALTHY, "comes back by itself"),
        ("19:00.0", Health.UNHEALTHY, "comes back by itself"),
        ("b3:00.0", Health.UNHEALTHY, "reload the driver or restart"),
        ("b4:00.0", Health.UNHEALTHY, "reload the habanalabs driver"),
        ("cc:00.0", Health.UNHEALTHY, "cannot be read (Input/output error)"),
        ("cd:00.0", Health.UNKNOWN, ""),
    ],
)
def test_only_an_operational_device_is_healthy(address: str, health: Health, way_out: str) -> None:
    device = detect("gaudi2-8hpu-statuses")[address]

    assert device.health is health
    assert way_out in device.health_reason


def test_another_vendors_node_in_dev_accel_is_not_claimed() -> None:
    assert plugin.anyaccel_detect(context(load_recording(RECORDINGS / "no-gaudi-intel-npu"))) is None


def test_a_container_lists_every_device_and_offers_the_one_whose_node_it_has() -> None:
    devices = detect("gaudi2-container-1-of-8")

    assert len(devices) == 8
    assert [address for address, device in devices.items() if device.health is Health.HEALTHY] == ["b4:00.0"]
    environ = load_recording(RECORDINGS / "gaudi2-container-1-of-8")["environ"]
    assert plugin.anyaccel_visible(environ, tuple(devices.values())) == ["gaudi-0000:b4:00.0"]


@pytest.mark.parametrize("fault", ["hangs", "fails", "garbage"])
def test_a_broken_hl_smi_hides_nothing_that_sysfs_knows(fault: str) -> None:
    devices = detect(f"gaudi3-2hpu-hl-smi-{fault}")

    assert devices["19:00.0"].health is Health.HEALTHY
    assert devices["19:00.0"].index == 3
    assert devices["1a:00.0"].health is Health.UNHEALTHY
    assert "module id is unknown" in devices["1a:00.0"].health_reason


def test_a_driver_without_a_device_is_present_and_empty() -> None:
    detected = plugin.anyaccel_detect(context(load_recording(RECORDINGS / "driver-without-device")))

    assert detected is not None
    assert detected.devices == ()
    assert detected.driver_version == "1.22.1-97ec1a4"


def test_devices_without_a_driver_are_listed_with_the_way_out() -> None:
    devices = detect("gaudi2-no-driver")

    assert len(devices) == 8
    assert all("modprobe habanalabs" in device.health_reason for device in devices.values())


def test_a_node_that_this_user_may_not_open_is_no_healthy_device() -> None:
    recording = load_recording(RECORDINGS / "gaudi2-8hpu")
    recording["paths"]["/dev/accel/accel0"]["access"] = "r"

    detected = plugin.anyaccel_detect(context(recording))

    assert detected is not None
    assert "you may not open /dev/accel/accel0" in detected.devices[0].health_reason
    assert [device.health for device in detected.devices[1:]] == [Health.HEALTHY] * 7


def test_a_module_id_that_cannot_be_read_is_asked_of_hl_smi_and_the_fault_stays_told() -> None:
    recording = load_recording(RECORDINGS / "gaudi3-2hpu-no-module-id-in-sysfs")
    recording["paths"]["/sys/bus/pci/devices/0000:19:00.0/module_id"] = {"errno": "ENODEV"}

    detected = plugin.anyaccel_detect(context(recording))

    assert detected is not None
    assert detected.partial
    assert [device.index for device in detected.devices] == [4, 6]
    assert "cannot be read (No such device)" in detected.devices[1].health_reason
