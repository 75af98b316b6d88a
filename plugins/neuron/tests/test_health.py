"""Health, stats and findings."""

import json
import os
import time
from pathlib import Path

import pytest
from anyaccel.plugin import DeviceProcess, Health, ProbeContext, Severity
from anyaccel.probe.recording import Recorder
from anyaccel_neuron import plugin
from anyaccel_testing import context, load_recording
from waiting import PATIENCE, until

RECORDINGS = Path(__file__).parent.parent / "recordings"


def runtime(pid, **cores):
    """A process in the monitor's record, by names of cores such as ``nc1`` with their utilization in percent."""
    used = {name.removeprefix("nc"): {"neuroncore_utilization": percent} for name, percent in cores.items()}
    return {"pid": pid, "error": "", "report": {"neuroncore_counters": {"neuroncores_in_use": used, "error": ""}}}


def stats(machine):
    devices = machine.devices()
    observed = plugin.anyaccel_stats(devices, machine.context())
    return [observed[device.id] for device in devices]


def pids(machine):
    return [None if one.processes is None else [process.pid for process in one.processes] for one in stats(machine)]


def monitor(machine, text, then="exec sleep 600"):
    pid = machine.tree / "monitor.pid"
    machine.tool("/bin/neuron-monitor", f"echo $$ > {pid}\ncat <<'END'\n{text}\nEND\n{then}\n")
    return pid


def records(machine, *runtimes):
    return monitor(machine, json.dumps({"neuron_runtime_data": runtimes, "system_data": {}}))


def has_ended(pid):
    """Return True once the process with its id in a file is gone; reaping an orphan may take a moment."""
    if not pid.exists() or not (number := pid.read_text()):
        return True  # killed before it wrote its id
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    return False


def findings(machine):
    return list(plugin.anyaccel_diagnose(machine.context()))


@pytest.mark.parametrize(
    ("path", "text", "reason", "remedy"),
    [
        ("stats/hardware/sram_ecc_uncorrected", "2\n", "sram_ecc_uncorrected is 2", "stop and start the instance"),
        ("stats/hardware/mem_ecc_uncorrected", "1\n", "uncorrected errors", "stop and start the instance"),
        ("stats/hardware/mem_ecc_uncorrected/total", "1\n", "uncorrected errors", "stop and start the instance"),
        ("stats/hardware/mem_ecc_repairable_uncorrected", "1\n", "repairable", "reload the driver"),
        ("stats/hardware/health_status/unhealthy_components", "hbm link_efa\n", "hbm, link_efa unhealthy", "stop"),
        ("reset", "0\n", "being reset", "try again"),
        ("reset", "2\n", "invalid after a reset", "stop and start"),
    ],
)
def test_a_chip_that_reports_a_fault_is_unfit_with_the_way_out(machine, path, text, reason, remedy):
    machine.chip(0)
    machine.write(f"{machine.chip(1)}/{path}", text)
    for seen in (machine.devices(), stats(machine)):
        assert [one.health is Health.UNHEALTHY for one in seen] == [False, False, True, True]
        assert reason in seen[2].health_reason
        assert remedy in seen[2].health_remedy


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
    assert {device.health for device in machine.devices()} == {health}


def test_memory_of_a_logical_core_is_that_of_its_physical_cores(machine):
    entry = machine.chip(0, "Trainium2")
    for core in range(6):
        machine.write(f"{entry}/neuron_core{core}/stats/memory_usage/device_mem/present", str(10**core))
        machine.write(f"{entry}/neuron_core{core}/stats/memory_usage/device_mem/total", "0")
    assert [one.memory_used_bytes for one in stats(machine)] == [11, 1100, 110000, None]


def test_an_unreported_value_is_none(machine):
    machine.chip(0)
    for one in stats(machine):
        assert (one.memory_used_bytes, one.utilization, one.temperature_celsius, one.power_watts) == (None,) * 4
        assert one.processes is None


def test_utilization_and_processes_come_from_one_record_of_the_monitor(machine):
    machine.chip(0)
    pid = records(machine, runtime(4711, nc1=37.5))
    first, second = stats(machine)
    assert (first.utilization, first.processes) == (None, ())
    assert (second.utilization, second.processes) == (0.375, (DeviceProcess(pid=4711),))
    until(lambda: has_ended(pid), "the end of the monitor")


def test_an_idle_monitor_has_no_processes_and_no_utilization(machine):
    machine.chip(0)
    records(machine)
    assert [(one.utilization, one.processes) for one in stats(machine)] == [(None, ())] * 2


def lists_processes(machine, *by_chip):
    for index in range(len(by_chip)):
        machine.chip(index)
    machine.lists(
        *(
            {"neuron_device": index, "nc_count": 2, "neuron_processes": processes}
            for index, processes in enumerate(by_chip)
        )
    )


def test_a_process_that_only_the_tool_names_counts_on_every_core_of_its_chip(machine):
    """neuron-ls reports the chip of a process, not the cores."""
    lists_processes(machine, [{"pid": 7, "command": ""}], [])
    assert pids(machine) == [[7], [7], [], []]


def test_a_process_that_the_monitor_places_counts_on_its_cores_alone(machine):
    lists_processes(machine, [{"pid": 7}, {"pid": 8}], [{"pid": 8}, {"pid": 9}])
    records(machine, runtime(7, nc1=1.0), runtime(8, nc0=1.0, nc2=2.0), runtime(9))
    assert pids(machine) == [[8], [7], [8, 9], [9]]


def test_processes_of_the_tool_that_make_no_sense_are_left_out(machine):
    lists_processes(machine, [{"pid": "7"}, {"pid": -1}, {"pid": True}, {}, None, 7, {"pid": 5}], None, {"pid": 6})
    assert pids(machine) == [[5], [5], [], [], [], []]


@pytest.mark.parametrize(("name", "expected"), [("trn2n-48xlarge", {113985: 4}), ("inf2-xlarge", {19047: 2})])
def test_processes_that_a_recorded_tool_names_are_on_the_cores_of_their_chip(name, expected):
    replay = context(load_recording(RECORDINGS / name))
    devices = plugin.anyaccel_detect(replay).devices
    observed = plugin.anyaccel_stats(devices, replay)
    on = [process.pid for device in devices for process in observed[device.id].processes or ()]
    assert {pid: on.count(pid) for pid in on} == expected


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
    holes = {"pid": 1, "report": {"neuroncore_counters": {"neuroncores_in_use": use}}}
    records(machine, holes, None, {"error": "x", "pid": 2})
    assert [one.utilization for one in stats(machine)] == [None, None]


def test_a_monitor_that_hangs_is_killed_before_the_deadline(machine):
    machine.chip(0)
    pid = monitor(machine, "", then="exec sleep 600")
    machine.tool("/bin/neuron-monitor", f"echo $$ > {pid}\nexec sleep 600\n")
    devices = machine.devices()
    ctx = machine.context(seconds=4.0)
    observed = plugin.anyaccel_stats(devices, ctx)
    assert machine.given <= 2.0
    assert {one.processes for one in observed.values()} == {None}
    until(lambda: has_ended(pid), "the end of the monitor")


def test_stats_of_a_chip_whose_node_is_gone_are_unfit(machine):
    machine.chip(0)
    devices = machine.devices()
    (machine.tree / "dev/neuron0").unlink()
    observed = plugin.anyaccel_stats(devices, machine.context())
    assert {(one.health, one.health_remedy) for one in observed.values()} == {(Health.UNHEALTHY, "reload the driver")}


def test_stats_of_a_chip_without_a_driver_say_why(machine):
    machine.function("0000:00:1e.0", 0x7164)
    assert {one.health_reason for one in stats(machine)} == {"the Neuron driver is not loaded"}


def test_there_is_nothing_to_find_on_a_machine_in_order(machine):
    assert findings(machine) == []
    machine.chip(0)
    machine.tool("/bin/dmesg", "exit 1\n")
    assert findings(machine) == []


def test_a_driver_without_a_chip_is_a_warning(machine):
    machine.write("/sys/module/neuron/version", "2.24.7.0\n")
    assert [finding.severity for finding in findings(machine)] == [Severity.WARN]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "0", "NEURON_RT_NUM_CORES": "2"}, "is ignored beside"),
        ({"NEURON_RT_VISIBLE_CORES": "0,1"}, "is one core for optimum-neuron"),
        ({"NEURON_LOGICAL_NC_CONFIG": "2"}, "cores here are of size 1"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "2"}, "cores here are of size 1"),
    ],
)
def test_variables_that_contradict_the_machine_are_found(new_machine, environ, message):
    machine = new_machine("one", **environ)
    machine.chip(0)
    found = [finding for finding in findings(machine) if finding.severity is Severity.WARN]
    assert [message in finding.reason and bool(finding.remedy) for finding in found] == [True]


def test_hardware_errors_in_the_kernels_log_are_found_once(machine):
    machine.chip(0)
    line = "neuron: NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR instance-id=i-0 hostname=h nd-id=3 nc-id=0 serial-num=0"
    machine.tool("/bin/dmesg", f"echo '{line} action=TERMINATE_INSTANCE'\n" * 2)
    failed = [finding.reason for finding in findings(machine) if finding.severity is Severity.FAIL]
    assert failed == ["the driver reported HBM_UNCORRECTABLE_ERROR on device 3"]


def test_a_recording_of_the_findings_holds_no_other_line_of_the_kernels_log(machine):
    machine.chip(0)
    machine.tool("/bin/dmesg", "echo 'secret-host'; echo 'NEURON_HW_ERR=DMA_ERROR nd-id=3 nc-id=0'\n")
    recorder = Recorder(machine)
    found = plugin.anyaccel_diagnose(ProbeContext(recorder, time.monotonic() + 2 * PATIENCE))
    recording = recorder.recording()
    assert "DMA_ERROR" in found[-1].reason
    assert "secret-host" not in json.dumps(recording)
    assert plugin.anyaccel_diagnose(context(recording)) == found


def test_a_recorded_machine_answers_like_the_real_one(machine):
    for index in range(2):
        machine.write(f"{machine.chip(index)}/connected_devices", f"{1 - index}\n")
    machine.tool("/bin/neuron-ls", 'echo \'[{"neuron_device": 0, "nc_count": 2, "bdf": "00:1e.0"}]\'\n')
    records(machine, runtime(4711, nc1=37.5))
    recorder = Recorder(machine)
    live = ProbeContext(recorder, time.monotonic() + 2 * PATIENCE)
    found = plugin.anyaccel_detect(live)
    observed = plugin.anyaccel_stats(found.devices, live)
    replayed = context(recorder.recording())
    assert plugin.anyaccel_detect(replayed) == found
    assert plugin.anyaccel_stats(found.devices, replayed) == observed
    assert any(one.processes for one in observed.values())
