"""The mask both ways: lists of unconfirmed effect are refused."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext, Term
from anyaccel_moorethreads import plugin

MUSA, CUDA = "MUSA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
DEVICES = [Device(id=f"moorethreads-{n}", index=n, model="MTT S4000", nodes=(f"/dev/mtgpu.{n}",)) for n in range(4)]


@pytest.mark.parametrize(("indexes", "value"), [([], ""), ([2], "2"), ([3, 0], "0,3"), ([0, 1, 2, 3], "0,1,2,3")])
def test_the_mask_has_numbers_in_ascending_order(indexes: list[int], value: str) -> None:
    given = [DEVICES[index] for index in indexes]
    edits = plugin.anyaccel_env(given, EnvContext(devices=tuple(DEVICES), environ={CUDA: "3"}))
    assert (dict(edits.set), set(edits.unset)) == ({MUSA: value}, {CUDA})


def test_several_processes_may_share_a_gpu_by_agreement() -> None:
    assert plugin.validate(Term(names=("GPU",), units=5_000), DEVICES[:1]) is None


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, None),
        ({MUSA: "1"}, [1]),
        ({MUSA: "2,0"}, [0, 2]),
        ({MUSA: ""}, []),
        ({CUDA: "1"}, None),  # the runtime does not read it
        ({"MTHREADS_VISIBLE_DEVICES": "1"}, None),  # the container runtime's
    ],
)
def test_what_the_mask_leaves_visible(environ: dict[str, str], seen: list[int] | None) -> None:
    expected = None if seen is None else [DEVICES[index].id for index in seen]
    assert plugin.anyaccel_visible(environ, DEVICES) == expected


@pytest.mark.parametrize("value", ["0,0", "0,9", "9", "-1", "all", "0,,1", "GPU-1"])
def test_what_the_closed_runtime_may_do_with_other_values_is_not_guessed(value: str) -> None:
    with pytest.raises(ValueError, match=f"{MUSA} must be numbers of GPUs of this machine"):
        plugin.anyaccel_visible({MUSA: value}, DEVICES)


def test_a_container_numbers_its_gpus_from_0() -> None:
    container = plugin.anyaccel_container([DEVICES[1], DEVICES[3]])

    assert container.env == {"MTHREADS_VISIBLE_DEVICES": "1,3", MUSA: "0,1"}
    assert container.nodes == ("/dev/mtgpu.1", "/dev/mtgpu.3")
    assert plugin.anyaccel_container([]).env == {}
