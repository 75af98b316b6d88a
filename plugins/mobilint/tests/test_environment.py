"""The variable, and values without a published meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyaccel.plugin import EnvContext
from anyaccel_mobilint import plugin
from anyaccel_testing import context, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
DEVICES = plugin.detect(context(load_recording(RECORDINGS / "mla400-and-mla100"))).devices  # type: ignore[union-attr]
NAME = "QBRUNTIME_VISIBLE_DEVICES"


@pytest.mark.parametrize(("numbers", "value"), [([], "999"), ([3], "3"), ([4, 0], "0,4"), (range(5), "0,1,2,3,4")])
def test_numbers_of_nodes_are_written_in_ascending_order(numbers: list[int], value: str) -> None:
    edits = plugin.anyaccel_env([DEVICES[number] for number in numbers], EnvContext(devices=DEVICES))

    assert edits.set == {NAME: value}


@pytest.mark.parametrize(
    ("environ", "seen"),
    [({}, None), ({NAME: "2"}, [2]), ({NAME: "4,1"}, [1, 4]), ({NAME: ""}, []), ({NAME: "999"}, [])],
)
def test_an_environment_is_read(environ: dict[str, str], seen: list[int] | None) -> None:
    found = plugin.anyaccel_visible(environ, DEVICES)

    assert found == (None if seen is None else [DEVICES[number].id for number in seen])


@pytest.mark.parametrize("value", ["0,0", "9", "0,999", "0, 1", "-1", "0-1", "0,", "all", "aries0"])
def test_a_value_without_a_published_meaning_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"{NAME} must be numbers of devices that are here, each once"):
        plugin.anyaccel_visible({NAME: value}, DEVICES)


def test_a_machine_with_two_kinds_gets_no_mask() -> None:
    devices = plugin.detect(context(load_recording(RECORDINGS / "aries-and-regulus"))).devices  # type: ignore[union-attr]

    with pytest.raises(ValueError, match="the runtime supports no mask"):
        plugin.anyaccel_env(devices[:1], EnvContext(devices=devices))


def test_a_container_gets_the_nodes() -> None:
    assert plugin.anyaccel_container(DEVICES[1:3]).nodes == ("/dev/aries1", "/dev/aries2")
