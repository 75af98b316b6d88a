"""Masks: both variables alike; unambiguous lists alone are written or read."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext, Term
from anyaccel_kunlunxin import plugin
from hypothesis import given
from hypothesis import strategies as st

XPU, CUDA = "XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
MINORS = (0, 2, 1, 3, 4, 6, 5, 7)
DEVICES = tuple(
    Device(id=f"kunlunxin-0000:{0x17 + n:02x}:00.0", index=n, model="P800 OAM", nodes=(f"/dev/xpu{minor}",))
    for n, minor in enumerate(MINORS)
)


def apply(devices) -> dict[str, str]:
    edits = plugin.anyaccel_env(devices, EnvContext(devices=DEVICES))
    assert not edits.unset
    return dict(edits.set)


@given(st.lists(st.sampled_from(DEVICES), unique_by=lambda device: device.id))
def test_a_worker_gets_ascending_indexes_in_both_variables(devices) -> None:
    numbers = sorted(device.index for device in devices)

    assert apply(devices) == dict.fromkeys((XPU, CUDA), ",".join(map(str, numbers)))
    assert plugin.anyaccel_visible(apply(devices), DEVICES) == [DEVICES[number].id for number in numbers]


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, None),
        ({XPU: "3"}, [3]),
        ({CUDA: "5,2"}, [2, 5]),
        ({XPU: "2,5", CUDA: "5,2"}, [2, 5]),
        ({XPU: ""}, []),
        ({CUDA: ""}, []),
        ({XPU: "1", CUDA: ""}, []),
        ({XPU: "", CUDA: "GPU-ed733bb8"}, []),  # another vendor's devices were given, and ours hidden
        ({"CXPU_VISIBLE_DEVICES": "1"}, None),
    ],
)
def test_a_mask_without_doubt_is_read(environ: dict[str, str], numbers: list[int] | None) -> None:
    assert plugin.anyaccel_visible(environ, DEVICES) == (None if numbers is None else [DEVICES[n].id for n in numbers])


@pytest.mark.parametrize("variable", [XPU, CUDA])
@pytest.mark.parametrize("value", ["0,", "0, 1", "0,0", "8", "-1", "all", "GPU-ed733bb8", "0;1"])
def test_a_value_whose_effect_is_not_public_is_refused(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable} must be indexes of xpu-smi such as '0,1', each once"):
        plugin.anyaccel_visible({variable: value}, DEVICES)


def test_two_variables_that_differ_are_refused_with_both() -> None:
    with pytest.raises(ValueError, match=rf"{XPU} and {CUDA} must say the same \(got '1' and '2'\); unset one of them"):
        plugin.anyaccel_visible({XPU: "1", CUDA: "2"}, DEVICES)


def test_a_container_gets_nodes_and_indexes() -> None:
    edits = plugin.anyaccel_container(DEVICES[1:2])

    assert edits.nodes == ("/dev/xpuctrl", "/dev/xpu2")
    assert edits.env == {"CXPU_VISIBLE_DEVICES": "1"}
    assert (plugin.anyaccel_container(()).nodes, plugin.anyaccel_container(()).env) == (
        (),
        {"CXPU_VISIBLE_DEVICES": "none"},
    )


def test_a_fraction_is_refused_with_the_reason() -> None:
    reason = plugin.validate(Term(names=("XPU",), units=5_000), DEVICES[:1])

    assert "no public text says that several processes may use a Kunlunxin device" in (reason or "")
