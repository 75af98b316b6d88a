"""A bounded run of the chaos that ``chaos_ledger.py`` makes for as long as one likes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from chaos_ledger import chaos


@pytest.mark.timeout(300)
def test_chaos_gives_no_device_twice_and_loses_none(tmp_path):
    outcome = chaos(tmp_path, rounds=200, claimants=10, seed=7)
    print(outcome)
    assert outcome.sound, outcome
    assert outcome.kills > 100
