"""Variables with lists of devices, read by the rules of runtimes."""

from __future__ import annotations

import pytest
from anyaccel.kit import FaultError, Ids, Mask, Numbers
from anyaccel.plugin import Device
from hypothesis import given
from hypothesis import strategies as st

DEVICES = tuple(Device(id=f"ACME-{letter}{letter}{n}", index=n, model="One") for n, letter in enumerate("abbc"))


def read(mask: Mask, value: str | None) -> list[int] | None:
    seen = mask.read({} if value is None else {mask.variable: value}, DEVICES)
    return None if seen is None else [device.index for device in seen]


def test_without_the_variable_nothing_is_hidden():
    assert read(Mask("ACME_VISIBLE"), None) is None


@pytest.mark.parametrize("names", [Numbers(), Ids()], ids=["numbers", "ids"])
@given(st.lists(st.sampled_from(DEVICES), unique_by=lambda device: device.id))
def test_what_is_written_reads_back_in_its_order(names, devices):
    mask = Mask("ACME_VISIBLE", names, nothing="none")

    assert mask.read({"ACME_VISIBLE": mask.write(devices)}, DEVICES) == devices


def test_no_device_is_written_as_the_word_for_nothing():
    assert Mask("ACME_VISIBLE", nothing="-1").write([]) == "-1"


def test_a_device_that_is_given_twice_is_refused():
    with pytest.raises(FaultError, match=r"must name each device once \(got 1,1\)"):
        Mask("ACME_VISIBLE").write([DEVICES[1], DEVICES[1]])


@pytest.mark.parametrize(
    ("rules", "value", "seen"),
    [
        ({}, "2, 0", [2, 0]),
        ({}, "9,1", [1]),
        ({}, "1,1,0", [1, 0]),
        ({"unknown": "stop"}, "1,9,0", [1]),
        ({"unknown": "void"}, "1,9,0", []),
        ({"malformed": "skip"}, "1,x,0", [1, 0]),
        ({"malformed": "stop"}, "1,x,0", [1]),
        ({"malformed": "stop"}, "all", []),
        ({"malformed": "stop", "blank": "skip"}, ",1,x,0", [1]),
        ({"repeated": "void"}, "1,0,1", []),
        ({"repeated": "stop"}, "1,1,0", [1]),
        ({"blanks": False, "malformed": "stop"}, "1, 0", [1]),
        ({"strict": True}, "2,0", [0, 2]),
        ({"nothing": "none"}, "none", []),
        ({"nothing": "none"}, "", []),
        ({"nothing": "none", "empty": "everything"}, "", None),
    ],
)
def test_an_entry_that_is_not_as_it_should_be_does_what_the_runtime_does(rules, value, seen):
    assert read(Mask("ACME_VISIBLE", **rules), value) == seen


@pytest.mark.parametrize(
    ("rules", "value"),
    [
        ({}, "all"),
        ({}, "0,"),
        ({}, "0x1"),
        ({}, "²"),
        ({"malformed": "stop", "blank": "error"}, "1, ,x"),
        ({"unknown": "error"}, "0,9"),
        ({"repeated": "error"}, "0,0"),
        ({"strict": True}, "0,9"),
        ({"strict": True}, "0,0"),
        ({"nothing": "none", "empty": "error"}, ""),
    ],
)
def test_a_value_that_the_runtime_refuses_is_an_error_with_the_way_out(rules, value):
    with pytest.raises(FaultError) as caught:
        read(Mask("ACME_VISIBLE", entries="numbers", **rules), value)

    assert caught.value.fault == (f"ACME_VISIBLE must be numbers (got {value!r})", "unset ACME_VISIBLE")


def test_numbers_may_have_a_form_and_a_meaning_of_their_own():
    hexadecimal = Mask("M", Numbers(pattern="0x[0-9a-f]+", value=lambda text: int(text, 16)))

    assert read(hexadecimal, "0x2,0x0") == [2, 0]
    assert read(Mask("M", Numbers(pattern=r"[+-]?\d+")), "-1,+3") == [3]
    assert Mask("M", Numbers(lambda device: device.index + 10)).write(DEVICES[:2]) == "10,11"


@pytest.mark.parametrize(
    ("entry", "seen"),
    [("ACME-a", [0]), ("ACME-bb1", [1]), ("ACME-bb", []), ("ACME-x", []), ("ACM", []), ("acme-a", [0])],
)
def test_the_beginning_of_an_id_will_do_where_it_fits_one_device(entry, seen):
    assert read(Mask("M", Ids(pattern="ACM.*", shortest=5, case=False)), entry) == seen


def test_an_id_must_be_whole_where_the_runtime_takes_no_beginnings():
    assert read(Mask("M", Ids()), "ACME-a,ACME-cc3") == [3]


def test_one_list_may_hold_numbers_and_ids():
    mixed = Mask("M", Numbers(), Ids(pattern="ACME-.*"))

    assert read(mixed, "3,ACME-aa0") == [3, 0]
    assert mixed.write(DEVICES[:2]) == "0,1"


@pytest.mark.parametrize(
    ("value", "seen"),
    [("0-2", [0, 1, 2]), ("3,0-1", [3, 0, 1]), ("2-2", [2]), ("2-1", []), ("2-9", []), ("0-99999999999", [])],
)
def test_a_range_names_all_of_its_devices_or_none(value, seen):
    assert read(Mask("M", Numbers(ranges=True)), value) == seen


def test_a_range_that_repeats_a_device_does_what_a_repeated_entry_does():
    assert read(Mask("M", Numbers(ranges=True)), "1,0-2") == [1, 0, 2]
    assert read(Mask("M", Numbers(ranges=True), repeated="void"), "1,0-2") == []


def test_a_runtime_that_keeps_its_own_order_is_written_and_read_in_it():
    mask = Mask("M", ordered=False)

    assert mask.write([DEVICES[2], DEVICES[0]]) == "0,2"
    assert read(mask, "3,1") == [1, 3]
