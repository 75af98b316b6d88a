"""Devices, health and findings on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.model import DeviceProcess, Fractional, Health
from anyaccel_kunlunxin import plugin
from anyaccel_testing import context
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
load, replay, detect = MACHINES.load, MACHINES.replay, MACHINES.detect
UNKNOWN = "its xpu-smi index is unknown, so no process can be confined to it"


def test_a_device_has_the_index_of_the_tool_and_the_node_of_its_minor_number() -> None:
    found = {device.index: device for device in detect("p800-oam-8card-minors").devices}

    assert (found[1].pci_bus_id, found[1].nodes) == ("0000:23:00.0", ("/dev/xpu2",))
    assert (found[6].pci_bus_id, found[6].nodes) == ("0000:c3:00.0", ("/dev/xpu5",))
    assert (found[0].memory_bytes, found[0].health) == (98304 << 20, Health.HEALTHY)
    assert plugin.anyaccel_tags(found[0]) == ("Kunlunxin-P800", "P800", "P800-OAM")
    assert plugin.anyaccel_fractional(found[0]) is Fractional.NO


def test_each_half_of_a_board_is_linked() -> None:
    devices = detect("p800-oam-8card-minors").devices

    halves = [{devices.index(d) for d in devices if d.id in {device.id, *device.links}} for device in devices]
    assert halves == [{0, 1, 2, 3}] * 4 + [{4, 5, 6, 7}] * 4
    assert all(device.links == {} for device in detect("p800-pcie-2card").devices)


def test_a_device_that_is_alone_needs_no_tool_to_have_the_index_0() -> None:
    (device,) = detect("p800-1card-no-tool").devices

    assert (device.index, device.nodes, device.health, device.usable) == (0, ("/dev/xpu5",), Health.UNKNOWN, True)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("p800-2card-tool-hangs", "did not end within"),
        ("p800-2card-another-tool", "exit status 106"),
        ("p800-2card-garbage-lines", "lines that begin with a PCI address and an index (got '| XPU-SMI |')"),
    ],
)
def test_devices_without_a_known_index_are_listed_and_not_given_out(name: str, note: str) -> None:
    detected = plugin.anyaccel_detect(replay(name))

    assert [device.health_reason for device in detected.devices] == [UNKNOWN] * 2
    assert note in detected.notes[0]


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        (
            "p800-error-and-lost",
            ["the driver reports its state as ERROR", "xpu-smi does not show it", "no driver is bound to it"],
        ),
        ("p800-2card-not-permitted", [f"you may not open /dev/xpu{n}" for n in (0, 1)]),
        ("k200-and-r200-vf", ["it holds two devices, which are not told apart here"]),
    ],
)
def test_a_device_that_cannot_be_used_says_why(name: str, reasons: list[str]) -> None:
    devices = detect(name).devices

    assert [device.health_reason for device in devices] == reasons
    assert all(device.health_remedy for device in devices)


def test_other_devices_of_a_vendor_id_that_was_another_ones_do_not_count() -> None:
    assert plugin.anyaccel_detect(replay("not-xpu-safenet")) is None


def test_load_and_holders() -> None:
    ctx = replay("p800-pcie-2card")
    stats = plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx)

    idle, busy = stats["kunlunxin-0000:01:00.0"], stats["kunlunxin-0000:21:00.0"]
    assert (busy.memory_used_bytes, busy.utilization) == (40960 << 20, 0.87)
    assert (busy.temperature_celsius, busy.power_watts) == (61, 231)
    assert (idle.processes, busy.processes) == ((), (DeviceProcess(pid=777),))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("p800-pcie-2card", []),
        ("p800-1card-no-tool", ["xpu-smi is not on the PATH"]),
        ("p800-2card-tool-hangs", ["did not end within"]),
        ("p800-error-and-lost", ["xpu-smi does not show kunlunxin-0000:21:00.0, kunlunxin-0000:41:00.0"]),
    ],
)
def test_what_is_wrong_is_found(name: str, words: list[str]) -> None:
    findings = plugin.anyaccel_diagnose(replay(name))

    assert len(findings) == len(words)
    assert all(word in finding.reason and finding.remedy for word, finding in zip(words, findings, strict=True))


def test_a_tool_that_shows_no_device_is_not_believed() -> None:
    recording = load("p800-pcie-2card")
    recording["commands"][0]["stdout"] = "Attached XPUs : 0\n"

    (note,) = plugin.anyaccel_detect(context(recording)).notes
    assert note == "xpu-smi must answer a section 'XPU' for each device; run 'xpu-smi -q' by hand"
