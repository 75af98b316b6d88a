"""Statistics, holders and findings."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyaccel.kit import FaultError
from anyaccel.model import DeviceProcess, Finding, Health
from anyaccel_gaudi import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
STATE = "bus_id,memory.used,utilization.aip,temperature.aip,power.draw"


def replay(name: str, **environ: str):
    recording = load_recording(RECORDINGS / name)
    return context(recording, environ={**recording["environ"], **environ})


def stats_of(name: str):
    ctx = replay(name)
    detected = plugin.anyaccel_detect(ctx)
    return plugin.anyaccel_stats(detected.devices, ctx)


def findings(name: str, **environ: str) -> list[Finding]:
    return list(plugin.anyaccel_diagnose(replay(name, **environ)))


def test_rows_of_the_tool_reach_their_devices_by_pci_address() -> None:
    stats = stats_of("gaudi2-8hpu")

    first = stats["gaudi-0000:43:00.0"]
    assert (first.memory_used_bytes, first.utilization) == (768 << 20, 0.0)
    assert (first.temperature_celsius, first.power_watts, first.health) == (30.0, 84.0, Health.HEALTHY)
    assert stats["gaudi-0000:1a:00.0"].utilization == 0.01
    unknown = stats["gaudi-0000:cd:00.0"]
    assert (unknown.memory_used_bytes, unknown.utilization, unknown.temperature_celsius) == (None, None, None)


def test_holders_have_the_compute_node_open_and_an_empty_list_means_none() -> None:
    stats = stats_of("gaudi2-8hpu")

    assert stats["gaudi-0000:19:00.0"].processes == (DeviceProcess(pid=4711),)
    assert stats["gaudi-0000:43:00.0"].processes == ()
    free = [id_ for id_, one in stats.items() if one.processes == ()]
    assert len(free) == 7


def test_holders_are_unknown_where_processes_could_not_be_listed() -> None:
    assert all(one.processes is None for one in stats_of("gaudi3-2hpu-no-module-id-in-sysfs").values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gaudi3-2hpu-hl-smi-hangs", "did not end within"),
        ("gaudi3-2hpu-hl-smi-fails", "exit status 1"),
        ("gaudi3-2hpu-hl-smi-garbage", "one line of 5 values"),
    ],
)
def test_statistics_that_a_broken_tool_prevents_are_an_error(name: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        stats_of(name)


@pytest.mark.parametrize("power", ["84 W", "84.0", "84"])
def test_numbers_are_read_with_and_without_units_and_header(machine, power: str) -> None:
    machine.hpu("0000:43:00.0", module_id="0")
    header = "bus_id, memory.used [MiB], utilization.aip [%], temperature.aip [C], power.draw [W]"
    machine.hl_smi(f'echo "{header}"; echo "0000:43:00.0, 768 MiB, 50 %, 30 C, {power}"')
    devices = plugin.anyaccel_detect(machine.context()).devices

    (one,) = plugin.anyaccel_stats(devices, machine.context()).values()

    assert (one.memory_used_bytes, one.utilization, one.power_watts) == (768 << 20, 0.5, 84.0)


def test_without_the_tool_health_alone_is_known(machine) -> None:
    folder = machine.hpu("0000:43:00.0", module_id="0")
    devices = plugin.anyaccel_detect(machine.context()).devices
    machine.write(f"{folder}/status", "in reset after device release\n")

    (one,) = plugin.anyaccel_stats(devices, machine.context()).values()

    assert one.health is Health.UNHEALTHY
    assert "comes back by itself" in one.health_remedy
    assert (one.memory_used_bytes, one.power_watts, one.processes) == (None, None, None)


def test_a_device_that_left_the_bus_is_unhealthy(machine) -> None:
    machine.hpu("0000:43:00.0", module_id="0")
    devices = plugin.anyaccel_detect(machine.context()).devices
    (machine.tree / "sys/bus/pci/devices/0000:43:00.0").unlink()

    (one,) = plugin.anyaccel_stats(devices, machine.context()).values()

    assert "gone from the PCI bus" in one.health_reason


def test_a_device_that_cannot_be_named_stays_unhealthy(machine) -> None:
    machine.hpu("0000:43:00.0")
    devices = plugin.anyaccel_detect(machine.context()).devices

    (one,) = plugin.anyaccel_stats(devices, machine.context()).values()

    assert (one.health, one.health_reason) == (Health.UNHEALTHY, devices[0].health_reason)


@pytest.mark.parametrize("name", ["no-gaudi-intel-npu", "gaudi2-8hpu"])
def test_nothing_is_found_where_the_vendor_is_absent_or_sound(name: str) -> None:
    assert findings(name) == []


@pytest.mark.parametrize(
    ("name", "environ", "severity", "reason", "remedy"),
    [
        ("gaudi2-8hpu", {"HABANA_VISIBLE_DEVICES": "3"}, "WARN", "outside a container nothing reads it", "module ids"),
        ("gaudi2-8hpu", {"HABANA_RUNTIME_ERROR": "no such device"}, "FAIL", "no such device", "start the container"),
        ("gaudi2-8hpu-statuses", {}, "WARN", "hl-smi is not on the PATH", "install the habanalabs tools"),
        ("driver-without-device", {}, "WARN", "no Habana device is on the PCI bus", "lspci -d 1da3:"),
        ("gaudi3-2hpu-hl-smi-hangs", {}, "FAIL", "hl-smi did not end within", "by hand"),
        ("gaudi3-2hpu-hl-smi-garbage", {}, "FAIL", "hl-smi must answer one line", "by hand"),
        ("gaudi3-2hpu-hl-smi-fails", {}, "FAIL", "Driver is not loaded", "driver is loaded"),
    ],
)
def test_what_is_wrong_is_found_with_a_way_out(
    name: str, environ: dict[str, str], severity: str, reason: str, remedy: str
) -> None:
    matching = [finding for finding in findings(name, **environ) if reason in finding.reason]

    assert [finding.severity.name for finding in matching] == [severity] * len(matching) != []
    assert all(remedy in finding.remedy for finding in matching)


def test_a_container_is_not_warned_about_the_variable_that_made_it() -> None:
    messages = " ".join(finding.reason for finding in findings("gaudi2-container-1-of-8"))

    assert "nothing reads it" not in messages


def test_devices_that_the_tool_does_not_show_are_named(machine) -> None:
    for minor in range(3):
        machine.hpu(f"0000:4{minor}:00.0", minor=minor, module_id=str(minor))
    machine.hl_smi('echo "0000:40:00.0, 768, 0, 30, 84"; echo "0000:41:00.0, 768, 0, 30, 84"')

    messages = [finding.reason for finding in plugin.anyaccel_diagnose(machine.context())]

    assert "hl-smi does not show gaudi-0000:42:00.0, of 3 devices" in messages
    assert "3 devices are on the PCI bus, and boards have 1, 2, 4 or 8" in messages


def test_the_tool_is_asked_for_the_fields_of_statistics(machine) -> None:
    machine.hpu("0000:43:00.0", module_id="0")
    machine.hl_smi(f'[ "$2" = "{STATE}" ] && echo "0000:43:00.0, 1, 2, 3, 4"')
    devices = plugin.anyaccel_detect(machine.context()).devices

    (one,) = plugin.anyaccel_stats(devices, machine.context()).values()

    assert one.power_watts == 4.0
