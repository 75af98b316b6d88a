"""Bounded runs of what ``chaos_ledger.py``, ``chaos_workers.py`` and ``torture.py`` do for as long as one likes."""

import itertools
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

ROUNDS = length(16, 40)
PROGRAMS = length(4, 20)  # rounds in which programs are killed
TREES = length(1, 3)  # of each way; a thousand of all ways are copied_marks.py --trees 1000 --all
COPIED = 1  # of each way
OFTEN = ("cancel", "release", "pool", "call in time")
"""Ways that every run of the tests takes; each of the others ends a tree as one of these does."""


def test_chaos_gives_no_device_twice_and_loses_none(tmp_path):
    outcome = chaos_ledger.chaos(tmp_path, rounds=ROUNDS, claimants=10, seed=7)
    print(outcome)
    assert outcome.sound, outcome
    assert outcome.kills > ROUNDS / 4


def test_chaos_among_programs_gives_no_device_twice_and_leaves_nothing(tmp_path):
    kills = calls = 0
    for seed in itertools.count(7):  # on a slow machine, signals meet programs that have not called yet
        home = tmp_path / str(seed)
        home.mkdir()
        outcome = chaos_workers.chaos(home, rounds=PROGRAMS, seed=seed)
        print(outcome)
        assert outcome.sound, f"{outcome}\n{(home / 'output').read_text(errors='replace')[-3000:]}"
        kills, calls = kills + outcome.kills, calls + outcome.calls
        if kills and calls:
            return


@pytest.mark.parametrize("way", torture.WAYS)
@pytest.mark.skipif(bool(torture.able()), reason=torture.able() or "-")
def test_no_descendant_loses_its_device_and_no_device_is_lost(way):
    found: Counter[str] = Counter()
    while found["questions"] <= found["trees"] or not found["kills"]:  # a tree may be over before it is asked or killed
        found += torture.all_of((way,), TREES, seed=11 + found["trees"])[way]
        print(dict(found))
        assert (found["early"], found["late"]) == (0, 0)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.full] * (way not in OFTEN)) for way in copied_marks.WAYS]
)
@pytest.mark.skipif(bool(torture.able()), reason=torture.able() or "-")
def test_what_ends_a_tree_does_not_wait_for_a_user_who_copies_its_mark(way):
    """It ends while the copies live; nothing of the tree is left then, and its device was not free before."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here, in which other users may run this Python")
    command = [sys.executable, copied_marks.__file__, "--ways", way, "--trees", str(COPIED), "--slots", "2"]
    done = subprocess.run([*command, "--seed", "17"], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    assert re.search(rf"^{way} +{COPIED} ", done.stdout, re.MULTILINE)
    assert done.returncode == 0
