"""Health, stats and findings."""

import json
import os
import time

import pytest
from anyaccel.plugin import DeviceProcess, Health, ProbeContext, Severity
from anyaccel.probe.recording import Recorder
from anyaccel.testing import context
from anyaccel_neuron import plugin
from neuron_machine import TOOL

RECORD = {
    "neuron_runtime_data": [
        {
            "pid": 4711,
            "error": "",
            "report": {
                "neuroncore_counters": {"neuroncores_in_use": {"1": {"neuroncore_utilization": 37.5}}, "error": ""},
                "memory_used": {"neuron_runtime_used_bytes": {"host": 1, "neuron_device": 2}, "error": ""},
            },
        }
    ],
    "system_data": {"neuron_hw_counters": {"neuron_devices": None, "error": ""}},
}


def detect(machine):
    return plugin.anyaccel_detect(machine.context())


def stats(machine):
    devices = detect(machine).devices
    observed = plugin.anyaccel_stats(devices, machine.context())
    return [observed[device.id] for device in devices]


def findings(machine, severity=None):
    found = plugin.anyaccel_diagnose(machine.context())
    return [finding for finding in found if severity in (None, finding.severity)]


def monitor(machine, text, then="exec sleep 600"):
    pid = machine.directory / "monitor.pid"
    machine.tool("/bin/neuron-monitor", f"echo $$ > {pid}\ncat <<'END'\n{text}\nEND\n{then}\n")
    return pid


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("stats/hardware/sram_ecc_uncorrected", "2\n", "stop and start the instance"),
        ("stats/hardware/mem_ecc_uncorrected", "1\n", "stop and start the instance"),
        ("stats/hardware/mem_ecc_uncorrected/total", "1\n", "stop and start the instance"),
        ("stats/hardware/mem_ecc_repairable_uncorrected", "1\n", "reload the driver"),
        ("stats/hardware/health_status/unhealthy_components", "hbm link_efa\n", "hbm, link_efa unhealthy"),
        ("reset", "0\n", "try again"),
        ("reset", "2\n", "invalid after a reset"),
    ],
)
def test_a_chip_that_reports_a_fault_is_unfit_with_the_way_out(machine, path, text, reason):
    machine.chip(0)
    entry = machine.chip(1)
    machine.write(f"{entry}/{path}", text)
    devices = detect(machine).devices
    assert [device.usable for device in devices] == [True, True, False, False]
    assert reason in devices[2].health_reason


@pytest.mark.parametrize(
    ("path", "text", "health"),
    [
        ("stats/hardware/sram_ecc_uncorrected", "0\n", Health.HEALTHY),
        ("reset", "1\n", Health.HEALTHY),
        ("stats/hardware/sram_ecc_uncorrected", "n/a\n", Health.UNKNOWN),
        ("stats/hardware/health_status/unhealthy_components", "none\n", Health.UNKNOWN),
        ("stats/hardware/health_status/unhealthy_components", "", Health.UNKNOWN),
    ],
)
def test_health_is_only_claimed_where_a_counter_was_read(machine, path, text, health):
    machine.write(f"{machine.chip(0)}/{path}", text)
    assert {device.health for device in detect(machine).devices} == {health}


def test_memory_of_a_logical_core_is_that_of_its_physical_cores(machine):
    entry = machine.chip(0, "Trainium2")
    for core in range(6):
        machine.write(f"{entry}/neuron_core{core}/stats/memory_usage/device_mem/present", str(10**core))
        machine.write(f"{entry}/neuron_core{core}/stats/memory_usage/device_mem/total", "0")
    assert [one.memory_used_bytes for one in stats(machine)] == [11, 1100, 110000, None]


def test_what_nobody_tells_is_none(machine):
    machine.chip(0)
    for one in stats(machine):
        assert (one.memory_used_bytes, one.utilization, one.temperature_celsius, one.power_watts) == (None,) * 4
        assert one.processes is None


def test_utilization_and_processes_come_from_one_record_of_the_monitor(machine):
    machine.chip(0)
    pid = monitor(machine, json.dumps(RECORD))
    first, second = stats(machine)
    assert (first.utilization, first.processes) == (None, ())
    assert (second.utilization, second.processes) == (0.375, (DeviceProcess(pid=4711),))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_an_idle_monitor_has_no_processes_and_no_utilization(machine):
    machine.chip(0)
    monitor(machine, json.dumps({"neuron_runtime_data": [], "system_data": {}}))
    assert [(one.utilization, one.processes) for one in stats(machine)] == [(None, ())] * 2


@pytest.mark.parametrize(
    "text", ["garbage", "", "[]", '{"neuron_runtime_data": null}', '{"neuron_runtime_data": {"pid": 1}}', "[" * 100000]
)
def test_a_monitor_that_prints_something_else_leaves_them_unknown(machine, text):
    machine.chip(0)
    monitor(machine, text, then="")
    assert [(one.utilization, one.processes) for one in stats(machine)] == [(None, None)] * 2


@pytest.mark.parametrize("use", [None, [], {"1": None}, {"1": {"neuroncore_utilization": "x"}}, {"1": {}}])
def test_a_record_with_holes_gives_no_utilization(machine, use):
    machine.chip(0)
    runtime = {"pid": 1, "report": {"neuroncore_counters": {"neuroncores_in_use": use}}}
    monitor(machine, json.dumps({"neuron_runtime_data": [runtime, None, {"error": "x", "pid": 2}]}))
    assert [one.utilization for one in stats(machine)] == [None, None]


def test_a_monitor_that_hangs_is_killed_before_the_deadline(machine):
    machine.chip(0)
    pid = machine.directory / "monitor.pid"
    machine.tool("/bin/neuron-monitor", f"echo $$ > {pid}\nexec sleep 600\n")
    devices = detect(machine).devices
    start = time.monotonic()
    observed = plugin.anyaccel_stats(devices, machine.context(seconds=1.0))
    assert time.monotonic() - start < 0.9
    assert {one.processes for one in observed.values()} == {None}
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_stats_of_a_chip_whose_node_is_gone_are_unfit(machine):
    machine.chip(0)
    devices = detect(machine).devices
    (machine.directory / "dev/neuron0").unlink()
    observed = plugin.anyaccel_stats(devices, machine.context())
    assert {one.health for one in observed.values()} == {Health.UNHEALTHY}


def test_there_is_nothing_to_find_where_neuron_is_absent(machine):
    assert findings(machine) == []


def test_a_machine_in_order_gets_one_line(machine):
    machine.chip(0)
    machine.write("/sys/module/neuron/version", "2.26.5.0\n")
    machine.tool(TOOL, 'echo \'[{"neuron_device": 0, "nc_count": 2}]\'\n')
    machine.tool("/bin/dmesg", "exit 1\n")
    found = findings(machine)
    assert [(finding.severity, finding.reason) for finding in found] == [
        (Severity.OK, "1 Neuron devices with 2 cores, driver 2.26.5.0")
    ]


def test_a_missing_tool_is_a_warning_with_the_package(machine):
    machine.chip(0)
    found = findings(machine, Severity.WARN)
    assert [finding.reason for finding in found] == ["neuron-ls is not installed"]
    assert "aws-neuronx-tools" in found[0].remedy


def test_a_missing_driver_is_one_finding_for_all_chips(machine):
    for slot in range(2):
        for name, value in (("vendor", "0x1d0f"), ("device", "0x7264"), ("class", "0x088000")):
            machine.write(f"/sys/bus/pci/devices/0000:00:1{slot}.0/{name}", value)
    found = findings(machine, Severity.FAIL)
    assert [finding.reason for finding in found] == [
        "neuron-0000:00:10.0, neuron-0000:00:11.0: the Neuron driver is not loaded"
    ]
    assert "aws-neuronx-dkms" in found[0].remedy


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "0,7"}, "NEURON_RT_VISIBLE_CORES"),
        ({"NEURON_RT_VISIBLE_CORES": "0", "NEURON_RT_NUM_CORES": "2"}, "is ignored beside"),
        ({"NEURON_RT_NUM_CORES": "many"}, "NEURON_RT_NUM_CORES must be"),
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, "cores here are of size 1"),
    ],
)
def test_variables_that_contradict_the_machine_are_found(machine, environ, message):
    machine.chip(0)
    machine.environ.update(environ)
    assert any(message in finding.reason and finding.remedy for finding in findings(machine))


def test_hardware_errors_in_the_kernels_log_are_found(machine):
    machine.chip(0)
    line = "neuron: NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-0 hostname=h nd-id=3 nc-id=0 serial-num=0"
    machine.tool("/bin/dmesg", f"echo '{line} action=TERMINATE_INSTANCE'\n" * 2)
    messages = [finding.reason for finding in findings(machine, Severity.FAIL)]
    assert messages == ["the driver reported HBM_UNCORRECTABLE_ERROR on device 3"]


def test_detection_that_fails_is_a_finding(machine):
    machine.write(f"{machine.chip(0)}/info/architecture/device_name", "Trainium9")
    assert "nothing tells how many NeuronCores" in findings(machine, Severity.FAIL)[0].reason


def test_a_container_without_a_chip_gets_one_finding_with_the_way_out(machine):
    machine.write("/sys/module/neuron/version", "2.24.7.0\n")
    assert [finding.severity for finding in findings(machine)] == [Severity.WARN]
    for name, value in (("vendor", "0x1d0f"), ("device", "0x7264"), ("class", "0x088000")):
        machine.write(f"/sys/bus/pci/devices/0000:00:1f.0/{name}", value)
    found = findings(machine)
    assert len(found) == 1
    assert "container" in found[0].remedy


def test_a_recording_of_the_findings_holds_no_line_of_the_kernels_log(machine):
    machine.chip(0)
    machine.tool("/bin/dmesg", "echo 'secret-host NEURON_HW_ERR=DMA_ERROR hostname=secret-host nd-id=3 nc-id=0'\n")
    recorder = Recorder(machine)
    plugin.anyaccel_diagnose(ProbeContext(recorder, time.monotonic() + 10))
    assert recorder.queries["kernel/neuron-errors"] == {"value": [["DMA_ERROR", "3"]]}
    assert "secret-host" not in json.dumps(recorder.recording())


def test_a_recorded_machine_answers_like_the_real_one(machine):
    for index in range(2):
        machine.write(f"{machine.chip(index)}/connected_devices", f"{1 - index}\n")
    machine.tool("/bin/neuron-ls", 'echo \'[{"neuron_device": 0, "nc_count": 2, "bdf": "00:1e.0"}]\'\n')
    monitor(machine, json.dumps(RECORD))
    recorder = Recorder(machine)
    live = ProbeContext(recorder, time.monotonic() + 10)
    found = plugin.anyaccel_detect(live)
    observed = plugin.anyaccel_stats(found.devices, live)
    replayed = context(recorder.recording())
    assert plugin.anyaccel_detect(replayed) == found
    assert plugin.anyaccel_stats(found.devices, replayed) == observed
