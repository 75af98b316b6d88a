"""Devices, health and findings on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.model import DeviceProcess, Fractional, Health
from anyaccel_qualcomm import plugin
from anyaccel_testing import context
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
load, replay, detect = MACHINES.load, MACHINES.replay, MACHINES.detect


def test_a_chip_has_its_qid_and_the_node_of_its_own_number() -> None:
    first, second = detect("pro-2card").devices

    assert (first.index, first.pci_bus_id, first.nodes) == (0, "0000:01:00.0", ("/dev/accel/accel1",))
    assert (second.index, second.pci_bus_id, second.nodes) == (1, "0000:23:00.0", ("/dev/accel/accel0",))
    assert (first.memory_bytes, first.health) == (32692 << 20, Health.HEALTHY)
    assert plugin.anyaccel_fractional(first) is Fractional.SHARED


def test_qids_need_not_begin_at_0_and_a_neighbor_in_the_accel_class_is_not_ours() -> None:
    devices = detect("ultra-2card-8chip").devices

    assert [device.index for device in devices] == list(range(32, 40))
    assert "/dev/accel/accel0" not in {node for device in devices for node in device.nodes}


def test_chips_of_one_board_are_linked() -> None:
    devices = detect("ultra-2card-8chip").devices

    boards = [{devices.index(d) for d in devices if d.id in {device.id, *device.links}} for device in devices]
    assert boards == [{0, 1, 2, 3}] * 4 + [{4, 5, 6, 7}] * 4
    assert all(device.links == {} for name in ("pro-2card", "edge-kit-1chip") for device in detect(name).devices)


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("ultra-2card-8chip", ("AIC100-Ultra", "AIC100")),
        ("pro-2card", ("AIC100-Pro", "AIC100")),
        ("edge-kit-1chip", ("AIC100",)),
        ("pro-error-and-lost", ("AIC100",)),  # one that the tool does not show may be of the same card
    ],
)
def test_memory_and_board_tell_the_card(name: str, tags: tuple[str, ...]) -> None:
    assert plugin.anyaccel_tags(detect(name).devices[0]) == tags


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        (
            "pro-error-and-lost",
            [
                "qaic-util reports its status as Error",
                "qaic-util does not show it",
                "no driver is bound to it",
                "the driver has not registered it",
            ],
        ),
        ("pro-2card-no-rights", ["you may not open /dev/accel/accel1", "you may not open /dev/accel/accel0"]),
        ("pro-2card-no-addresses", ["its QID is unknown, so no process can be confined to it"] * 2),
        ("pro-2card-tool-hangs", ["its QID is unknown, so no process can be confined to it"] * 2),
        ("pro-divided", ["it is divided (QID 100)", ""]),
    ],
)
def test_a_chip_that_cannot_be_used_says_why(name: str, reasons: list[str]) -> None:
    devices = detect(name).devices

    assert [device.health_reason for device in devices] == reasons
    assert all(bool(device.health_remedy) == bool(device.health_reason) for device in devices)


def test_rights_are_the_remedy_where_they_lack() -> None:
    remedies = {device.health_remedy for device in detect("pro-2card-no-rights").devices}
    (note,) = plugin.anyaccel_detect(replay("pro-2card-no-addresses")).notes

    assert remedies == {"be root or a member of the group qaic"}
    assert note == "qaic-util tells no PCI address of QID 0; be root or a member of the group qaic"


def test_a_wireless_card_of_the_same_vendor_is_none() -> None:
    assert plugin.anyaccel_detect(replay("no-qaic-wifi")) is None


def test_load_and_holders() -> None:
    ctx = replay("pro-2card")
    stats = plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx)

    idle, busy = stats["qualcomm-0000:01:00.0"], stats["qualcomm-0000:23:00.0"]
    assert (idle.memory_used_bytes, idle.temperature_celsius) == (0, 34)
    assert (busy.memory_used_bytes, busy.temperature_celsius) == (12288 << 20, 61)
    assert (busy.utilization, busy.power_watts) == (None, None)
    assert (idle.processes, busy.processes) == ((), (DeviceProcess(pid=2024),))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pro-2card", []),
        ("pro-2card-tool-hangs", ["did not end within"]),
        ("pro-2card-no-addresses", ["qaic-util tells no PCI address of QID 0"]),
        ("pro-error-and-lost", ["qaic-util does not show qualcomm-0000:23:00.0"]),
    ],
)
def test_what_is_wrong_is_found(name: str, words: list[str]) -> None:
    findings = plugin.anyaccel_diagnose(replay(name))

    assert len(findings) == len(words)
    assert all(word in finding.reason and finding.remedy for word, finding in zip(words, findings, strict=True))


def test_without_the_tool_chips_are_listed_and_not_given_out() -> None:
    recording = {**load("pro-2card"), "commands": []}

    detected = plugin.anyaccel_detect(context(recording))
    assert {device.usable for device in detected.devices} == {False}
    assert detected.notes == ("qaic-util is not installed, so QIDs, memory and state of the chips are unknown",)
