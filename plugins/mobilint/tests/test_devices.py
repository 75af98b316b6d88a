"""Devices and health on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel.plugin import Health
from anyaccel_mobilint import plugin
from anyaccel_testing import context
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
load, replay, detect, stats = MACHINES.load, MACHINES.replay, MACHINES.detect, MACHINES.stats


def test_every_chip_of_a_board_is_a_device_and_the_subsystem_tells_the_board() -> None:
    detected = detect(replay("mla400-and-mla100"))

    assert [device.model for device in detected.devices] == ["MLA400"] * 4 + ["MLA100"]
    assert {plugin.anyaccel_tags(device)[0] for device in detected.devices} == {"MOBILINT_ARIES"}
    assert {device.memory_bytes for device in detected.devices} == {16 << 30}
    assert (detected.devices[4].id, detected.devices[4].numa_node) == ("mobilint-0000:81:00.0", 1)


def test_without_links_a_device_goes_by_its_node_and_none_is_counted_twice() -> None:
    assert [(device.id, device.model) for device in detect(replay("mla100-2card-no-links")).devices] == [
        ("mobilint-aries0", "ARIES"),
        ("mobilint-aries1", "ARIES"),
    ]


def test_numbers_are_read_as_numbers() -> None:
    nodes = {f"/dev/aries{number}": {"char": [510, number], "access": "rw"} for number in (10, 2)}
    others = {"/dev/aries": {"char": [510, 99], "access": "rw"}, "/dev/aries0-ctl": {"char": [510, 98], "access": "rw"}}

    detected = detect(replay("driver-without-card", **nodes, **others))

    assert [device.index for device in detected.devices] == [2, 10]


def test_auxiliary_nodes_of_regulus_are_no_devices() -> None:
    (device,) = detect(replay("regulus-soc")).devices

    assert (device.id, device.nodes, device.memory_bytes) == ("mobilint-regulus-npu0", ("/dev/regulus-npu0",), None)
    assert plugin.anyaccel_tags(device) == ("MOBILINT_REGULUS", "REGULUS")


def test_in_a_container_numbers_are_those_of_the_host() -> None:
    detected = detect(replay("mla400-container-1-of-4"))

    assert [device.index for device in detected.devices if device.usable] == [2]
    assert detected.devices[0].health_reason == "its device node /dev/aries0 is missing"


def test_two_kinds_in_one_machine_cannot_be_masked() -> None:
    detected = detect(replay("aries-and-regulus"))

    assert [device.health for device in detected.devices] == [Health.UNHEALTHY] * 2
    assert "the runtime supports no mask" in detected.devices[0].health_reason
    assert detected.devices[0].health_remedy


def test_faults_cost_their_own_device_alone() -> None:
    detected = detect(replay("mla100-5card-faults"))

    assert [device.health_reason for device in detected.devices] == [
        "",
        "you may not open /dev/aries1",
        "it is bound to the driver 'vfio-pci', which keeps it for another use",
        "no driver is bound to it",
        "the driver has not registered it",
    ]
    assert detected.devices[0].health is Health.UNKNOWN  # telling would need an ioctl on the opened node


def test_a_device_that_lost_its_node_is_unhealthy() -> None:
    devices = detect(replay("mla100-1card")).devices
    recording = load("mla100-1card")
    del recording["paths"]["/dev/aries0"]

    (one,) = plugin.anyaccel_stats(devices, context(recording)).values()

    assert "/dev/aries0 is missing" in one.health_reason


def test_the_tool_tells_memory_load_temperature_and_power() -> None:
    (one,) = stats(replay("mla100-1card")).values()

    assert (one.memory_used_bytes, one.utilization, one.temperature_celsius, one.power_watts) == (0, 0, 39, 12.85)
    assert one.processes == ()


def test_the_power_of_a_board_stands_with_its_first_chip() -> None:
    found = [*stats(replay("mla400-and-mla100")).values()]

    assert [one.power_watts for one in found] == [51.55, None, None, None, 12.85]
    assert [one.memory_used_bytes for one in found[:2]] == [14363 << 20, 14299 << 20]


def test_what_the_tool_does_not_know_is_unknown() -> None:
    recording = load("mla100-1card")
    recording["commands"][0]["stdout"] = (
        recording["commands"][0]["stdout"].replace("39 C", "N/A").replace("0.00 %", "-")
    )

    (one,) = stats(context(recording)).values()

    assert (one.temperature_celsius, one.utilization, one.power_watts) == (None, None, 12.85)


def test_a_tool_that_hangs_costs_measures_and_no_device() -> None:
    assert len(detect(replay("mla100-2card-tool-hangs")).devices) == 2
    with pytest.raises(FaultError, match="mobilint-cli did not end"):
        stats(replay("mla100-2card-tool-hangs")).values()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mla100-2card-no-links", "mobilint-cli is not on the PATH"),
        ("mla100-2card-tool-hangs", "mobilint-cli did not end"),
        ("mla100-5card-faults", "mobilint-cli does not show mobilint-0000:01:00.0"),
        ("driver-without-card", "the Mobilint driver is loaded and no Mobilint device is on the PCI bus"),
    ],
)
def test_what_is_wrong_is_found(name: str, reason: str) -> None:
    assert any(reason in finding.reason for finding in plugin.anyaccel_diagnose(replay(name)))


@pytest.mark.parametrize("name", ["mla100-1card", "mla400-and-mla100"])
def test_a_sound_machine_has_no_findings(name: str) -> None:
    assert plugin.anyaccel_diagnose(replay(name)) == ()
