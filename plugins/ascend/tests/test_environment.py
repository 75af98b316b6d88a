"""ASCEND_RT_VISIBLE_DEVICES in both directions, and the variables of containers."""

from __future__ import annotations

import pytest
from anyaccel.plugin import Device, EnvContext, Term
from anyaccel_ascend import plugin
from hypothesis import given
from hypothesis import strategies as st

MASK = "ASCEND_RT_VISIBLE_DEVICES"
EIGHT = tuple(Device(id=f"ascend-0000:0{number}:00.0", index=number, model="910B3") for number in range(8))
NPU = Term(names=("NPU",))
VNPU = {"template": "vir04", "addressable": False}


def env(devices, everything=EIGHT):
    return plugin.anyaccel_env(devices, EnvContext(devices=tuple(everything)))


TRUTH = [
    ("", []),
    ("0", [0]),
    ("7", [7]),
    ("8", []),
    ("0,1", [0, 1]),
    ("3,5,7", [3, 5, 7]),
    # Descending numbers leave nothing, in torch_npu as in CANN.
    ("1,0", []),
    ("0,0", []),
    ("1,2,2,3", []),
    ("0,1,", [0, 1]),
    ("0,,1", [0]),
    (",0", []),
    ("0, 1", [0]),
    ("0 ,1", [0]),
    (" 0", []),
    ("1,3,8", [1, 3]),
    ("8,9", []),
    ("-1", []),
    ("a", []),
    ("0,-1", [0]),
    ("0,a", [0]),
    ("0;1", [0]),
    ("0-3", [0]),
    ("00,01", [0, 1]),
    ("Ascend910-0", []),
    ("NoDevFiles", []),
    ("0,8,1", [0]),
    ("1,8,0", [1]),
    ("0,2,4,6,1,3,5,7", []),
    ("\u0661", []),
]
"""Answers of torch_npu's own parser with eight devices; the last value is an Arabic digit."""


@pytest.mark.parametrize(("value", "numbers"), TRUTH)
def test_a_mask_shows_what_the_runtime_would_see(value, numbers):
    assert plugin.anyaccel_visible({MASK: value}, EIGHT) == [EIGHT[number].id for number in numbers]


def test_no_mask_hides_nothing():
    assert plugin.anyaccel_visible({}, EIGHT) is None
    assert plugin.anyaccel_visible({"ASCEND_VISIBLE_DEVICES": "4,3"}, EIGHT) is None


@given(st.sets(st.sampled_from(range(8))))
def test_what_a_worker_is_told_it_sees(numbers):
    chosen = tuple(EIGHT[number] for number in sorted(numbers))
    edits = env(chosen)
    assert plugin.anyaccel_visible(edits.set, EIGHT) == [device.id for device in chosen]
    assert edits.memory_by == edits.compute_by == ""


@given(st.permutations(range(8)), st.integers(0, 8))
def test_the_list_is_ascending_in_whatever_order_devices_are_given(order, count):
    chosen = [EIGHT[number] for number in order[:count]]
    assert env(chosen).set[MASK] == ",".join(str(number) for number in sorted(order[:count]))


@given(st.sets(st.integers(0, 15), min_size=1), st.data())
def test_numbers_beyond_nine_are_sorted_as_numbers(numbers, data):
    # Two digits: as texts, "10" sorts before "9".
    sixteen = [Device(id=f"ascend-{number}", index=number, model="Ascend910") for number in range(16)]
    order = data.draw(st.permutations(sorted(numbers)))
    edits = env([sixteen[number] for number in order], sixteen)
    assert plugin.anyaccel_visible(edits.set, sixteen) == [f"ascend-{number}" for number in sorted(numbers)]


@given(st.sets(st.sampled_from(range(8)), min_size=1), st.data())
def test_a_nested_worker_gets_numbers_of_the_same_space(outer, data):
    """A worker's mask replaces its launcher's: a launcher with 2,3,5 passes on 3,5, not 1,2."""
    seen = plugin.anyaccel_visible(env([EIGHT[number] for number in outer]).set, EIGHT)
    inner = data.draw(st.sets(st.sampled_from(sorted(seen))))
    edits = env([device for device in EIGHT if device.id in inner])
    assert set(plugin.anyaccel_visible(edits.set, EIGHT)) == inner <= set(seen)


@given(st.text(alphabet="0123456789,- ;aA", max_size=12))
def test_any_mask_is_understood_and_shows_ascending_devices(value):
    seen = plugin.anyaccel_visible({MASK: value}, EIGHT)
    assert seen == sorted(set(seen))


def test_the_older_rival_is_removed():
    assert "ASCEND_DEVICE_ID" in env(EIGHT[:1]).unset


def test_hiding_all_is_the_empty_string():
    assert env(()).set == {MASK: ""}


def test_a_lost_card_is_refused_with_its_reason(devices):
    *_, lost = devices("910a-card-dropped")
    assert "lost it" in plugin.anyaccel_validate(NPU, [lost])
    with pytest.raises(ValueError, match="cannot be given to a process"):
        env([lost], devices("910a-card-dropped"))


def test_a_lost_card_does_not_shift_the_numbers_of_the_others(devices):
    found = devices("910a-card-dropped")
    assert env(found[3:5], found).set[MASK] == "3,4"
    assert plugin.anyaccel_visible({MASK: "6,7"}, found) == [found[6].id]


def test_vnpus_of_a_host_are_named_for_the_container_runtime(devices):
    found = devices("910b4-vnpu-host")
    edits = env(found[9:11], found)
    assert edits.set == {MASK: "", "ASCEND_VISIBLE_DEVICES": "101,116", "ASCEND_RUNTIME_OPTIONS": "VIRTUAL"}
    assert plugin.anyaccel_visible(edits.set, found) == [found[9].id, found[10].id]


def test_whole_npus_beside_vnpus_remove_the_variables_of_containers(devices):
    found = devices("910b4-vnpu-host")
    edits = env(found[2:4], found)
    assert edits.unset >= {"ASCEND_VISIBLE_DEVICES", "ASCEND_RUNTIME_OPTIONS"}
    assert plugin.anyaccel_visible(edits.set, found) == [found[2].id, found[3].id]


def test_without_vnpus_the_variables_of_containers_are_left_alone():
    assert not {"ASCEND_VISIBLE_DEVICES", "ASCEND_RUNTIME_OPTIONS"} & {*env(EIGHT).set, *env(EIGHT).unset}


def test_whole_npus_and_vnpus_do_not_mix(devices):
    found = devices("910b4-vnpu-host")
    assert "either whole NPUs or vNPUs" in plugin.anyaccel_validate(NPU, [found[2], found[8]])
    assert "split into vNPUs" in plugin.anyaccel_validate(NPU, [found[0]])
    assert plugin.anyaccel_validate(NPU, found[8:10]) is None
    assert plugin.anyaccel_validate(NPU, found[2:8]) is None


def test_a_share_of_a_vnpu_is_refused_with_the_rule(devices):
    half = Term(names=("NPU",), units=5000)
    assert "given out whole" in plugin.anyaccel_validate(half, devices("310p3-vnpu-container"))
    assert plugin.anyaccel_validate(half, EIGHT[:1]) is None


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        ("", []),
        ("void", []),
        ("0", [0]),
        ("0-2,5", [0, 1, 2, 5]),
        (" 4 , 3 ", [3, 4]),
        ("3,3", [3]),
        ("Ascend910-1,Ascend910-3", [1, 3]),
        ("npu-0", [0]),
    ],
)
def test_the_list_of_a_container_is_read_as_ascend_docker_runtime_does(value, numbers):
    parts = [
        Device(id=f"vnpu{number}", index=number, model="310P3", attributes=VNPU | {"vnpu_id": number})
        for number in range(6)
    ]
    environ = {MASK: "", "ASCEND_VISIBLE_DEVICES": value, "ASCEND_RUNTIME_OPTIONS": "NODRV,VIRTUAL"}
    assert plugin.anyaccel_visible(environ, parts) == [f"vnpu{number}" for number in numbers]


@pytest.mark.parametrize("value", ["a", "0,,1", "1-", "3-1", "0-200", "0;1", "100,103"])
def test_a_list_that_would_stop_a_container_is_an_error(value, devices):
    found = devices("910b4-vnpu-host")
    with pytest.raises(ValueError, match="ASCEND_VISIBLE_DEVICES"):
        plugin.anyaccel_visible({"ASCEND_VISIBLE_DEVICES": value, "ASCEND_RUNTIME_OPTIONS": "VIRTUAL"}, found)
