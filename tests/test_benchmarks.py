"""The benchmarks run, and write what they say. How long anything takes is none of a test's business."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*arguments, script="run.py"):
    command = [sys.executable, BENCHMARKS / script, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)


PEER = "ProcessPoolExecutor"


@pytest.mark.parametrize(
    ("benchmarks", "references"),
    [
        (["scheduling", "arguments"], {"argument of 10 MB, anyaccel": PEER}),
        pytest.param(
            ["startup", "arguments", "ledger", "workers", "preload"],
            {
                "live worker with a device": PEER,
                "live worker with a device, a script's function": f"{PEER}, a script's function",
                "fresh worker": "fresh worker",
            },
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_cheap_ones_run(benchmarks, references, tmp_path):
    done = run(*benchmarks, "--rounds", "1", "--name", "here", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert " budgets kept" in done.stdout
    results = json.loads((tmp_path / "here.json").read_text())
    rows = {row["what"]: row for row in results["rows"]}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert {what: rows[what]["reference"] for what in references} == references
    drawn = ET.fromstring((tmp_path / "here.svg").read_text())
    assert len(drawn.findall("{*}rect")) == sum(bool(row["group"]) for row in results["rows"])
    table = run(tmp_path / "here.json", script="picture.py")
    assert table.stdout.count("\n") == len(rows) + 2


@pytest.mark.full
def test_a_sweep_is_measured(tmp_path):
    done = run("sweep", "--rounds", "1", "--name", "here", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [row["what"] for row in json.loads((tmp_path / "here.json").read_text())["rows"]]
    assert "anyaccel sweep, one of 20 commands" in rows
    assert "memory of a sweep of 20 commands" in done.stdout


@pytest.mark.full
def test_warm_actors_are_measured_beside_their_peers(tmp_path):
    done = run("serving", "--rounds", "1", "--name", "here", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["what"]: row for row in json.loads((tmp_path / "here.json").read_text())["rows"]}
    for what in ("request of a warm worker", "request of a warm worker, 32 in a message"):
        assert rows[f"{what}, anyaccel"]["ratio"] == 1
        assert rows[f"{what}, ProcessPoolExecutor"]["ratio"] > 0


def test_help_names_all_and_a_wrong_name_is_told():
    assert "startup, detection, scheduling" in " ".join(run("--help").stdout.split())
    wrong = run("speed")
    assert wrong.returncode == 2
    assert "there is no benchmark 'speed'" in wrong.stderr


def test_the_simulation_of_the_queue_runs_on_made_up_requests_and_on_a_log():
    for arguments in (["--requests", "60"], ["--swf", BENCHMARKS / "made-up.swf", "--devices", "4"]):
        done = run(*arguments, script="simulate_queue.py")
        assert done.returncode == 0, done.stderr
        assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:]] == [
            "plain order",
            "backfill",
            "backfill, bound 10 min",
            "fair shares",
            "fair shares, half-life 7 d",
            "fair shares, backfill, 10 min",
            "half-life 7 d, backfill, 10 min",
        ]
