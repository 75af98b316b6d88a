"""Values as JSON and back, with a check of every field."""

import json
from types import MappingProxyType

import pytest
from anyaccel.model import (
    Detected,
    Device,
    EnvEdits,
    Fractional,
    Health,
    Inventory,
    Problem,
    ProblemKind,
    VendorReport,
    VendorState,
)
from anyaccel.model.value import decode, encode
from hypothesis import given
from hypothesis import strategies as st

integers = st.integers(-(1 << 63), (1 << 64) - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
words = st.text("abc:-.0", min_size=1, max_size=8)
devices = st.builds(
    Device,
    id=words,
    index=st.integers(0, 9),
    model=words,
    memory_bytes=st.none() | st.integers(1, 1 << 50),
    links=st.dictionaries(words, st.integers(0, 9), max_size=3),
    nodes=st.lists(words).map(tuple),
    health=st.sampled_from(Health),
    fractional=st.sampled_from(Fractional),
    attributes=st.dictionaries(words, st.booleans() | integers | floats | words, max_size=3),
    tags=st.lists(words).map(tuple),
)


@given(st.lists(devices, max_size=3))
def test_what_was_encoded_is_decoded_equal(found):
    detected = Detected(devices=tuple(found), notes=("a", "b"))
    written = json.dumps(encode(detected))
    assert decode(Detected, json.loads(written)) == detected


def test_fields_can_be_left_out_wherever_they_are():
    device = Device(id="a", index=0, model="m", links=MappingProxyType({"b": 1}))
    assert encode(Detected(devices=(device,)), without=("links",)) == {
        "devices": [{"id": "a", "index": 0, "model": "m"}]
    }
    assert encode(device)["links"] == {"b": 1}


def test_an_inventory_with_a_problem_survives_the_way():
    problem = Problem(vendor="v", kind=ProblemKind.DIED, reason="x", details="traceback")
    report = VendorReport(vendor="v", state=VendorState.FAILED, problem=problem, env_vars=("A",))
    inventory = Inventory(machine="host", devices=(), vendors=(report,))
    assert decode(Inventory, encode(inventory)) == inventory


def test_fields_that_have_their_default_are_left_out():
    assert encode(EnvEdits(unset=frozenset({"B", "A"}))) == {"unset": ["A", "B"]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"Detected must be an object \(got \[\] that is a list\)"),
        (
            {"unknown": 1},
            r"^Detected must have no field 'unknown': Detected has devices, driver_version, partial, notes$",
        ),
        ({"devices": "x"}, r"Detected.devices must be .* \(got 'x' that is a str\)"),
        ({"devices": [{"id": "a"}]}, r"devices\[0\] must have the field 'index'; .* 'model'$"),
        ({"devices": [{"id": "a", "index": True, "model": "m"}]}, r"index must be int \(got True that is a bool\)"),
        ({"devices": [{"id": "a", "index": 0, "model": "m", "health": "ill"}]}, r"health must be Health \(got 'ill'"),
        ({"devices": [{"id": "a", "index": 0, "model": "m", "links": {"b": None}}]}, r"links\['b'\] must be int"),
        (
            {"devices": [{"id": "a", "index": 0, "model": "m", "memory_bytes": 1.5}]},
            r"memory_bytes must be int \| None",
        ),
        (
            {"devices": [{"id": "a", "index": 0, "model": "m", "memory_bytes": 1 << 64}]},
            r"memory_bytes must be int \| None, finite and of at most 64 bits \(got 18446744073709551616 that is a int",
        ),
        ({"devices": [{"id": "a", "index": 10**5000, "model": "m"}]}, r"index must be int, .* \(got a int that is"),
        (
            {"devices": [{"id": "a", "index": 0, "model": "m", "attributes": {"b": float("inf")}}]},
            r"attributes\['b'\] must be .* \(got inf that is a float\)",
        ),
        ({"partial": "yes"}, r"partial must be bool \(got 'yes' that is a str\)"),
        ({"driver_version": "x" * 500, "notes": [1]}, r"notes\[0\] must be str \(got 1 that is a int\)"),
    ],
)
def test_what_has_another_shape_is_refused_with_its_place(data, message):
    with pytest.raises(ValueError, match=message):
        decode(Detected, data)


def test_all_faults_are_named_at_once():
    with pytest.raises(ValueError, match=r"id must be str .*; Detected.devices\[0\].model must be str"):
        decode(Detected, {"devices": [{"id": 1, "index": 0, "model": 2}]})
