"""Devices and health on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError
from anyaccel.plugin import DeviceProcess, Health, ProbeContext
from anyaccel_rebellions import plugin
from anyaccel_testing import context
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
load, replay, detect = MACHINES.load, MACHINES.replay, MACHINES.detect


def reasons(ctx: ProbeContext) -> list[str]:
    return [finding.reason for finding in plugin.anyaccel_diagnose(ctx)]


def test_the_chips_of_a_card_are_parts_of_it_and_linked() -> None:
    detected = detect(replay("ca25-2card-8chip"))

    parents = [device.parent for device in detected.devices]
    assert parents == ["rebellions-card-0000000022502229"] * 4 + ["rebellions-card-0000000022502230"] * 4
    first, last = detected.devices[0], detected.devices[-1]
    assert {*first.links} == {device.id for device in detected.devices[1:4]}
    assert (first.numa_node, last.numa_node, detected.driver_version) == (0, 1, "3.2.2")
    assert first.memory_bytes == 16857956352


def test_in_a_container_chips_are_numbered_by_position() -> None:
    detected = detect(replay("ca25-container-4-of-8"))

    here = [device for device in detected.devices if device.usable]
    assert [(device.index, device.attributes["rbln"]) for device in here] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert all("is missing" in device.health_reason for device in detected.devices if device not in here)


def test_numbers_of_two_digits_come_behind_those_of_one() -> None:
    recording = load("ca25-tool-hangs")
    for kind in ("/sys/class/rebellions/rbln", "/dev/rbln"):
        for path in [path for path in recording["paths"] if path.startswith(f"{kind}0")]:
            recording["paths"][path.replace("rbln0", "rbln10")] = recording["paths"].pop(path)

    assert [device.attributes["rbln"] for device in detect(context(recording)).devices] == [1, 10]


def test_the_tool_tells_which_node_is_whose_where_sysfs_does_not() -> None:
    detected = detect(replay("ca12-2card-sdk1"))

    assert [(device.pci_bus_id, device.nodes) for device in detected.devices] == [
        ("0000:05:00.0", ("/dev/rbln0",)),
        ("0000:06:00.0", ("/dev/rbln1",)),
    ]
    assert [device.health for device in detected.devices] == [Health.HEALTHY] * 2
    assert all("uuid" not in device.attributes for device in detected.devices)  # all zeros


def test_without_the_tool_such_chips_cannot_be_named() -> None:
    recording = load("ca12-2card-sdk1")
    recording["commands"] = []

    detected = detect(context(recording))

    assert {device.health for device in detected.devices} == {Health.UNHEALTHY}
    assert "position among the chips that may be opened here is unknown" in detected.devices[0].health_reason
    assert "rbln-smi is not on the PATH" in detected.notes[0]


@pytest.mark.parametrize("status", ["0", "1"])
def test_a_chip_that_is_ready_or_busy_is_healthy(status: str) -> None:
    path = "/sys/class/rebellions/rbln0/status"
    assert detect(replay("cr13-no-tool", **{path: {"text": f"{status}\n"}})).devices[0].health is Health.HEALTHY


@pytest.mark.parametrize("status", ["2", "3", "4", "5", "6"])
def test_a_status_that_means_two_things_is_no_health(status: str) -> None:
    path = "/sys/class/rebellions/rbln0/status"
    (device,) = detect(replay("cr13-no-tool", **{path: {"text": f"{status}\n"}})).devices

    assert device.health_reason == f"the driver reports '{status}'"
    assert device.health_remedy


def test_a_chip_that_the_tool_calls_faulty_is() -> None:
    recording = load("ca25-2card-8chip")
    recording["commands"][0]["stdout"] = recording["commands"][0]["stdout"].replace('"BUSY"', '"FAULT"')

    assert detect(context(recording)).devices[1].health_reason == "rbln-smi reports FAULT"


def test_a_card_with_virtual_functions_counts_by_them() -> None:
    detected = detect(replay("ca22-virtual-functions"))

    assert [device.pci_bus_id for device in detected.devices] == ["0000:05:00.1", "0000:05:00.2"]
    assert plugin.anyaccel_tags(detected.devices[0])[0] == "RBLN-CA22"


def test_the_tool_tells_memory_load_temperature_and_the_power_of_the_card() -> None:
    ctx = replay("ca25-2card-8chip")
    first, second, *_ = plugin.anyaccel_stats(detect(ctx).devices, ctx).values()

    assert (first.memory_used_bytes, first.utilization, first.temperature_celsius, first.power_watts) == (
        0,
        0,
        39,
        45.2,
    )
    assert (second.memory_used_bytes, second.utilization, second.power_watts) == (8428978176, 0.875, None)
    assert (first.processes, second.processes) == ((), (DeviceProcess(pid=991),))


@pytest.mark.parametrize(
    ("name", "message"), [("ca25-tool-hangs", "did not end"), ("ca22-6card-faults", "must answer JSON")]
)
def test_a_broken_tool_costs_measures_and_no_chip(name: str, message: str) -> None:
    detected = detect(replay(name))

    assert message in detected.notes[0]
    assert any(device.usable for device in detected.devices)
    with pytest.raises(FaultError, match=message):
        plugin.anyaccel_stats(detected.devices, replay(name))


@pytest.mark.parametrize("answer", ["[]", "{}", '{"devices": [{"npu": 0}]}', '{"devices": {"a": "b"}}'])
def test_json_of_another_form_is_told(answer: str) -> None:
    recording = load("ca25-2card-8chip")
    recording["commands"][0]["stdout"] = answer

    detected = detect(context(recording))

    assert "rbln-smi must answer devices with their PCI addresses" in detected.notes[0]
    assert len(detected.devices) == 8


def test_a_sound_machine_has_no_findings() -> None:
    assert reasons(replay("ca25-2card-8chip")) == []


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"RBLN_DEVICES": "1", "RBLN_VISIBLE_DEVICES": "0"}, "RBLN_DEVICES and RBLN_VISIBLE_DEVICES differ"),
        ({"RBLN_DEVICES": "1", "RBLN_VISIBLE_DEVICES": ""}, "RBLN_DEVICES and RBLN_VISIBLE_DEVICES differ"),
        ({"RBLN_DUMMY_DEVICE": "1"}, "computes nothing"),
    ],
)
def test_variables_that_mislead_are_found(environ: dict[str, str], reason: str) -> None:
    assert any(reason in found for found in reasons(replay("ca25-2card-8chip", environ)))


def test_a_driver_without_a_card_is_found() -> None:
    assert "no Rebellions device is on the PCI bus" in reasons(replay("driver-without-card"))[0]
