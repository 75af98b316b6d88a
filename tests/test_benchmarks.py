"""The benchmarks run, and write what they say. How long anything takes is none of a test's business."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*arguments, script="run.py"):
    command = [sys.executable, BENCHMARKS / script, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)


def test_the_cheap_ones_run(tmp_path):
    done = run(
        "startup", "scheduling", "arguments", "ledger", "workers", "--rounds", "1", "--name", "here", "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert " budgets kept" in done.stdout
    results = json.loads((tmp_path / "here.json").read_text())
    rows = {row["what"]: row for row in results["rows"]}
    assert all(row["seconds"] > 0 for row in rows.values())
    assert rows["allocate and release, 8 devices"]["budget"] == "at most 20 us"
    assert {"kept", "ratio", "reference"} <= rows["live worker with a device"].keys()
    drawn = ET.fromstring((tmp_path / "here.svg").read_text())
    assert len(drawn.findall("{*}rect")) == sum(bool(row["group"]) for row in results["rows"])
    table = run(tmp_path / "here.json", script="picture.py")
    assert table.stdout.count("\n") == len(rows) + 2


def test_help_names_all_and_a_wrong_name_is_told():
    assert "startup, detection, scheduling" in " ".join(run("--help").stdout.split())
    wrong = run("speed")
    assert wrong.returncode == 2
    assert "there is no benchmark 'speed'" in wrong.stderr
