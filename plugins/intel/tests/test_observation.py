"""Measurements: files, counters that move, and a process that holds a device."""

from __future__ import annotations

import pytest
from anyaccel.plugin import DeviceProcess, Health
from anyaccel_intel import observation, plugin

ADDRESS = "0000:00:10.0"
PATH = f"/sys/bus/pci/devices/{ADDRESS}"


def test_memory_and_temperature_come_from_sysfs(machine, devices):
    changes = {
        f"{PATH}/hwmon/hwmon3/temp2_input": {"text": "56000\n"},
        f"{PATH}/hwmon/hwmon3/temp3_input": {"text": "61000\n"},
    }
    (stats,) = plugin.anyaccel_stats(devices("b580-in-vm"), machine("b580-in-vm", changes=changes)).values()
    assert stats.memory_used_bytes == 31457280
    assert stats.temperature_celsius == 61.0
    assert stats.health is Health.HEALTHY
    assert (stats.power_watts, stats.utilization, stats.processes) == (None, None, None)


def test_an_unreported_value_is_unknown_and_not_zero(machine, devices):
    found = devices("flex140-uhd770")
    for stats in plugin.anyaccel_stats(found, machine("flex140-uhd770")).values():
        assert stats == type(stats)(health=Health.HEALTHY)


@pytest.mark.parametrize(("pci_id", "health"), [("0x4680", Health.HEALTHY), ("0x3e98", Health.UNKNOWN)])
def test_integrated_gpu_has_no_sensor_and_the_health_that_files_tell(pci_id, health, machine, devices):
    changes = {"/sys/bus/pci/devices/0000:00:02.0/device": {"text": f"{pci_id}\n"}}
    found = devices("uhd770-alone", changes=changes)
    (stats,) = plugin.anyaccel_stats(found, machine("uhd770-alone", changes=changes)).values()
    assert (stats.health, stats.temperature_celsius, stats.memory_used_bytes) == (health, None, None)


def test_gpu_that_left_the_bus_is_unhealthy(machine, devices):
    (stats,) = plugin.anyaccel_stats(devices("uhd770-alone"), machine("driver-without-card")).values()
    assert "gone from the PCI bus" in stats.health_reason


def test_hot_and_wedged_cards_are_unhealthy_with_the_reason(machine, devices):
    hot = {f"{PATH}/hwmon/hwmon3/temp2_input": {"text": "104000\n"}}
    (stats,) = plugin.anyaccel_stats(devices("b580-in-vm"), machine("b580-in-vm", changes=hot)).values()
    assert (stats.health, stats.health_reason) == (Health.UNHEALTHY, "it has 104 degrees Celsius")
    assert stats.health_remedy == "let it cool down"
    (stats,) = plugin.anyaccel_stats(devices("b580-wedged"), machine("b580-wedged")).values()
    assert stats.health is Health.UNHEALTHY


def test_rates_and_processes_are_replayed_from_a_recording(machine, devices):
    queries = {
        "sysfs/rates": {"value": {ADDRESS: {"power_watts": 91.5, "utilization": 0.25}}},
        "proc/holders": {"value": {"holders": {"/dev/dri/renderD128": [12, 4711]}, "complete": False}},
        "proc/fdinfo": {"value": {ADDRESS: {"4711": 1 << 20}}},
    }
    (stats,) = plugin.anyaccel_stats(devices("b580-in-vm"), machine("b580-in-vm", queries=queries)).values()
    assert (stats.power_watts, stats.utilization) == (91.5, 0.25)
    assert stats.processes == (DeviceProcess(pid=12), DeviceProcess(pid=4711, memory_bytes=1 << 20))


def test_tiles_count_the_memory_of_their_own_tile(machine, devices):
    changes = {
        f"/sys/bus/pci/devices/0000:1a:00.0/tile{tile}/vram0/used_bytes": {"text": f"{tile + 1}000\n"}
        for tile in (0, 1)
    }
    found = devices("max1550-4card")
    stats = plugin.anyaccel_stats(found[:3], machine("max1550-4card", changes=changes))
    assert [each.memory_used_bytes for each in stats.values()] == [1000, 2000, None]


class Clock:
    """A clock that advances in ``sleep``, with a callback meanwhile."""

    def __init__(self, meanwhile=None):
        self.now, self.meanwhile = 100.0, meanwhile

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


def test_rates_are_measured_over_one_interval_for_all_cards(tmp_path, monkeypatch):
    cards = ("0000:03:00.0", "0000:04:00.0")
    energy = [tmp_path / card / "hwmon/hwmon0/energy1_input" for card in cards]
    idle = tmp_path / cards[1] / "tile0/gt0/gtidle/idle_residency_ms"
    for path in (*energy, idle):
        path.parent.mkdir(parents=True)
        path.write_text("1000000\n")

    def draw() -> None:
        energy[0].write_text("31000000\n")
        idle.write_text("1000050\n")

    monkeypatch.setattr(observation, "time", Clock(draw))
    rates = observation.sample(cards, root=str(tmp_path), interval=0.2)
    assert rates == {cards[0]: {"power_watts": pytest.approx(150)}, cards[1]: {"utilization": pytest.approx(0.75)}}


def test_cards_without_counters_cost_no_time(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(observation, "time", clock)
    assert observation.sample(["0000:03:00.0"], root=str(tmp_path), interval=5) == {}
    assert clock.now == 100.0


def test_a_gpu_has_no_holder_only_after_a_complete_scan(machine, devices):
    queries = {"proc/holders": {"value": {"holders": {}, "complete": True}}}
    (stats,) = plugin.anyaccel_stats(devices("b580-in-vm"), machine("b580-in-vm", queries=queries)).values()
    assert stats.processes == ()


@pytest.mark.parametrize(
    ("lines", "size"),
    [
        ("drm-resident-vram0:\t3072 KiB\n", 3 << 20),
        ("drm-resident-local0:\t5 MiB\n", 5 << 20),
        ("drm-resident-vram0:\t4096\n", 4096),
        ("drm-resident-system0:\t4096 KiB\n", None),
    ],
)
def test_memory_is_counted_once_per_client(lines, size, tmp_path):
    folder = tmp_path / "4711" / "fdinfo"
    folder.mkdir(parents=True)
    for descriptor in ("3", "4"):  # duplicated: the same client
        (folder / descriptor).write_text(
            f"pos:\t0\ndrm-driver:\txe\ndrm-pdev:\t0000:03:00.0\ndrm-client-id:\t9\n{lines}"
        )
    (folder / "5").write_text("pos:\t0\n")
    found = observation.resident([4711, 4712], proc=str(tmp_path))
    assert found == ({"0000:03:00.0": {"4711": size}} if size else {})
