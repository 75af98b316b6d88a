"""Masks: unambiguous lists alone are written or read."""

from __future__ import annotations

import pytest
from anyaccel.model import Device, EnvContext, Term
from anyaccel_enflame import plugin
from hypothesis import given
from hypothesis import strategies as st

MASK = "TOPS_VISIBLE_DEVICES"
DEVICES = tuple(
    Device(
        id=f"enflame-0000:{0x17 + n:02x}:00.0",
        index=n,
        model="S60",
        nodes=(f"/dev/gcu{7 - n}",),
        attributes={"minor": 7 - n},
    )
    for n in range(8)
)
NAMELESS = Device(id="enflame-0000:40:00.0", index=8, model="S60", attributes={"nameless": True})


def apply(devices) -> dict[str, str]:
    edits = plugin.anyaccel_env(devices, EnvContext(devices=DEVICES))
    assert not edits.unset
    return dict(edits.set)


@given(st.lists(st.sampled_from(DEVICES), unique_by=lambda device: device.id))
def test_a_worker_gets_ascending_indexes_once_each(devices) -> None:
    numbers = sorted(device.index for device in devices)

    assert apply(devices) == {MASK: ",".join(map(str, numbers)) or "999"}
    assert plugin.anyaccel_visible(apply(devices), DEVICES) == [DEVICES[number].id for number in numbers]


@pytest.mark.parametrize(
    ("value", "numbers"), [(None, None), ("999", []), ("3", [3]), ("0,3", [0, 3]), ("3,0", [0, 3])]
)
def test_a_mask_without_doubt_is_read(value: str | None, numbers: list[int] | None) -> None:
    environ = {"ENFLAME_VISIBLE_DEVICES": "5"} | ({} if value is None else {MASK: value})

    assert plugin.anyaccel_visible(environ, DEVICES) == (None if numbers is None else [DEVICES[n].id for n in numbers])


@pytest.mark.parametrize(
    "value", ["", " ", "0,", "0, 1", "0,0", "8", "-1", "all", "DRS-7325501d-02bd-4da2-9289-24d8521736b9", "0;1"]
)
def test_a_value_whose_effect_is_not_public_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"{MASK} must be indexes of efsmi such as '0,1', each once"):
        plugin.anyaccel_visible({MASK: value}, DEVICES)


def test_a_card_without_an_index_or_given_twice_cannot_be_masked() -> None:
    with pytest.raises(ValueError, match=r"enflame-0000:40:00\.0 cannot be given to a process: its efsmi index"):
        apply([NAMELESS])
    with pytest.raises(ValueError, match="each device once"):
        apply([DEVICES[0], DEVICES[0]])


def test_a_container_gets_the_numbers_of_nodes() -> None:
    edits = plugin.anyaccel_container(DEVICES[1:3])

    assert edits.nodes == ("/dev/gcuctl", "/dev/gcu6", "/dev/gcu5")
    assert edits.env == {"ENFLAME_VISIBLE_DEVICES": "6,5"}
    assert (plugin.anyaccel_container(()).nodes, plugin.anyaccel_container(()).env) == ((), {})


def test_a_fraction_is_refused_with_the_reason() -> None:
    reason = plugin.validate(Term(names=("GCU",), units=5_000), DEVICES[:1])

    assert "DRS instances" in (reason or "")
