"""When an annotation of a hook agrees with the contract's."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from anyaccel.plugin import Detected, Device
from anyaccel_testing.checks.loading import is_narrower


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (str, str),
        (Any, Detected),
        (Detected, Detected | None),
        (None.__class__, Detected | None),
        (tuple[str, ...], Sequence[str]),
        (tuple[str, str], Sequence[str]),
        (list[str] | None, Sequence[str] | None),
        (list, Sequence[str]),
        (dict[str, int], Mapping[str, int]),
        (Device, object),
    ],
)
def test_agrees(given, wanted):
    assert is_narrower(given, wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (bytes, Mapping[str, str] | str),
        (bool, Detected | None),
        (Detected | None, Detected),
        (list[int], Sequence[str]),
        (tuple[str, int], Sequence[str]),
        (dict[str, str], Mapping[str, int]),
        (list[Device], Detected),
    ],
)
def test_disagrees(given, wanted):
    assert not is_narrower(given, wanted)
