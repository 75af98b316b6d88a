"""ONEAPI_DEVICE_SELECTOR, value by value, as answered by Intel's SYCL runtime 2026.2."""

from __future__ import annotations

import pytest
from anyaccel_intel import selector

ACCEPTED = [
    # value, positions of four OpenCL CPU devices that the runtime leaves
    ("opencl:*", [0, 1, 2, 3]),
    ("*:*", [0, 1, 2, 3]),
    ("*:cpu", [0, 1, 2, 3]),
    ("*:0", [0]),
    ("*:gpu", []),
    ("opencl:0", [0]),
    ("OPENCL:0", [0]),
    ("OpenCL:1,2", [1, 2]),
    ("opencl:3,1", [1, 3]),
    ("opencl:1,1", [1]),
    ("opencl:1,99", [1]),
    ("opencl:99", []),
    ("opencl:0;", [0]),
    (";;opencl:0", [0]),
    ("opencl:0,", [0]),
    ("opencl:0,,1", [0, 1]),
    ("opencl:00", [0]),
    ("opencl:010", []),
    ("opencl:0x1", [0]),
    ("opencl:0-1", [0]),
    ("opencl:1-3", [1]),
    ("opencl:1 2", [1]),
    ("opencl:1, 2", [1, 2]),
    ("opencl:1abc", [1]),
    ("opencl:-1", []),
    ("opencl:-1,1", [1]),
    ("opencl: 0", []),
    ("opencl:CPU", []),
    ("opencl:CPU,1", [0, 1, 2, 3]),
    ("opencl:gpu,1", [1]),
    ("opencl:host", []),
    ("opencl:0.0", []),
    ("opencl:0.*", []),
    ("opencl:*.*", []),
    ("opencl:1.0.0", []),
    ("opencl:0;opencl:1", [0, 1]),
    ("level_zero:0;opencl:1", [1]),
    ("level_zero:*;opencl:cpu", [0, 1, 2, 3]),
    ("level_zero:0,1", []),
    ("cuda:0", []),
    ("opencl:,", []),
    (";", []),
    ("!level_zero:*", [0, 1, 2, 3]),
    ("!level_zero:0", [0, 1, 2, 3]),
    ("!opencl:gpu", [0, 1, 2, 3]),
    ("!opencl:cpu", []),
    ("!opencl:*", []),
    ("!*:*", []),
    ("opencl:0;!cuda:*", [0]),
    ("opencl:0;!*:*", []),
    # by number, the loader drops the whole backend
    ("!opencl:0", []),
    ("opencl:*;!opencl:0", []),
    ("*:*;!opencl:1", []),
    ("opencl:1;!opencl:0", []),
    ("!*:1", []),
]
REFUSED = [
    ("", "must not be empty"),
    ("*", "must say backend:devices"),
    ("gpu", "must say backend:devices"),
    ("0", "must say backend:devices"),
    ("opencl", "try opencl:*"),
    ("opencl:", "must name devices after the colon"),
    ("level_zero:", "must name devices after the colon"),
    ("level_zero:;opencl:0", "must name devices after the colon"),
    (":0", "must name a backend before the colon"),
    ("foo:0", "must name one of the backends"),
    ("ext_oneapi_level_zero:gpu", "must name one of the backends"),
    ("opencl :0", "must name one of the backends"),
    (",opencl:0", "must name one of the backends"),
    ("opencl:0; opencl:1", "must name one of the backends"),
    ("level_zero:0,opencl:0", "must have one colon"),
    ("opencl:cpu:0", "must have one colon"),
    ("level_zero:gpu:0", "must have one colon"),
    ("opencl:foo", "must name devices by"),
    ("opencl:acc", "must name devices by"),
    ("opencl:[1,2]", "must name devices by"),
    ("opencl:2147483648", "must name devices by"),
    ("opencl:cpu ", "must name devices by"),
    ("opencl:1.", "on both sides of each dot"),
    ("opencl:.1", "on both sides of each dot"),
    ("opencl:*.0", "must not number the sub-devices of"),
    ("opencl:1.*.0", "must not number the sub-devices of"),
    ("opencl:cpu.0", "not of a device type"),
    ("opencl:1.0.0.0", "more than two levels"),
    ("!opencl:1;opencl:1,2", "after all accepting ones"),
]
WITHOUT_LOADER_FILTER = [
    ("!opencl:0", [1, 2, 3]),
    ("opencl:*;!opencl:0", [1, 2, 3]),
    ("*:*;!opencl:1", [0, 2, 3]),
    ("!*:0", [1, 2, 3]),
    ("!opencl:99", [0, 1, 2, 3]),
    ("opencl:0,1;!*:1", [0]),
    ("!opencl:1.0", [0, 2, 3]),
    ("!opencl:cpu", []),
]


def positions(value: str, *, preload_filter: bool = True) -> list[int]:
    environ = {} if preload_filter else {"UR_LOADER_PRELOAD_FILTER": "0"}
    left = selector.admitted(value, [0] * 4, backend="opencl", kind="cpu", environ=environ)
    return [position for position, _ in left]


@pytest.mark.parametrize(("value", "left"), ACCEPTED)
def test_accepted_values_leave_what_the_runtime_leaves(value, left):
    assert positions(value) == left


@pytest.mark.parametrize(("value", "rule"), REFUSED)
def test_values_that_the_runtime_refuses_are_refused_with_rule_and_value(value, rule):
    with pytest.raises(ValueError, match="ONEAPI_DEVICE_SELECTOR") as error:
        selector.parse(value)
    assert rule in str(error.value)
    assert f"the value is {value!r}" in str(error.value)


@pytest.mark.parametrize(("value", "left"), WITHOUT_LOADER_FILTER)
def test_discarding_by_number_works_as_documented_without_the_filter_of_the_loader(value, left):
    assert positions(value, preload_filter=False) == left


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("level_zero:0", [(0, None)]),
        ("level_zero:0.1", [(0, 1)]),
        ("level_zero:0.*", [(0, 0), (0, 1)]),
        ("level_zero:*.*", [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ("level_zero:0,1.1", [(0, None), (1, 1)]),
        ("level_zero:2.0", []),
        ("level_zero:0.7", []),
        ("level_zero:0.0.0", []),
    ],
)
def test_sub_devices_are_tiles_of_cards_that_have_some(value, left):
    assert selector.admitted(value, [2, 2, 1], environ={}) == left
