"""The mask both ways: lists of unconfirmed effect are refused."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext, Term
from anyaccel_iluvatar import plugin

CUDA = "CUDA_VISIBLE_DEVICES"
DEVICES = [
    Device(id=f"iluvatar-{n}", index=n, model="Iluvatar BI-V150", nodes=(f"/dev/iluvatar{n}", "/dev/itrctl"))
    for n in range(4)
]


@pytest.mark.parametrize(("indexes", "value"), [([], ""), ([2], "2"), ([3, 0], "0,3"), ([0, 1, 2, 3], "0,1,2,3")])
def test_the_mask_has_numbers_in_ascending_order(indexes: list[int], value: str) -> None:
    given = [DEVICES[index] for index in indexes]
    edits = plugin.anyaccel_env(given, EnvContext(devices=tuple(DEVICES), environ={}))
    assert (dict(edits.set), edits.unset) == ({CUDA: value}, frozenset())


def test_several_processes_may_share_a_gpu_by_agreement() -> None:
    assert plugin.validate(Term(names=("GPU",), units=5_000), DEVICES[:1]) is None


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({}, None),
        ({CUDA: "1"}, [1]),
        ({CUDA: "2,0"}, [0, 2]),
        ({CUDA: " 1 , 3 "}, [1, 3]),
        ({CUDA: ""}, []),
        ({"IX_VISIBLE_DEVICES": "0"}, None),  # the container runtime's
    ],
)
def test_what_the_mask_leaves_visible(environ: dict[str, str], seen: list[int] | None) -> None:
    expected = None if seen is None else [DEVICES[index].id for index in seen]
    assert plugin.anyaccel_visible(environ, DEVICES) == expected


@pytest.mark.parametrize("value", ["0,0", "0,9", "9", "-1", "all", "0,,1", "GPU-5020332b-19bd-52dd-9a9c-00496701884f"])
def test_what_the_closed_runtime_may_do_with_other_values_is_not_guessed(value: str) -> None:
    with pytest.raises(ValueError, match=f"{CUDA} must be numbers of GPUs of this machine"):
        plugin.anyaccel_visible({CUDA: value}, DEVICES)


@pytest.mark.parametrize(("indexes", "told"), [([], "void"), ([3, 1], "3,1")])
def test_the_container_runtime_is_told_since_unset_means_all(indexes: list[int], told: str) -> None:
    edits = plugin.anyaccel_container([DEVICES[index] for index in indexes])

    assert edits.env == {"IX_VISIBLE_DEVICES": told}
    assert edits.nodes == (("/dev/iluvatar3", "/dev/itrctl", "/dev/iluvatar1") if indexes else ())
