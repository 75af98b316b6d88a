"""Bounded runs of the chaos that ``chaos_ledger.py`` and ``chaos_workers.py`` make for as long as one likes."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import chaos_ledger
import chaos_workers


@pytest.mark.timeout(300)
def test_chaos_gives_no_device_twice_and_loses_none(tmp_path):
    outcome = chaos_ledger.chaos(tmp_path, rounds=200, claimants=10, seed=7)
    print(outcome)
    assert outcome.sound, outcome
    assert outcome.kills > 100


@pytest.mark.timeout(300)
def test_chaos_among_programs_gives_no_device_twice_and_leaves_nothing(tmp_path):
    outcome = chaos_workers.chaos(tmp_path, rounds=200, seed=7)
    print(outcome)
    assert outcome.sound, f"{outcome}\n{(tmp_path / 'output').read_text(errors='replace')[-3000:]}"
    assert outcome.kills > 100
    assert outcome.calls > 20
