"""Bounded runs of what ``chaos_ledger.py``, ``chaos_workers.py`` and ``torture.py`` do for as long as one likes."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import chaos_ledger
import chaos_workers
import copied_marks
import torture
from lengths import length

pytestmark = pytest.mark.timeout(900)

ROUNDS = length(16, 80)
TREES = length(1, 24)  # of each way; a thousand of all ways are copied_marks.py --trees 1000 --all
COPIED = length(1, 3)  # of each way
FEWEST_KILLS = length(0, 8)  # of a few trees, any may be gone before it is killed


def test_chaos_gives_no_device_twice_and_loses_none(tmp_path):
    outcome = chaos_ledger.chaos(tmp_path, rounds=ROUNDS, claimants=10, seed=7)
    print(outcome)
    assert outcome.sound, outcome
    assert outcome.kills > ROUNDS / 4


def test_chaos_among_programs_gives_no_device_twice_and_leaves_nothing(tmp_path):
    outcome = chaos_workers.chaos(tmp_path, rounds=ROUNDS, seed=7)
    print(outcome)
    assert outcome.sound, f"{outcome}\n{(tmp_path / 'output').read_text(errors='replace')[-3000:]}"
    assert outcome.kills > ROUNDS / 8  # of 16 signals, whom they meet decides which the next ones are
    assert outcome.calls > ROUNDS / 10  # on a machine that does much else, programs start slowly


@pytest.mark.parametrize("way", torture.WAYS)
@pytest.mark.skipif(bool(torture.able()), reason=torture.able() or "-")
def test_no_descendant_loses_its_device_and_no_device_is_lost(way):
    found: Counter[str] = Counter()
    while found["questions"] <= found["trees"]:  # a tree may be over before it was asked for
        found += torture.all_of((way,), TREES, seed=11 + found["trees"])[way]
        print(dict(found))
        assert (found["early"], found["late"]) == (0, 0)
    assert found["kills"] >= FEWEST_KILLS


@pytest.mark.parametrize("way", copied_marks.WAYS)
@pytest.mark.skipif(bool(torture.able()), reason=torture.able() or "-")
def test_what_ends_a_tree_does_not_wait_for_a_user_who_copies_its_mark(way):
    """It ends while the copies live; nothing of the tree is left then, and nobody has got its device before."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here, in which other users may run this Python")
    command = [sys.executable, copied_marks.__file__, "--ways", way, "--trees", str(COPIED), "--slots", "2"]
    done = subprocess.run([*command, "--seed", "17"], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert re.search(rf"^{way} +{COPIED} ", done.stdout, re.MULTILINE)
    assert done.returncode == 0
