"""Statistics, holders and findings."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyaccel.model import DeviceProcess, Finding, Health, Severity
from anyaccel.testing import context, load_recording
from anyaccel_gaudi import plugin

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


def test_holders_are_told_by_the_compute_node_and_an_empty_list_means_nobody() -> None:
    stats = stats_of("gaudi2-8hpu")

    assert stats["gaudi-0000:19:00.0"].processes == (DeviceProcess(pid=4711),)
    assert stats["gaudi-0000:43:00.0"].processes == ()
    free = [id_ for id_, one in stats.items() if one.processes == ()]
    assert len(free) == 7


def test_holders_are_unknown_where_processes_could_not_be_listed() -> None:
    assert all(one.processes is None for one in stats_of("gaudi3-2hpu-no-module-id-in-sysfs").values())


def proc(root: Path, namespace: str = "4026531836", **processes: str) -> str:
    (root / "self/ns").mkdir(parents=True)
    (root / "self/ns/pid").symlink_to(f"pid:[{namespace}]")
    for name, target in processes.items():
        (root / name[1:] / "fd").mkdir(parents=True)
        (root / name[1:] / "fd/5").symlink_to(target)
    return str(root)


def test_a_scan_finds_who_has_a_node_open(tmp_path: Path) -> None:
    where = proc(tmp_path, p7="/dev/accel/accel12", p31="/dev/hl0", p100="/dev/accel/accel12", p8="/dev/null")

    answer = scan_holders(where)

    assert answer == {"holders": {"/dev/accel/accel12": [7, 100], "/dev/hl0": [31]}, "complete": True}


def test_a_scan_inside_a_container_knows_that_it_does_not_see_everybody(tmp_path: Path) -> None:
    assert scan_holders(proc(tmp_path, namespace="4026532999"))["complete"] is False


def test_a_scan_of_this_machine_works() -> None:
    assert set(scan_holders()) == {"holders", "complete"}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gaudi3-2hpu-hl-smi-hangs", RuntimeError, "did not end within"),
        ("gaudi3-2hpu-hl-smi-fails", RuntimeError, "exit status 1"),
        ("gaudi3-2hpu-hl-smi-garbage", ValueError, "one line of 5 values"),
    ],
)
def test_statistics_that_a_broken_tool_prevents_are_an_error(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
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
    assert "comes back by itself" in one.health_reason
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


def test_nothing_is_found_where_the_vendor_is_absent() -> None:
    assert findings("no-gaudi-intel-npu") == []


def test_a_sound_machine_gets_one_good_finding() -> None:
    (finding,) = findings("gaudi2-8hpu")

    assert finding == Finding(severity=Severity.OK, reason="8 HPUs (HL-225), habanalabs driver 1.12.1-cb7a7bc")


@pytest.mark.parametrize(
    ("name", "environ", "severity", "message", "fix"),
    [
        ("gaudi2-8hpu", {"HABANA_VISIBLE_DEVICES": "3"}, "WARN", "outside a container nothing reads it", "module ids"),
        ("gaudi2-8hpu", {"HABANA_VISIBLE_MODULES": "8"}, "WARN", "name no device", "hl-smi -Q index,module_id"),
        ("gaudi2-8hpu", {"HABANA_VISIBLE_MODULES": "all"}, "FAIL", "must be module ids", "unset it"),
        ("gaudi2-8hpu", {"HABANA_RUNTIME_ERROR": "no such device"}, "FAIL", "no such device", "start the container"),
        ("gaudi2-8hpu-statuses", {}, "WARN", "'in reset'", "comes back by itself"),
        ("gaudi2-8hpu-statuses", {}, "FAIL", "'disabled'", "reload the driver"),
        ("gaudi2-8hpu-statuses", {}, "WARN", "hl-smi is not on the PATH", "install the habanalabs tools"),
        ("gaudi2-no-driver", {}, "FAIL", "no driver is bound", "modprobe habanalabs"),
        ("driver-without-device", {}, "WARN", "no Gaudi device is on the PCI bus", "lspci -d 1da3:"),
        ("gaudi3-2hpu-hl-smi-hangs", {}, "FAIL", "hl-smi did not end within", "by hand"),
        ("gaudi3-2hpu-hl-smi-garbage", {}, "FAIL", "hl-smi must answer one line", "by hand"),
        ("gaudi3-2hpu-hl-smi-fails", {}, "FAIL", "Driver is not loaded", "driver is loaded"),
        ("gaudi1-2hpu-before-accel", {}, "FAIL", "module id is unknown", "6.8 or later"),
    ],
)
def test_what_is_wrong_is_found_with_a_way_out(
    name: str, environ: dict[str, str], severity: str, message: str, fix: str
) -> None:
    matching = [finding for finding in findings(name, **environ) if message in finding.reason]

    assert [finding.severity.name for finding in matching] == [severity] * len(matching) != []
    assert all(fix in finding.remedy for finding in matching)


def test_a_container_is_not_warned_about_the_variable_that_made_it() -> None:
    messages = " ".join(finding.reason for finding in findings("gaudi2-container-1-of-8"))

    assert "nothing reads it" not in messages


def test_devices_that_the_tool_does_not_show_are_named(machine) -> None:
    for minor in range(3):
        machine.hpu(f"0000:4{minor}:00.0", minor=minor, module_id=str(minor))
    machine.hl_smi('echo "0000:40:00.0, 768, 0, 30, 84"; echo "0000:41:00.0, 768, 0, 30, 84"')

    messages = [finding.reason for finding in plugin.anyaccel_diagnose(machine.context())]

    assert "hl-smi shows 2 devices and PCI 3; it does not show gaudi-0000:42:00.0" in messages
    assert "3 devices are on the PCI bus, and boards have 1, 2, 4 or 8" in messages


def test_the_tool_is_asked_for_the_fields_of_statistics(machine) -> None:
    machine.hpu("0000:43:00.0", module_id="0")
    machine.hl_smi(f'[ "$2" = "{STATE}" ] && echo "0000:43:00.0, 1, 2, 3, 4"')
    devices = plugin.anyaccel_detect(machine.context()).devices

    (one,) = plugin.anyaccel_stats(devices, machine.context()).values()

    assert one.power_watts == 4.0
