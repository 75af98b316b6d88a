"""Masks both ways: two equal variables; lists of unconfirmed effect are refused."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext, Share, Term
from anyaccel_metax import plugin

CUDA, MACA = "CUDA_VISIBLE_DEVICES", "MACA_VISIBLE_DEVICES"
DEVICES = [Device(id=f"metax-{n}", index=n, model="MXC500", memory_bytes=64 << 30) for n in range(4)]


def variables(indexes: list[int], units: int = 10_000) -> dict[str, str]:
    given = [DEVICES[index] for index in indexes]
    shares = {device.id: Share(device=device, units=units) for device in given}
    edits = plugin.anyaccel_env(given, EnvContext(devices=tuple(DEVICES), shares=shares, environ={}))
    assert not edits.unset
    return dict(edits.set)


@pytest.mark.parametrize(("indexes", "value"), [([], ""), ([2], "2"), ([3, 0], "0,3"), ([0, 1, 2, 3], "0,1,2,3")])
def test_both_variables_say_the_same_in_ascending_order(indexes: list[int], value: str) -> None:
    assert variables(indexes) == {CUDA: value, MACA: value}


def test_a_share_lets_several_processes_onto_the_gpu() -> None:
    assert variables([1], 5_000) == {CUDA: "1", MACA: "1", "MACA_MPS_MODE": "1"}
    assert plugin.validate(Term(names=("GPU",), units=5_000), DEVICES[:1]) is None


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, None),
        ({CUDA: "1"}, [1]),
        ({MACA: "0,2"}, [0, 2]),
        ({CUDA: "2,0", MACA: "2,0"}, [0, 2]),
        ({CUDA: "0,1", MACA: "1,2"}, [1]),  # which one wins is unconfirmed, so both must allow
        ({CUDA: "", MACA: ""}, []),
        ({CUDA: ""}, []),
        ({CUDA: "GPU-1234", MACA: ""}, []),  # another vendor's worker
    ],
)
def test_what_both_variables_leave_visible(environ: dict[str, str], seen: list[int] | None) -> None:
    expected = None if seen is None else [DEVICES[index].id for index in seen]
    assert plugin.anyaccel_visible(environ, DEVICES) == expected


@pytest.mark.parametrize("value", ["0,0", "0,9", "9", "-1", "all", "0,,1", "GPU-e702"])
@pytest.mark.parametrize("variable", [CUDA, MACA])
def test_what_the_closed_runtime_may_do_with_other_values_is_not_guessed(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be numbers of GPUs of this machine"):
        plugin.anyaccel_visible({variable: value}, DEVICES)


def test_a_container_gets_the_nodes_and_the_driver() -> None:
    device = Device(
        id="metax-0",
        index=0,
        model="MXC500",
        nodes=("/dev/dri/renderD129", "/dev/mxcd"),
        attributes={"driver_root": "/opt/mxdriver"},
    )

    edits = plugin.anyaccel_container([device])

    assert edits.nodes == ("/dev/dri/renderD129", "/dev/mxcd")
    assert [mount.source for mount in edits.mounts] == ["/opt/mxdriver"]
    assert not edits.env
