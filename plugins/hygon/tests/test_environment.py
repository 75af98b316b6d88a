"""Masks both ways: HIP's variable and its fall-back; only ascending numbers are accepted."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext, EnvEdits, Term
from anyaccel_hygon import plugin

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
DEVICES = [Device(id=f"hygon-{n}", index=n, model="K100_AI", nodes=(f"/dev/dri/renderD{n}",)) for n in range(8)]


def edits(indexes: list[int]) -> EnvEdits:
    return plugin.anyaccel_env([DEVICES[index] for index in indexes], EnvContext(devices=tuple(DEVICES), environ={}))


@pytest.mark.parametrize(("indexes", "value"), [([6, 7], "6,7"), ([3, 0], "0,3"), ([2], "2")])
def test_both_variables_say_the_same_and_the_layer_below_is_left_alone(indexes: list[int], value: str) -> None:
    assert dict(edits(indexes).set) == {HIP: value, CUDA: value}
    assert edits(indexes).unset == {ROCR}


def test_nothing_is_hidden_by_an_empty_value_so_none_is_written() -> None:
    assert dict(edits([]).set) == {HIP: "-1", ROCR: ""}


def test_several_processes_may_share_a_dcu_by_agreement() -> None:
    assert plugin.validate(Term(names=("GPU",), units=5_000), DEVICES[:1]) is None


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, None),
        ({HIP: "6,7"}, [6, 7]),
        ({HIP: "7,6"}, [6, 7]),
        ({HIP: "1", CUDA: "2"}, [1]),
        ({HIP: "1", CUDA: "GPU-1234"}, [1]),  # beside another vendor
        ({CUDA: "2"}, [2]),
        ({HIP: "-1"}, []),
        ({CUDA: "-1"}, []),
        ({ROCR: ""}, []),
        ({HIP: "1", ROCR: ""}, []),
        ({"HCU_VISIBLE_DEVICES": "0"}, None),  # the container runtime's
    ],
)
def test_what_hip_shows(environ: dict[str, str], seen: list[int] | None) -> None:
    expected = None if seen is None else [DEVICES[index].id for index in seen]
    assert plugin.anyaccel_visible(environ, DEVICES) == expected


@pytest.mark.parametrize("value", ["", "0,0", "0,9", "9", "0,-1", "all", "0,,1", "0, 1", "GPU-1000000000000001"])
@pytest.mark.parametrize("variable", [HIP, CUDA])
def test_what_the_runtime_may_do_with_other_values_is_not_guessed(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be numbers of DCUs of this machine"):
        plugin.anyaccel_visible({variable: value}, DEVICES)


def test_the_layer_below_is_not_guessed_either() -> None:
    with pytest.raises(ValueError, match="ROCR_VISIBLE_DEVICES='1' leaves is unconfirmed; unset it and set HIP"):
        plugin.anyaccel_visible({ROCR: "1", HIP: "0"}, DEVICES)


@pytest.mark.parametrize("indexes", [[], [3, 1]])
def test_the_container_runtime_adds_nothing(indexes: list[int]) -> None:
    container = plugin.anyaccel_container([DEVICES[index] for index in indexes])

    assert container.env == {"HCU_VISIBLE_DEVICES": "void"}
    assert container.nodes == tuple(f"/dev/dri/renderD{index}" for index in indexes)
