"""A launcher in a cgroup with limited device memory hands out no more than the limit."""

import json
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.inventory.memory import limited
from anyaccel.model import Device
from anyaccel.probe.host import HostFacts

GIB = 1 << 30
ONE, TWO, THREE = "0000:03:00.0", "0000:83:00.0", "0000:c1:00.0"
PLUGIN = (Path(__file__).parent.parent / "vendors" / "pci.py").read_text()


@pytest.fixture
def machine(tmp_path):
    """Write a tree of cgroup v2, and the files of a process in a cgroup."""

    def machine(own, limits):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/elsewhere\n0::{own}\n")
        for group, lines in limits.items():
            folder = tmp_path / "sys/fs/cgroup" / group
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "dmem.max").write_text("".join(f"{line}\n" for line in lines))
        return HostFacts({}, root=str(tmp_path))

    return machine


def memory(facts, *addresses, total=16 * GIB):
    devices = [
        Device(id=f"d{n}", index=n, model="A", memory_bytes=total, pci_bus_id=a) for n, a in enumerate(addresses)
    ]
    return [device.memory_bytes for device in limited(devices, facts)]


def test_the_least_of_all_groups_counts(machine):
    facts = machine(
        "/user.slice/user-7.slice/job",
        {
            "user.slice/user-7.slice/job": [f"drm/{ONE}/vram {12 * GIB}", f"drm/{TWO}/vram max"],
            "user.slice/user-7.slice": [f"drm/{ONE}/vram {8 * GIB}", f"drm/{TWO}/vram {20 * GIB}"],
            "other": [f"drm/{ONE}/vram {GIB}"],
        },
    )
    assert memory(facts, ONE, TWO, THREE) == [8 * GIB, 16 * GIB, 16 * GIB]


@pytest.mark.parametrize(("zeros", "left"), [("0000", 4 * GIB), ("0001", 16 * GIB)])
def test_a_domain_may_be_written_with_eight_digits(machine, zeros, left):
    """As NVIDIA's library does."""
    assert memory(machine("/", {"": [f"acme/{zeros}{ONE}/vidmem {4 * GIB}"]}), ONE) == [left]


def test_a_container_sees_its_group_as_the_root(machine):
    assert memory(machine("/", {"": [f"acme/{ONE.upper()}/vidmem {4 * GIB}"]}), ONE) == [4 * GIB]


def test_the_share_that_we_hold_ourselves_is_no_limit(machine):
    """Shares count in parts of the device, not in parts of our share: half of it would be a quarter."""
    facts = machine(
        "/user/anyaccel-12-0a/below",
        {"user/anyaccel-12-0a": [f"drm/{ONE}/vram {4 * GIB}"], "user": [f"drm/{ONE}/vram {12 * GIB}"]},
    )
    assert memory(facts, ONE) == [12 * GIB]


def test_several_regions_of_a_device_add_up_if_all_are_limited(machine):
    facts = machine(
        "/job",
        {
            "job": [
                f"drm/{ONE}/vram0 {2 * GIB}",
                f"drm/{ONE}/vram1 {3 * GIB}",
                f"drm/{TWO}/vram0 {2 * GIB}",
                f"drm/{TWO}/vram1 max",
            ]
        },
    )
    assert memory(facts, ONE, TWO) == [5 * GIB, 16 * GIB]


def test_a_limit_is_known_where_the_memory_is_not(machine):
    assert memory(machine("/job", {"job": [f"drm/{ONE}/vram {GIB}"]}), ONE, TWO, total=None) == [GIB, None]


def test_a_limit_beyond_all_memory_is_none(machine):
    assert memory(machine("/job", {"job": [f"drm/{ONE}/vram {10**30}"]}), ONE, total=None) == [None]


@pytest.mark.parametrize(
    "lines",
    [[], ["", "nonsense", "drm/vram 5", f"drm/{ONE}/vram", f"drm/{ONE}/vram -5 x", f"drm/{ONE}/v {'9' * 5000}"]],
)
def test_what_makes_no_sense_limits_nothing(machine, lines):
    assert memory(machine("/job", {"job": lines}), ONE) == [16 * GIB]


def test_a_group_without_the_controller_limits_nothing(tmp_path, machine):
    assert memory(machine("/a/b/c", {}), ONE) == [16 * GIB]
    assert memory(HostFacts({}, root=str(tmp_path / "nothing")), ONE) == [16 * GIB]


def test_shares_are_parts_of_what_is_left(install, tmp_path):
    install("pci", PLUGIN)
    paths = {
        "/proc/self/cgroup": {"text": "0::/job\n"},
        "/sys/fs/cgroup/job/dmem.max": {"text": f"drm/{ONE}/vram {4 * GIB}\n"},
    }
    directory = tmp_path / "recorded"
    directory.mkdir()
    (directory / "machine.json").write_text(json.dumps({"schema": "anyaccel.recording/1", "paths": paths}))
    inventory = aa.detect(str(directory))
    assert [device.memory_bytes for device in inventory.devices] == [4 * GIB, 16 * GIB]
    made = aa.prepare("pci/0:0.5", inventory=inventory).environment
    assert made.values["ANYACCEL_MEMORY_LIMIT"] == str(2 * GIB)
    with pytest.raises(aa.NeverFitsError):
        aa.prepare("A:2,mem=8GiB", inventory=inventory)
