"""Stats, containers, diagnosis, and the meaning of XIDs."""

import re

import pytest
from anyaccel.plugin import Health, Severity
from anyaccel_nvidia import faults, plugin

MIB = 1 << 20


def stats_of(ctx):
    return plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100-1gpu", (0, 0.0, 41, 69.85)),
        ("h200-1gpu", (32362 * MIB, 1.0, 52, 627.4)),
        ("l40s-1gpu", (0, 1.0, 63, 144.97)),
        ("rtx4080-super-1gpu", (596 * MIB, 0.0, 43, 26.2)),
        ("h100-1gpu-mig", (11125 * MIB, None, 53, None)),
        ("wsl2-1gpu", (797 * MIB, None, 40, 39.25)),
        ("gb10-1gpu", ((125_571_016 - 110_000_000) * 1024, 0.0, 35, 11.17)),
    ],
)
def test_stats_are_those_of_the_capture(recorded, name, expected):
    stats = next(iter(stats_of(recorded(name)).values()))
    assert expected == (stats.memory_used_bytes, stats.utilization, stats.temperature_celsius, stats.power_watts)
    assert stats.health is Health.HEALTHY


def test_process_lists_may_be_unknown_empty_or_without_memory(recorded):
    processes = {
        name: next(iter(stats_of(recorded(name)).values())).processes
        for name in ("wsl2-1gpu", "h100-1gpu", "h200-1gpu", "h100-1gpu-mig")
    }
    assert processes["wsl2-1gpu"] is None
    # An empty list is an answer, None is none: WSL's driver does not list processes.
    assert processes["h100-1gpu"] == ()
    assert [(p.pid, p.memory_bytes) for p in processes["h200-1gpu"]] == [(4242, None)]
    assert [(p.pid, p.memory_bytes) for p in processes["h100-1gpu-mig"]] == [(4242, 11066 * MIB)]


def test_a_lost_gpu_is_unhealthy_and_an_unknown_one_is_left_out(recorded):
    stats = stats_of(recorded("h100-8gpu-one-lost"))
    assert [found.health for found in stats.values()] == [Health.HEALTHY, Health.UNHEALTHY]


def test_a_driver_that_went_away_says_nothing_about_gpus(machine, gpus):
    error = {"error": {"kind": "NVMLError_DriverNotLoaded", "message": "", "value": 9}}
    devices = gpus(2)
    assert plugin.anyaccel_stats(devices, machine(queries={f"nvml/stats/{d.id}": error for d in devices})) == {}


def test_a_container_gets_nodes_and_the_runtimes_variables(devices_of):
    devices = devices_of("h100-8gpu-nvswitch")[2:4]
    edits = plugin.anyaccel_container(devices)
    common = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
    assert edits.nodes == (*common, "/dev/nvidia2", "/dev/nvidia3")
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == f"{devices[0].id},{devices[1].id}"
    assert edits.env["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def test_a_container_without_devices_hides_those_that_the_image_asks_for():
    assert plugin.anyaccel_container(()).env == {"NVIDIA_VISIBLE_DEVICES": "void"}


def test_a_container_on_wsl_gets_the_one_node_and_the_libraries(devices_of):
    edits = plugin.anyaccel_container(devices_of("wsl2-1gpu"))
    assert edits.nodes == ("/dev/dxg",)
    assert [mount.source for mount in edits.mounts] == ["/usr/lib/wsl"]


def test_a_mig_container_gets_the_gpus_node_once_and_both_capabilities(devices_of):
    device = devices_of("h100-1gpu-mig")[0]
    edits = plugin.anyaccel_container([device])
    assert edits.nodes[3:] == device.nodes
    assert edits.env["NVIDIA_VISIBLE_DEVICES"] == device.id


def failures(ctx):
    return [finding for finding in plugin.anyaccel_diagnose(ctx) if finding.severity is Severity.FAIL]


@pytest.mark.parametrize("name", ["no-nvidia-gpu", "h100-8gpu-nvswitch", "h100-8gpu-one-lost"])
def test_what_the_core_says_is_not_said_again(recorded, name):
    """Devices that cannot be used, notes and masks are in the core's own findings."""
    assert list(plugin.anyaccel_diagnose(recorded(name, {"CUDA_VISIBLE_DEVICES": "0,0"}))) == []


@pytest.mark.parametrize(("name", "words"), [("mixed-3gpu-modes", "EXCLUSIVE_PROCESS"), ("l40s-1gpu", "persistence")])
def test_settings_are_found_with_the_way_out(recorded, name, words):
    found = [finding for finding in plugin.anyaccel_diagnose(recorded(name)) if words in finding.reason]
    assert [finding.severity for finding in found] == [Severity.WARN]
    assert all(finding.remedy for finding in found)


def test_the_package_that_shadows_the_binding_is_found(machine):
    queries = {
        "nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}},
        "nvml/binding": {"value": {"pynvml": "13.0.1", "nvidia-ml-py": "13.590.48"}},
    }
    (finding,) = plugin.anyaccel_diagnose(machine({"/dev/nvidiactl": {"char": [195, 255]}}, queries))
    assert "pip uninstall pynvml" in finding.remedy


LOG = """\
[ 12.3] NVRM: Xid (PCI:0000:3b:00): 13, pid=77, name=python, Graphics Exception
[ 13.4] NVRM: Xid (PCI:0000:5D:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 13.5] NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.
[ 14.0] NVRM: Xid (PCI:0000:9b:00): 94, pid=78, Contained memory error
"""


def test_the_kernel_logs_xids_that_are_a_gpus_fault_are_failures(machine):
    """Each once, by address: application errors and contained memory errors are none."""
    # Of these, 13, 31, 43, 45, 68 and 94 are errors of the application, or contained.
    codes = (13, 31, 43, 45, 48, 68, 94, 95, 109)
    log = LOG + "".join(f"[ 15.0] NVRM: Xid (PCI:0000:af:00): {code}, pid=79\n" for code in codes)
    system = {"nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}}}
    queries = {**system, f"dmesg/{faults.XID}": {"value": log}}
    ctx = machine({"/dev/nvidiactl": {"char": [195, 255]}}, queries)
    found = [re.search(r"XID (\d+) for the GPU at (\S+)", finding.reason) for finding in failures(ctx)]
    assert [match.groups() for match in found] == [
        ("79", "0000:5d:00"),
        *((x, "0000:af:00") for x in ("48", "95", "109")),
    ]


@pytest.mark.parametrize("log", [{f"dmesg/{faults.XID}": {"value": ""}}, {}])
def test_a_kernel_log_that_may_not_be_read_is_no_finding(machine, log):
    system = {"nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}}}
    assert plugin.anyaccel_diagnose(machine({"/dev/nvidiactl": {"char": [195, 255]}}, system | log)) == []
