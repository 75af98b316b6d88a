"""Every recorded machine: what is detected, and that masks go both ways on it."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import anyaccel_ascend as plugin
import pytest
from anyaccel.plugin import EnvContext, Term
from anyaccel.testing import context, describe, load_recording

RECORDINGS = Path(__file__).parent.parent / "recordings"
NAMES = sorted(path.name for path in RECORDINGS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_recorded_machine_is_described_as_expected(name):
    expected = json.loads((RECORDINGS / name / "expected.json").read_text())
    assert describe(plugin, context(load_recording(RECORDINGS / name))) == expected


@pytest.mark.parametrize("name", NAMES)
def test_masks_go_both_ways_on_every_recorded_machine(name):
    detected = plugin.anyaccel_detect(context(load_recording(RECORDINGS / name)))
    everything = detected.devices if detected else ()
    subsets = [subset for size in range(4) for subset in combinations(everything, size)]
    accepted = [subset for subset in subsets if plugin.anyaccel_validate(Term(names=("NPU",)), subset) is None]
    for subset in (*accepted, ()):
        edits = plugin.anyaccel_env(subset, EnvContext(devices=everything))
        assert {*edits.set, *edits.unset} <= set(plugin.anyaccel_info().env_vars)
        assert edits.enforced_by == ""
        assert plugin.anyaccel_visible(edits.set, everything) == [device.id for device in subset]


@pytest.mark.parametrize("name", NAMES)
def test_every_unhealthy_device_says_what_to_do(name):
    detected = plugin.anyaccel_detect(context(load_recording(RECORDINGS / name)))
    for device in detected.devices if detected else ():
        assert (device.health.value == "unhealthy") == bool(device.health_reason)
        assert "; " in device.health_reason or ": see" in device.health_reason or not device.health_reason
