"""The two variables, and containers."""

from __future__ import annotations

from pathlib import Path

import pytest
from anyaccel.plugin import EnvContext
from anyaccel_rebellions import plugin
from anyaccel_testing import context, load_recording

RECORDING = load_recording(Path(__file__).parent.parent / "recordings" / "ca25-2card-8chip")
DEVICES = plugin.detect(context(RECORDING)).devices  # type: ignore[union-attr]
FIRST, SECOND = "RBLN_DEVICES", "RBLN_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("numbers", "value"), [([], "99999"), ([3], "3"), ([0, 1], "0,1"), ([5, 2], "2,5"), (range(8), "0,1,2,3,4,5,6,7")]
)
def test_both_variables_say_the_same_and_neither_is_empty(numbers: list[int], value: str) -> None:
    edits = plugin.anyaccel_env([DEVICES[number] for number in numbers], EnvContext(devices=DEVICES))

    assert edits.set == {FIRST: value, SECOND: value}


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, None),
        ({FIRST: ""}, None),  # the runtime takes it for all, Ray for none
        ({FIRST: "", SECOND: ""}, None),
        ({FIRST: "2,1"}, [1, 2]),
        ({FIRST: "99999"}, []),
        ({SECOND: "4"}, [4]),
        ({FIRST: "1", SECOND: "4"}, [1]),
        ({FIRST: "", SECOND: "4"}, [4]),
    ],
)
def test_the_first_variable_that_says_something_wins(environ: dict[str, str], seen: list[int] | None) -> None:
    found = plugin.anyaccel_visible(environ, DEVICES)

    assert found == (None if seen is None else [DEVICES[number].id for number in seen])


@pytest.mark.parametrize("value", ["8", "0,99999", "0,0", "0, 1", " 0", "0-1", "-1", "0,", "all", "rbln0"])
@pytest.mark.parametrize("variable", [FIRST, SECOND])
def test_a_value_without_a_published_meaning_is_refused(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be numbers of chips that are here"):
        plugin.anyaccel_visible({variable: value}, DEVICES)


def test_a_container_gets_the_nodes_of_chips_and_of_their_group() -> None:
    edits = plugin.anyaccel_container(DEVICES[:2])

    assert (edits.nodes, edits.env) == (("/dev/rsd0", "/dev/rbln0", "/dev/rbln1"), {})


def test_a_group_whose_node_would_need_another_name_inside_is_left_out() -> None:
    recording = load_recording(Path(__file__).parent.parent / "recordings" / "ca25-2card-8chip")
    recording["commands"][0]["stdout"] = recording["commands"][0]["stdout"].replace(
        '"group_id": "0"', '"group_id": "7"'
    )
    devices = plugin.detect(context(recording)).devices  # type: ignore[union-attr]

    assert devices[0].attributes["rsd_group"] == "7"
    assert plugin.anyaccel_container(devices[:1]).nodes == ("/dev/rbln0",)
