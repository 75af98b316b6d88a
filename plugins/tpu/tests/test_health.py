"""Holders of chips, and findings."""

import os
import subprocess
import sys
import time

import pytest
from anyaccel.plugin import DeviceProcess, Health, ProbeContext, Severity
from anyaccel.probe.host import HostFacts
from anyaccel_tpu import plugin


def _v6e(tree, count=4):
    for index in range(count):
        tree.pci(f"0000:00:0{index + 4}.0", "0x006f", group=str(index), driver="vfio-pci")
        tree.node(f"/dev/vfio/{index}")
    tree.node("/dev/vfio/vfio")


def _findings(tree, environ=None):
    environ = {"TPU_SKIP_MDS_QUERY": "1"} if environ is None else environ
    return plugin.anyaccel_diagnose(tree.context(environ))


@pytest.fixture
def holder():
    """A real process with a device node open."""
    code = "import sys; held = open('/dev/full', 'wb'); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield process


def test_stats_name_the_holder_of_a_recorded_machine(recorded, detected):
    devices = detected("v6e-1-compute-engine")
    (stats,) = plugin.anyaccel_stats(devices, recorded("v6e-1-compute-engine")).values()
    assert stats.processes == (DeviceProcess(pid=1469584),)
    assert stats.health is Health.HEALTHY
    assert (stats.memory_used_bytes, stats.utilization, stats.temperature_celsius, stats.power_watts) == (None,) * 4


def test_a_chip_has_no_holder_only_after_a_complete_scan(recorded, detected):
    devices = detected("v3-8")
    stats = plugin.anyaccel_stats(devices, recorded("v3-8"))
    assert [stats[device.id].processes for device in devices] == [None] * 4


def test_stats_on_this_machine_see_a_real_holder(holder, detected):
    from dataclasses import replace

    device = replace(detected("v3-8")[0], nodes=("/dev/full",))
    ctx = ProbeContext(HostFacts(dict(os.environ)), time.monotonic() + 10)
    (stats,) = plugin.anyaccel_stats([device], ctx).values()
    assert DeviceProcess(pid=holder.pid) in stats.processes


def test_a_node_that_went_away_makes_the_chip_unhealthy(tree):
    _v6e(tree)
    devices = tree.detect().devices
    (tree.root / "dev/vfio/2").unlink()
    stats = plugin.anyaccel_stats(devices, tree.context())
    assert [stats[device.id].health for device in devices].count(Health.UNHEALTHY) == 1
    gone = stats[devices[2].id]
    assert (gone.health_reason, gone.health_remedy) == ("/dev/vfio/2 is gone", "restart the TPU VM")


def test_a_sound_machine_has_no_findings(tree):
    _v6e(tree)
    assert [*_findings(tree)] == []


def test_bounds_that_announce_too_many_chips_are_a_finding(recorded):
    (finding,) = plugin.anyaccel_diagnose(recorded("v6e-1-colab"))
    assert "announces more chips than the 1 of this host" in finding.reason


@pytest.mark.parametrize(
    ("environ", "fix"),
    [
        ({"TPU_VISIBLE_CHIPS": "0", "TPU_VISIBLE_DEVICES": "1"}, "unset TPU_VISIBLE_DEVICES"),
        (
            {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"},
            "unset TPU_CHIPS_PER_HOST_BOUNDS",
        ),
        ({"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "2,2,1"}, "unset TPU_HOST_BOUNDS"),
        ({"TPU_VISIBLE_CHIPS": "0", "TPU_VISIBLE_DEVICE_PATHS": "/dev/vfio/1"}, "unset TPU_VISIBLE_DEVICE_PATHS"),
    ],
)
def test_variables_that_contradict_each_other_are_findings(tree, environ, fix):
    _v6e(tree)
    (finding,) = _findings(tree, {"TPU_SKIP_MDS_QUERY": "1", **environ})
    assert (finding.severity, finding.remedy) == (Severity.WARN, fix)


def test_a_slice_that_is_not_whole_is_a_finding(tree):
    _v6e(tree)
    environ = {"TPU_ACCELERATOR_TYPE": "v6e-16", "TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_SKIP_MDS_QUERY": "1"}
    (finding,) = _findings(tree, environ)
    assert finding.reason == "the slice has 4 hosts and TPU_WORKER_HOSTNAMES names 3"


@pytest.mark.parametrize(("setting", "count"), [("always [madvise] never\n", 1), ("[always] madvise never\n", 0)])
def test_huge_pages_matter_from_v5e_on(tree, setting, count):
    _v6e(tree)
    tree.text("/sys/kernel/mm/transparent_hugepage/enabled", setting)
    assert len(_findings(tree)) == count


def _locked(recorded, answer):
    from pathlib import Path

    from anyaccel_testing import context, load_recording

    recording = load_recording(Path(__file__).parent.parent / "recordings" / "v6e-4-pod-pci-hidden")
    recording["paths"]["/tmp/libtpu_lockfile"] = {"text": ""}
    recording["queries"] = {} if answer is None else {"proc/holders": {"value": answer}}
    return plugin.anyaccel_diagnose(context(recording))


def test_a_lock_file_with_a_holder_is_no_finding(recorded):
    assert _locked(recorded, {"holders": {"/dev/vfio/0": [7]}, "complete": True}) == ()


def test_a_lock_file_without_a_holder_may_be_removed(recorded):
    (finding,) = _locked(recorded, {"holders": {}, "complete": True})
    assert finding.remedy == "rm /tmp/libtpu_lockfile"


def test_a_lock_file_is_not_to_be_removed_unseen(recorded):
    (finding,) = _locked(recorded, None)
    assert finding.remedy.startswith(
        "if 'sudo fuser -v /dev/vfio/0 /dev/vfio/1 /dev/vfio/2 /dev/vfio/3' shows no holder"
    )
