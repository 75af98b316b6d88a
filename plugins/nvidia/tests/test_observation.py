"""Stats, containers, diagnosis and what XIDs mean."""

import anyaccel_nvidia as plugin
import pytest
from anyaccel.plugin import Health, Severity
from anyaccel_nvidia import health

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


def findings(ctx, severity):
    return [finding for finding in plugin.anyaccel_diagnose(ctx) if finding.severity is severity]


def test_a_sound_machine_has_nothing_but_good_news(recorded):
    (finding,) = plugin.anyaccel_diagnose(recorded("h100-8gpu-nvswitch"))
    assert finding.severity is Severity.OK
    assert "usable devices: 8" in finding.reason


def test_nothing_is_found_where_no_nvidia_gpu_is(recorded):
    assert plugin.anyaccel_diagnose(recorded("no-nvidia-gpu")) == []


def test_every_bad_finding_has_a_way_out(recorded):
    names = ("h100-8gpu-one-lost", "mixed-3gpu-modes", "no-driver-vfio-and-nouveau", "a100-1gpu-mig-empty")
    for name in (*names, "l4-1gpu-no-binding", "l40s-1gpu"):
        bad = [finding for finding in plugin.anyaccel_diagnose(recorded(name)) if finding.severity is not Severity.OK]
        assert bad
        assert all(finding.remedy and finding.reason.endswith(".") for finding in bad), name


def test_a_lost_gpu_is_a_failure(recorded):
    (finding,) = findings(recorded("h100-8gpu-one-lost"), Severity.FAIL)
    assert "GPU-00000000-0000-0000-0000-000000000004" in finding.reason
    assert "reboot" in finding.remedy


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("all", "NVIDIA_VISIBLE_DEVICES"),
        ("0,0", "twice"),
        ("0,9", "leaves 1 of its 2 entries"),
        ("gpu-0", "leaves 0 of its 1"),
    ],
)
def test_masks_that_say_something_else_than_meant_are_found(recorded, value, words):
    (finding,) = findings(recorded("h100-8gpu-nvswitch", {"CUDA_VISIBLE_DEVICES": value}), Severity.WARN)
    assert words in finding.reason


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "0,1", "GPU-00000000-0000-0000-0000-000000000002"])
def test_masks_that_say_what_is_meant_are_no_finding(recorded, value):
    assert not findings(recorded("h100-8gpu-nvswitch", {"CUDA_VISIBLE_DEVICES": value}), Severity.WARN)


def test_indexes_without_order_on_a_mixed_machine_are_found(recorded):
    found = findings(recorded("mixed-3gpu-modes", {"CUDA_VISIBLE_DEVICES": "1"}), Severity.WARN)
    assert any("PCI_BUS_ID" in finding.remedy for finding in found)


def test_the_package_that_shadows_the_binding_is_found(machine):
    queries = {
        "nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}},
        "nvml/binding": {"value": {"pynvml": "13.0.1", "nvidia-ml-py": "13.590.48"}},
    }
    (finding,) = findings(machine({"/dev/nvidiactl": {"char": [195, 255]}}, queries), Severity.WARN)
    assert "pip uninstall pynvml" in finding.remedy


def test_an_excluded_gpu_is_found(machine):
    base = "/sys/bus/pci/devices/0000:70:00.0"
    paths = {f"{base}/vendor": {"text": "0x10de"}, f"{base}/class": {"text": "0x030200"}}
    paths[f"{base}/device"] = {"text": "0x27b8"}
    paths[f"{base}/driver"] = {"link": "../drivers/nvidia"}
    paths["/proc/driver/nvidia/gpus/0000:70:00.0/information"] = {"text": "Model: NVIDIA L4\nGPU Excluded: Yes\n"}
    paths["/dev/nvidiactl"] = {"char": [195, 255]}
    queries = {"nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}}}
    (finding,) = findings(machine(paths, queries), Severity.WARN)
    assert "NVreg_ExcludedGpus" in finding.remedy


def test_a_file_that_makes_no_sense_is_a_failure(machine):
    base = "/sys/bus/pci/devices/0000:70:00.0"
    paths = {f"{base}/{name}": {"text": text} for name, text in {"vendor": "0x10de", "class": "0x030200"}.items()}
    paths[f"{base}/device"] = {"text": "0x27b8"}
    paths["/proc/driver/nvidia/gpus/0000:70:00.0/information"] = {"text": "Device Minor: zero\n"}
    queries = {"nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}}}
    (finding,) = plugin.anyaccel_diagnose(machine(paths, queries))
    assert finding.severity is Severity.FAIL
    assert "'zero'" in finding.reason


LOG = """\
[ 12.3] NVRM: Xid (PCI:0000:3b:00): 13, pid=77, name=python, Graphics Exception
[ 13.4] NVRM: Xid (PCI:0000:5D:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 13.5] NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus.
[ 14.0] NVRM: Xid (PCI:0000:9b:00): 94, pid=78, Contained memory error
"""


def test_xids_are_read_by_address_each_once():
    assert health.xids(LOG) == {"0000:3b:00": [13], "0000:5d:00": [79], "0000:9b:00": [94]}


def test_only_xids_that_are_the_gpus_fault_are_serious():
    assert health.serious([13, 31, 43, 45, 48, 68, 79, 94, 95, 109]) == [48, 79, 95, 109]


def test_serious_xids_of_the_kernel_log_are_failures(machine):
    system = {"nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}}}
    command = {"argv": ["dmesg"], "returncode": 0, "stdout": LOG}
    ctx = machine({"/dev/nvidiactl": {"char": [195, 255]}}, system, commands=[command])
    (finding,) = findings(ctx, Severity.FAIL)
    assert "XID 79" in finding.reason
    assert "0000:5d:00" in finding.reason


@pytest.mark.parametrize("command", [{"argv": ["dmesg"], "returncode": 1}, {"argv": ["dmesg"], "timeout": True}])
def test_a_kernel_log_that_may_not_be_read_is_no_finding(machine, command):
    system = {"nvml/system": {"value": {"driver": "550.54", "cuda": None, "count": 0}}}
    assert plugin.anyaccel_diagnose(machine({"/dev/nvidiactl": {"char": [195, 255]}}, system, commands=[command])) == []
