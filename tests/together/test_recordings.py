"""Recordings of all plug-ins replay to the expected inventory; other checks look at some, at full length at all."""

from pathlib import Path

import pytest
from anyaccel_testing import State, run_checks

PLUGINS = Path(__file__).parents[2] / "plugins"
VENDORS = sorted(path.parent.name for path in PLUGINS.glob("*/recordings"))


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_recording_replays_to_the_expected_inventory(vendor):
    recordings = PLUGINS / vendor / "recordings"
    results = run_checks(vendor, recordings, only=["C07"])
    assert {result.machine for result in results} == {path.name for path in recordings.iterdir() if path.is_dir()}
    assert {(result.state, result.message) for result in results} == {(State.OK, "")}
