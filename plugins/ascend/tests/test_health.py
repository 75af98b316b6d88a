"""Stats and diagnosis on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.plugin import DeviceProcess, Health, Severity
from anyaccel_ascend import plugin


def stats_of(recorded, name):
    ctx = recorded(name)
    devices = plugin.anyaccel_detect(ctx).devices
    return devices, plugin.anyaccel_stats(devices, ctx)


def test_stats_are_those_of_the_sample(recorded):
    devices, stats = stats_of(recorded, "910b2-8npu")
    second = stats[devices[1].id]
    assert second.memory_used_bytes == 12458 << 20
    assert (second.temperature_celsius, second.power_watts, second.utilization) == (51.0, 100.0, 0.0)
    assert second.processes == (DeviceProcess(pid=233125, memory_bytes=9050 << 20),)
    assert stats[devices[0].id].processes == ()


def test_power_that_a_part_does_not_measure_is_unknown_and_not_zero(recorded):
    devices, stats = stats_of(recorded, "910c-16die")
    assert [stats[device.id].power_watts for device in devices[:4]] == [169.7, None, 173.6, None]
    devices, stats = stats_of(recorded, "310p3-duo")
    assert [stats[device.id].power_watts for device in devices] == [None, None]
    assert [stats[device.id].memory_used_bytes for device in devices] == [1529 << 20, 1412 << 20]


def test_processes_that_the_table_does_not_show_are_unknown(recorded):
    devices, stats = stats_of(recorded, "310p3-vnpu-container")
    assert stats[devices[0].id].processes is None


def test_health_follows_the_table(recorded):
    devices, stats = stats_of(recorded, "910b2-faults")
    assert [stats[device.id].health for device in devices[:4]] == [
        Health.HEALTHY,
        Health.HEALTHY,
        Health.UNHEALTHY,
        Health.HEALTHY,
    ]
    assert devices[7].id not in stats


def test_vnpus_of_a_host_have_no_stats_of_their_own(recorded):
    devices, stats = stats_of(recorded, "310p3-vnpu-host")
    assert set(stats) == {devices[0].id}


@pytest.mark.parametrize("name", ["910b4-8npu", "910b4-occupied", "910b4-no-npu-smi", "huawei-server-without-npu"])
def test_what_the_core_says_itself_is_no_finding(recorded, name):
    assert [*plugin.anyaccel_diagnose(recorded(name))] == []


def test_a_driver_without_npus_is_found(recorded):
    (finding,) = plugin.anyaccel_diagnose(recorded("driver-without-npu"))
    assert finding.severity is Severity.WARN
    assert "no Ascend device is on the PCI bus" in finding.reason
    assert "lspci -d 19e5:" in finding.remedy


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("910b4-8npu", "1,0", "0 NPUs to the runtime instead of 2"),
        ("910b4-8npu", "0,0", "0 NPUs to the runtime instead of 2"),
        ("910b4-8npu", "0, 1", "1 NPUs to the runtime instead of 2"),
        ("910b4-8npu", "8", "0 NPUs to the runtime instead of 1"),
        ("910b4-container-2-of-8", "4,5", "inside a container they begin at 0"),
    ],
)
def test_a_mask_that_hides_npus_by_mistake_is_found(recorded, name, value, words):
    (finding,) = plugin.anyaccel_diagnose(recorded(name, {"ASCEND_RT_VISIBLE_DEVICES": value}))
    assert finding.severity is Severity.FAIL
    assert f"ASCEND_RT_VISIBLE_DEVICES={value!r}" in finding.reason
    assert words in finding.reason
    assert finding.remedy


@pytest.mark.parametrize("value", ["2,3", "0,1,", ""])
def test_a_mask_that_shows_what_it_asks_for_is_no_finding(recorded, value):
    assert [*plugin.anyaccel_diagnose(recorded("910b4-8npu", {"ASCEND_RT_VISIBLE_DEVICES": value}))] == []


def test_the_variable_of_containers_on_a_host_is_found(recorded):
    (finding,) = plugin.anyaccel_diagnose(recorded("910b4-8npu", {"ASCEND_VISIBLE_DEVICES": "4,3"}))
    assert finding.severity is Severity.WARN
    assert "hides nothing from processes" in finding.reason
