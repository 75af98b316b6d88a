"""Devices, health and findings on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.model import DeviceProcess, Fractional, Health, Severity
from anyaccel_cambricon import plugin
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
replay, detect = MACHINES.replay, MACHINES.detect


def test_cards_are_numbered_as_their_nodes_and_not_as_the_bus() -> None:
    found = {device.pci_bus_id: (device.index, device.nodes[0]) for device in detect("mlu590-m9-8card").devices}

    assert found["0000:9a:00.0"] == (0, "/dev/cambricon_dev0")
    assert found["0000:18:00.0"] == (4, "/dev/cambricon_dev4")


def test_the_driver_names_the_card_and_cnmon_its_memory() -> None:
    (first, _) = detect("mlu370-x8-2card").devices

    assert (first.model, first.memory_bytes, first.health) == ("MLU370-X8", 23374 << 20, Health.HEALTHY)
    assert plugin.anyaccel_tags(first) == ("MLU370-X8", "MLU370")


@pytest.mark.parametrize("name", ["mlu370-x8-cnmon-hangs", "mlu370-x4-old-cnmon"])
def test_a_cnmon_that_cannot_be_understood_costs_what_it_alone_knows(name: str) -> None:
    detected = plugin.anyaccel_detect(replay(name))

    assert [(device.index, device.health) for device in detected.devices] == [(0, Health.UNKNOWN), (1, Health.UNKNOWN)]
    assert [device.memory_bytes for device in detected.devices].count(None) == 0  # that of the product
    assert "cnmon" in detected.notes[0]


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("mlu370-x8-card-lost", ["", "cnmon does not show it"]),
        ("mlu370-x8-not-permitted", [f"you may not open /dev/cambricon_dev{n}" for n in (0, 1)]),
        (
            "mlu370-no-driver",
            ["no driver is bound to it"] * 2 + ["it is bound to the driver 'vfio-pci', which keeps it for another use"],
        ),
        (
            "mlu590-exclusive-and-divided",
            ["", "it is divided into MIM instances, which are not given out", ""],
        ),
    ],
)
def test_a_card_that_cannot_be_used_says_why(name: str, reasons: list[str]) -> None:
    devices = detect(name).devices

    assert [device.health_reason for device in devices] == reasons
    assert all(bool(device.health_remedy) == bool(device.health_reason) for device in devices)


def test_the_module_is_what_modprobe_takes() -> None:
    assert detect("mlu370-no-driver").devices[0].health_remedy.endswith("run 'modprobe cambricon_drv'")


def test_a_card_in_exclusive_mode_is_not_shared() -> None:
    exclusive, _, plain = detect("mlu590-exclusive-and-divided").devices

    assert plugin.anyaccel_fractional(exclusive) is Fractional.NO
    assert plugin.anyaccel_fractional(plain) is Fractional.SHARED


def test_a_driver_without_a_card_is_no_card() -> None:
    assert plugin.anyaccel_detect(replay("driver-without-card")).devices == ()
    (finding,) = plugin.anyaccel_diagnose(replay("driver-without-card"))
    assert (finding.severity, "lspci -d cabc:" in finding.remedy) == (Severity.WARN, True)


def test_load_and_holders() -> None:
    ctx = replay("mlu370-x8-2card")
    stats = plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx)

    first, second = stats["cambricon-0000:39:00.0"], stats["cambricon-0000:3d:00.0"]
    assert (first.memory_used_bytes, first.utilization, first.temperature_celsius, first.power_watts) == (0, 0, 32, 106)
    assert (first.processes, second.processes) == ((DeviceProcess(pid=4242),), ())

    ctx = replay("mlu590-m9-8card")
    busy = plugin.anyaccel_stats(plugin.anyaccel_detect(ctx).devices, ctx)["cambricon-0000:9a:00.0"]
    assert (busy.memory_used_bytes, busy.utilization) == (33654 << 20, 0.87)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlu370-x8-2card", []),
        ("mlu370-x8-card-lost", ["cnmon does not show cambricon-0000:3d:00.0, of 2 devices"]),
        ("mlu370-x4-old-cnmon", ["cnmon must answer a table of devices"]),
        ("mlu370-x8-cnmon-hangs", ["did not end within"]),
        ("mlu370-x8-not-permitted", ["cnmon is not on the PATH"]),
    ],
)
def test_what_is_wrong_is_found(name: str, words: list[str]) -> None:
    findings = plugin.anyaccel_diagnose(replay(name))

    assert len(findings) == len(words)
    assert all(word in finding.reason and finding.remedy for word, finding in zip(words, findings, strict=True))
