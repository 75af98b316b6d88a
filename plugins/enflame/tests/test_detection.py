"""Devices, health and findings on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.model import DeviceProcess, Fractional, Health
from anyaccel_enflame import plugin
from anyaccel_testing import context
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
load, replay, detect = MACHINES.load, MACHINES.replay, MACHINES.detect


def test_a_card_has_the_index_of_efsmi_and_the_node_of_its_minor_number() -> None:
    found = {device.index: (device.pci_bus_id, device.nodes) for device in detect("s60-8card-old-driver").devices}

    assert found[0] == ("0000:17:00.0", ("/dev/gcu7",))
    assert found[7] == ("0000:d8:00.0", ("/dev/gcu0",))


@pytest.mark.parametrize(("name", "version"), [("s60-2card", "1.4.3.4"), ("s60-8card-old-driver", "1.2.4.12")])
def test_both_names_of_memory_are_read(name: str, version: str) -> None:
    detected = plugin.anyaccel_detect(replay(name))

    assert detected.driver_version == version
    assert {(device.memory_bytes, device.health) for device in detected.devices} == {(42976 << 20, Health.HEALTHY)}
    assert plugin.anyaccel_tags(detected.devices[0]) == ("Enflame-S60", "S60")
    assert plugin.anyaccel_fractional(detected.devices[0]) is Fractional.NO


def test_a_card_that_is_alone_needs_no_tool_to_have_the_index_0() -> None:
    (card,) = detect("l300-1card-no-efsmi").devices

    assert (card.index, card.nodes, card.health, card.usable) == (0, ("/dev/gcu3",), Health.UNKNOWN, True)


@pytest.mark.parametrize("name", ["s60-2card-efsmi-hangs", "s60-2card-efsmi-garbage"])
def test_cards_without_a_known_index_are_listed_and_not_given_out(name: str) -> None:
    detected = plugin.anyaccel_detect(replay(name))

    reason = "its efsmi index is unknown, so no process can be confined to it"
    assert [device.health_reason for device in detected.devices] == [reason] * 2
    assert "efsmi" in detected.notes[0]


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        (
            "s60-unhealthy-and-lost",
            ["efsmi reports its health as False", "efsmi does not show it", "no driver is bound to it"],
        ),
        ("s60-2card-not-permitted", [f"you may not open /dev/gcu{n}" for n in (0, 1)]),
        ("s60-divided", ["cards of this machine are divided (/dev/vgcu*), and no file tells which"] * 2),
        ("s60-tencent-and-vfio", ["", "its driver 'vfio-pci' shows no device of it"]),
    ],
)
def test_a_card_that_cannot_be_used_says_why(name: str, reasons: list[str]) -> None:
    devices = detect(name).devices

    assert [device.health_reason for device in devices] == reasons
    assert all(bool(device.health_remedy) == bool(device.health_reason) for device in devices)


def test_a_driver_without_a_card_is_no_card() -> None:
    assert plugin.anyaccel_detect(replay("driver-without-card")).devices == ()
    (finding,) = plugin.anyaccel_diagnose(replay("driver-without-card"))
    assert "lspci -d 1e36:" in finding.remedy


def test_load_and_holders() -> None:
    ctx = replay("s60-2card")
    stats = plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx)

    idle, busy = stats["enflame-0000:17:00.0"], stats["enflame-0000:3d:00.0"]
    assert (busy.memory_used_bytes, busy.utilization) == (20480 << 20, 0.585)
    assert (busy.temperature_celsius, busy.power_watts) == (51, 210)
    assert (idle.processes, busy.processes) == ((), (DeviceProcess(pid=4321),))

    ctx = replay("s60-8card-old-driver")
    old = plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx)["enflame-0000:b1:00.0"]
    assert (old.memory_used_bytes, old.temperature_celsius) == (1129 << 20, 34)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("s60-2card", []),
        ("l300-1card-no-efsmi", ["efsmi is not on the PATH"]),
        ("s60-2card-efsmi-garbage", ["efsmi must answer a section 'DEV ID'"]),
        ("s60-2card-efsmi-hangs", ["did not end within"]),
        ("s60-unhealthy-and-lost", ["efsmi does not show enflame-0000:3d:00.0, enflame-0000:5e:00.0, of 3 devices"]),
    ],
)
def test_what_is_wrong_is_found(name: str, words: list[str]) -> None:
    findings = plugin.anyaccel_diagnose(replay(name))

    assert len(findings) == len(words)
    assert all(word in finding.reason and finding.remedy for word, finding in zip(words, findings, strict=True))


def test_a_card_without_an_address_is_an_answer_that_is_not_believed() -> None:
    recording = load("s60-2card")
    recording["commands"][0]["stdout"] = recording["commands"][0]["stdout"].replace("Bus  ", "Buss ")

    (note,) = plugin.anyaccel_detect(context(recording)).notes
    assert note == "efsmi must answer the PCI address of card 0 (got '0000::00:0'); run 'efsmi -q' by hand"
