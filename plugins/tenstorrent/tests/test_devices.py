"""Devices and health on recorded machines."""

from __future__ import annotations

import pytest
from anyaccel.plugin import DeviceProcess, Health, ProbeContext, Term
from anyaccel_tenstorrent import plugin
from recorded import Recorded

MACHINES = Recorded(plugin, __file__)
replay, detect = MACHINES.replay, MACHINES.detect


def findings(ctx: ProbeContext) -> list[str]:
    return [finding.reason for finding in plugin.anyaccel_diagnose(ctx)]


def test_devices_are_numbered_by_address_and_not_by_node() -> None:
    detected = detect(replay("p150a-and-p100a"))

    assert [(device.index, device.model, device.nodes) for device in detected.devices] == [
        (0, "p150a", ("/dev/tenstorrent/1",)),
        (1, "p100a", ("/dev/tenstorrent/0",)),
    ]


def test_the_folder_of_links_beside_the_nodes_is_no_device() -> None:
    assert len(detect(replay("n300-4card")).devices) == 4  # to Ray, which counts every entry, they are five


def test_in_a_container_only_chips_with_a_node_have_a_position() -> None:
    detected = detect(replay("n300-2-of-3-in-container"))

    assert [(device.index, device.nodes[0]) for device in detected.devices if device.usable] == [
        (0, "/dev/tenstorrent/0"),
        (1, "/dev/tenstorrent/2"),
    ]
    assert "is missing" in detected.devices[2].health_reason


def test_both_chips_of_an_n300_are_one_device() -> None:
    assert {device.memory_bytes for device in detect(replay("n300-4card")).devices} == {24 << 30}


@pytest.mark.parametrize(
    ("numbers", "accepted"), [([0, 1], True), ([0], False), ([1, 2], False), ([0, 1, 2], False), ([0, 1, 2, 3], True)]
)
def test_a_p300_is_given_out_by_the_board(numbers: list[int], accepted: bool) -> None:
    devices = [detect(replay("p300c-2board")).devices[number] for number in numbers]

    reason = plugin.anyaccel_validate(Term(names=("TTNPU",), units=10_000 * len(devices)), devices)

    assert (reason is None) is accepted
    assert accepted or "is one of 2 chips of a board" in str(reason)


def test_chips_of_a_tray_are_linked_and_may_be_given_out_one_by_one() -> None:
    detected = detect(replay("galaxy-wormhole-32"))
    first = detected.devices[0]

    assert len(first.links) == 7
    assert len({device.parent for device in detected.devices}) == 4
    assert plugin.anyaccel_validate(Term(names=("TTNPU",)), [first]) is None


def test_a_chip_whose_manager_does_not_answer_is_unhealthy() -> None:
    devices = detect(replay("p150b-faults")).devices

    assert "Input/output error" in devices[1].health_reason
    assert "tt-smi -r" in devices[1].health_remedy
    assert devices[0].health is Health.UNKNOWN  # nothing says that it works without opening it
    assert sum(device.usable for device in devices) == 2


@pytest.mark.parametrize(
    ("model", "tags"),
    [
        ("p150b", ("Tenstorrent-P150", "p150", "Blackhole", "p150b")),
        ("n150", ("Tenstorrent-N150", "n150", "Wormhole")),
        ("e150", ("Tenstorrent-E150", "e150", "Grayskull")),
        ("Blackhole", ("Tenstorrent-Blackhole", "Blackhole")),
    ],
)
def test_a_card_goes_by_its_type_and_its_chip(model: str, tags: tuple[str, ...]) -> None:
    names = ("grayskull-2card", "p150b-faults")
    devices = [device for name in names for device in detect(replay(name)).devices if device.model == model]
    if not devices:
        devices = [device for device in detect(replay("n300-4card", None, **n150())).devices if device.model == model]

    assert plugin.anyaccel_tags(devices[0]) == tags


def n150() -> dict[str, object]:
    folder = "/sys/bus/pci/devices/0000:01:00.0/tenstorrent/tenstorrent!0"
    return {f"{folder}/tt_card_type": {"text": "n150\n"}}


def test_sensors_and_holders_are_told_without_opening_a_chip() -> None:
    ctx = replay("n300-4card")
    stats = list(plugin.anyaccel_stats(detect(ctx).devices, ctx).values())

    assert (stats[1].temperature_celsius, stats[1].power_watts) == (48.0, 19.0)
    assert (stats[1].memory_used_bytes, stats[1].utilization) == (None, None)
    assert stats[2].processes == (DeviceProcess(pid=4711), DeviceProcess(pid=4712))
    assert stats[0].processes is None  # some processes could not be seen, and the driver lists none


def test_in_a_container_the_drivers_list_is_not_believed() -> None:
    ctx = replay("n300-4card", {"container": "podman"})

    assert {one.processes for one in plugin.anyaccel_stats(detect(ctx).devices, ctx).values()} == {None}


@pytest.mark.parametrize(
    ("name", "environ", "reason"),
    [
        ("p150a-and-p100a", {}, "has shut down 2 times because of heat"),
        ("n300-4card", {"TT_VISIBLE_DEVICES": "0,1"}, "before tt-umd 0.9.3 those of nodes"),
        ("n300-4card", {"TT_METAL_VISIBLE_DEVICES": "0"}, "is read by older releases of tt-metal"),
        ("driver-without-card", {}, "no Tenstorrent device is on the PCI bus"),
    ],
)
def test_what_is_wrong_is_found(name: str, environ: dict[str, str], reason: str) -> None:
    assert any(reason in found for found in findings(replay(name, environ)))


@pytest.mark.parametrize("environ", [{}, {"TT_VISIBLE_DEVICES": "0000:01:00.0"}, {"TT_VISIBLE_DEVICES": ""}])
def test_a_sound_machine_has_no_findings(environ: dict[str, str]) -> None:
    assert findings(replay("n300-4card", environ)) == []


def test_no_card_goes_by_the_name_of_another_vendors() -> None:
    folder = "/sys/bus/pci/devices/0000:c1:00.0/tenstorrent/tenstorrent!0"
    devices = detect(replay("p150a-and-p100a", None, **{f"{folder}/tt_card_type": {"text": "p100\n"}})).devices

    assert plugin.anyaccel_tags(devices[1]) == ("Tenstorrent-P100", "p100a", "Blackhole")
