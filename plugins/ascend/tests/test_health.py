"""Stats and diagnosis on recorded machines."""

from __future__ import annotations

import anyaccel_ascend as plugin
import pytest
from anyaccel.plugin import DeviceProcess, Health, Severity


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


@pytest.mark.parametrize(
    ("name", "severity", "words"),
    [
        ("910b4-8npu", Severity.OK, "NPUs: 8"),
        ("910b4-occupied", Severity.FAIL, "occupied"),
        ("910b4-no-driver", Severity.FAIL, "driver is not loaded"),
        ("910a-card-dropped", Severity.FAIL, "lost it"),
        ("910b2-faults", Severity.WARN, "driver package"),
        ("910b4-vnpu-host", Severity.WARN, "split into"),
        ("driver-without-npu", Severity.WARN, "no NPU is on the PCI bus"),
        ("910b4-container-without-npus", Severity.WARN, "not mounted into this container"),
        ("910b4-no-npu-smi", Severity.WARN, "npu-smi is not here"),
    ],
)
def test_the_diagnosis_names_what_is_wrong_and_a_way_out(recorded, name, severity, words):
    findings = plugin.anyaccel_diagnose(recorded(name))
    found = next(finding for finding in findings if words in finding.reason)
    assert found.severity is severity
    assert bool(found.remedy) == (severity is not Severity.OK)


def test_equal_faults_are_one_finding(recorded):
    findings = plugin.anyaccel_diagnose(recorded("910b4-driver-broken"))
    assert len(findings) == 1
    assert findings[0].reason.count("ascend-0000:") == 8


def test_nothing_is_said_of_a_machine_without_npus(recorded):
    assert plugin.anyaccel_diagnose(recorded("huawei-server-without-npu")) == []


@pytest.mark.parametrize("value", ["1,0", "0, 1", "8"])
def test_a_mask_that_hides_npus_by_mistake_is_found(recorded, value):
    (finding,) = plugin.anyaccel_diagnose(recorded("910b4-8npu", {"ASCEND_RT_VISIBLE_DEVICES": value}))
    assert finding.severity is Severity.FAIL
    assert "ASCEND_RT_VISIBLE_DEVICES" in finding.reason


def test_host_numbers_inside_a_container_are_found(recorded):
    (finding,) = plugin.anyaccel_diagnose(recorded("910b4-container-2-of-8", {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}))
    assert "inside a container they begin at 0" in finding.reason


def test_the_variable_of_containers_on_a_host_is_found(recorded):
    (finding,) = plugin.anyaccel_diagnose(recorded("910b4-8npu", {"ASCEND_VISIBLE_DEVICES": "4,3"}))
    assert finding.severity is Severity.WARN
    assert "hides nothing from processes" in finding.reason


def test_an_intended_mask_is_no_finding(recorded):
    (finding,) = plugin.anyaccel_diagnose(recorded("910b4-8npu", {"ASCEND_RT_VISIBLE_DEVICES": "2,3"}))
    assert finding.severity is Severity.OK
