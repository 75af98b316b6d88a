"""Sensors and processes, from sysfs."""

from __future__ import annotations

import time

import pytest
from anyaccel.plugin import DeviceProcess, Health, ProbeContext
from anyaccel.probe.recording import RecordedFacts
from anyaccel.vendors.contract import stats_faults
from anyaccel_amd import plugin
from anyaccel_testing import context

CARD = "/sys/bus/pci/devices/0000:05:00.0"
NODES = "/sys/class/kfd/kfd/topology/nodes"
PROC = "/sys/class/kfd/kfd/proc"
SENSORS = {
    f"{CARD}/gpu_busy_percent": "37\n",
    f"{CARD}/hwmon/hwmon5/temp1_input": "41000\n",
    f"{CARD}/hwmon/hwmon5/temp1_label": "edge\n",
    f"{CARD}/hwmon/hwmon5/temp2_input": "45500\n",
    f"{CARD}/hwmon/hwmon5/temp2_label": "junction\n",
    f"{CARD}/hwmon/hwmon5/power1_input": "138000000\n",
}


def stats(recording, changed=None):
    """Detect on a machine, then observe the devices on the same or a changed machine."""
    detected = plugin.anyaccel_detect(context(recording))
    assert detected is not None
    found = plugin.anyaccel_stats(detected.devices, context(changed or recording))
    assert list(stats_faults(found, {})) == []
    return found


def test_sensors_are_in_base_units(recorded):
    found = stats(recorded("mi300x-8gpu", SENSORS))["amd-0000:05:00.0"]
    assert (found.memory_used_bytes, found.utilization, found.temperature_celsius, found.power_watts) == (
        297054208,
        0.37,
        45.5,
        138.0,
    )
    assert (found.health, found.processes) == (Health.HEALTHY, None)


@pytest.mark.parametrize(
    ("gone", "kept"), [(f"{CARD}/hwmon/hwmon5/temp2_input", 41.0), (f"{CARD}/hwmon/hwmon5/temp1_input", 45.5)]
)
def test_the_temperature_is_the_junctions_else_the_edges(recorded, gone, kept):
    recording = recorded("mi300x-8gpu", SENSORS)
    del recording["paths"][gone]
    assert stats(recording)["amd-0000:05:00.0"].temperature_celsius == kept


def test_average_power_is_preferred_where_the_chip_has_it(recorded):
    both = {**SENSORS, f"{CARD}/hwmon/hwmon5/power1_average": "140000000\n"}
    assert stats(recorded("mi300x-8gpu", both))["amd-0000:05:00.0"].power_watts == 140.0


def test_what_is_missing_or_fails_is_none(recorded):
    broken = {name: {"errno": "EOPNOTSUPP"} for name in SENSORS}
    found = stats(recorded("mi300x-8gpu", broken))["amd-0000:05:00.0"]
    assert (found.utilization, found.temperature_celsius, found.power_watts) == (None, None, None)
    assert found.health is Health.HEALTHY


@pytest.mark.parametrize("value", ["101", "-1", "65535", "busy"])
def test_an_impossible_utilization_is_none(recorded, value):
    found = stats(recorded("mi300x-8gpu", {f"{CARD}/gpu_busy_percent": value}))
    assert found["amd-0000:05:00.0"].utilization is None


def test_a_partition_has_its_own_memory_and_not_the_cards_load(recorded):
    bank = f"{NODES}/3/mem_banks/0"
    changes = {
        **SENSORS,
        f"{CARD}/mem_info_vram_used": "9999\n",
        f"{bank}/properties": "heap_type 1\nsize_in_bytes 25753026560\n",
        f"{bank}/used_memory": "1048576\n",
        f"{NODES}/4/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 25753026560\n",
    }
    found = stats(recorded("mi300x-8gpu-cpx", changes))
    own, other = found["amd-0000:05:00.0/1"], found["amd-0000:05:00.0/2"]
    assert (own.memory_used_bytes, own.utilization, own.power_watts) == (1048576, None, None)
    assert own.temperature_celsius == 45.5
    assert other.memory_used_bytes is None


def test_a_process_counts_where_it_has_memory_or_a_queue(recorded):
    changes = {
        f"{NODES}/1/gpu_id": "13261\n",
        f"{PROC}/100/vram_13261": "4096\n",
        f"{PROC}/200/vram_13261": "0\n",
        f"{PROC}/200/queues/1/gpuid": "13261\n",
        f"{PROC}/300/vram_13261": "0\n",
        f"{PROC}/400/vram_777": "4096\n",
    }
    found = stats(recorded("mi25-1gpu", changes))["amd-0000:19:00.0"]
    assert found.processes == (DeviceProcess(pid=100, memory_bytes=4096), DeviceProcess(pid=200, memory_bytes=0))


def test_no_process_is_not_unknown(recorded):
    found = stats(recorded("mi25-1gpu", {PROC: {"dir": True}}))
    assert found["amd-0000:19:00.0"].processes == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{NODES}/2": None}, "KFD node 2 is gone"),
        ({f"{CARD}/mem_info_vram_used": {"errno": "ENODEV"}}, "does not answer the driver"),
        ({"/dev/dri/renderD128": None}, "/dev/dri/renderD128 is missing"),
    ],
)
def test_health_is_looked_at_anew_each_time(recorded, changes, words):
    before, after = recorded("mi300x-8gpu"), recorded("mi300x-8gpu", changes)
    found = stats(before, after)
    assert words in found["amd-0000:05:00.0"].health_reason
    assert found["amd-0000:27:00.0"].health is Health.HEALTHY
    assert stats(before)["amd-0000:05:00.0"].health is Health.HEALTHY


class Asked(RecordedFacts):
    """A recorded machine that logs queries to libraries."""

    def __init__(self, recording):
        super().__init__(recording)
        self.questions = []

    def query(self, name, fn):
        self.questions.append(name)
        return super().query(name, fn)


def test_the_library_is_asked_only_where_sysfs_lacks_something(recorded):
    cards = [f"/sys/bus/pci/devices/0000:{bus}:00.0" for bus in ("05", "27", "47", "65", "85", "a7", "c7", "e5")]
    complete = recorded("mi300x-8gpu", {f"{card}/gpu_busy_percent": "1\n" for card in cards})
    for recording, questions in ((complete, []), (recorded("mi300x-8gpu"), ["amdsmi/metrics"])):
        facts = Asked(recording)
        ctx = ProbeContext(facts, time.monotonic() + 10)
        detected = plugin.anyaccel_detect(ctx)
        assert detected is not None
        plugin.anyaccel_stats(detected.devices, ctx)
        assert facts.questions == questions
