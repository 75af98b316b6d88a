"""Masks: unambiguous lists alone are written or read."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext
from anyaccel_qualcomm import plugin
from hypothesis import given
from hypothesis import strategies as st

MASK = "QAIC_VISIBLE_DEVICES"
DEVICES = tuple(
    Device(
        id=f"qualcomm-0000:{0x41 + n:02x}:00.0",
        index=32 + n,
        model="AIC100-Ultra",
        nodes=(f"/dev/accel/accel{9 - n}",),
        attributes={"group": 998},
    )
    for n in range(4)
)


def apply(devices) -> dict[str, str]:
    edits = plugin.anyaccel_env(devices, EnvContext(devices=DEVICES))
    assert not edits.unset
    return dict(edits.set)


@given(st.lists(st.sampled_from(DEVICES), unique_by=lambda device: device.id))
def test_a_worker_gets_ascending_qids_once_each(devices) -> None:
    qids = sorted(device.index for device in devices)

    assert apply(devices) == {MASK: ",".join(map(str, qids)) or "999"}
    assert plugin.anyaccel_visible(apply(devices), DEVICES) == [DEVICES[qid - 32].id for qid in qids]


@pytest.mark.parametrize(
    ("environ", "qids"), [({}, None), ({MASK: "999"}, []), ({MASK: "33"}, [33]), ({MASK: "35,32"}, [32, 35])]
)
def test_a_mask_without_doubt_is_read(environ: dict[str, str], qids: list[int] | None) -> None:
    assert plugin.anyaccel_visible(environ, DEVICES) == (None if qids is None else [DEVICES[q - 32].id for q in qids])


@pytest.mark.parametrize("value", ["", "0", "32,", "32, 33", "32,32", "-1", "all", "qaic:0", "32:33"])
def test_a_value_whose_effect_is_not_public_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"{MASK} must be QIDs such as '0,1', each once"):
        plugin.anyaccel_visible({MASK: value}, DEVICES)


def test_a_container_gets_nodes_and_their_group() -> None:
    edits = plugin.anyaccel_container(DEVICES[:2])

    assert edits.nodes == ("/dev/accel/accel9", "/dev/accel/accel8")
    assert (edits.groups, edits.env) == ((998,), {})
    assert plugin.anyaccel_container(()).groups == ()
