"""The variable, by the rules of tt-umd, and containers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from anyaccel.plugin import EnvContext, Mount
from anyaccel_tenstorrent import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
DEVICES = plugin.detect(context(load_recording(RECORDINGS / "n300-4card"))).devices  # type: ignore[union-attr]
PART = plugin.detect(context(load_recording(RECORDINGS / "n300-2-of-3-in-container"))).devices  # type: ignore[union-attr]
NAME = "TT_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("numbers", "mask", "value"),
    [
        ([], "id", ""),
        ([2], "id", "0000:03:00.0"),
        ([3, 0], "id", "0000:01:00.0,0000:04:00.0"),
        ([3, 0], "index", "0,3"),
        ([], "index", ""),
    ],
)
def test_addresses_are_written_and_positions_for_who_asks(
    numbers: list[int], mask: Literal["id", "index"], value: str
) -> None:
    edits = plugin.anyaccel_env([DEVICES[number] for number in numbers], EnvContext(devices=DEVICES, mask=mask))

    assert edits.set == {NAME: value}


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("", []),
        ("0,2", [0, 2]),
        ("1,0", [0, 1]),
        ("0,0", [0]),
        ("0,0000:01:00.0", [0]),
        ("0, 1 ,", [0, 1]),
        ("0000:02:00.0", [1]),
        ("03:00.0", [2]),
        ("0000:0", [0, 1, 2, 3]),
        ("00.0", [0, 1, 2, 3]),
    ],
)
def test_an_environment_shows_what_the_runtime_would_take(value: str, seen: list[int]) -> None:
    assert plugin.anyaccel_visible({NAME: value}, DEVICES) == [DEVICES[number].id for number in seen]


@pytest.mark.parametrize("value", ["7", "-1", "a", "0-3", "0000:99:00.0", "0000:0A", "all", "0,7", "c"])
def test_what_stops_the_runtime_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="TT_VISIBLE_DEVICES must be PCI addresses, parts of them, or positions"):
        plugin.anyaccel_visible({NAME: value}, DEVICES)


def test_positions_count_only_what_may_be_opened() -> None:
    assert plugin.anyaccel_visible({NAME: "1"}, PART) == ["tenstorrent-0000:0a:00.0"]
    with pytest.raises(ValueError, match="cannot be given to a process: its device node /dev/tenstorrent/1 is missing"):
        plugin.anyaccel_env(PART[2:], EnvContext(devices=PART))


def test_a_container_gets_the_nodes_and_the_huge_pages_of_the_machine() -> None:
    edits = plugin.anyaccel_container(DEVICES[1:3])

    assert edits.nodes == ("/dev/tenstorrent/1", "/dev/tenstorrent/2")
    assert edits.mounts == (Mount(source="/dev/hugepages-1G", target="/dev/hugepages-1G", read_only=False),)
    assert plugin.anyaccel_container(PART[:1]).mounts == ()
