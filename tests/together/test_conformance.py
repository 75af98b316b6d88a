"""Check C24 of the conformance suite with all plug-ins installed: where one is tested alone, there is no other."""

from pathlib import Path

import pytest
from anyaccel_testing import State, run_checks

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.mark.full  # without plug-ins, as in .ci/run; otherwise their own tests say it
@pytest.mark.parametrize("vendor", sorted(path.parent.name for path in PLUGINS.glob("*/recordings")))
def test_a_vendor_claims_nothing_that_is_claimed_by_another(vendor):
    results = run_checks(vendor, PLUGINS / vendor / "recordings", only=["C24"])
    assert [(result.check, result.state, result.message) for result in results] == [("C24", State.OK, "")]
