"""Detection live in the testbed of a recording finds what the replay of the recording finds."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from anyaccel_testing.checks.detection import find_differences
from lengths import length

PLUGINS = Path(__file__).parents[2] / "plugins"
HELPER = Path(__file__).parents[1] / "support" / "live_in_testbed.py"
TARGETS = {point.name: point.value for point in entry_points(group="anyaccel")}
NO_TESTBED = 77
OTHER_ERRORS = {"mi210-container-2of8", "mi300x-8gpu-two-lost"}
"""Recordings with errors other than EACCES that mean more to the plug-in than a closed file, such as ENODEV."""


def programs(recording):
    """Names of the recorded tools, also behind ``env NAME=VALUE``."""
    commands = [entry["argv"] for entry in recording.get("commands", ())]
    return {next((word for word in argv if word != "env" and "=" not in word), "") for argv in commands}


def recordings(vendor):
    """Recordings of a vendor for a testbed; in short without those on which a tool hangs, which takes 10 s each."""
    for directory in sorted((PLUGINS / vendor / "recordings").iterdir()):
        recording = json.loads((directory / "machine.json").read_text())
        hangs = any(entry.get("timeout") for entry in recording.get("commands", ()))
        # A tool of this host answers for itself, such as dmesg.
        if not any(map(shutil.which, programs(recording))) and not length(hangs, False):
            yield directory


def expected(vendor, directory):
    """The inventory of a vendor's recording, or that detection fails there."""
    wanted = json.loads((directory / "expected.json").read_text())
    if isinstance(wanted, dict) and "vendors" in wanted:
        return "failed" if vendor in wanted.get("failed", {}) else wanted["vendors"].get(vendor)
    return wanted


def in_order(inventory):
    """The inventory with its devices in the order of their indexes, which detection need not keep."""
    if isinstance(inventory, dict) and "devices" in inventory:
        inventory["devices"].sort(key=lambda device: device["index"])
    return inventory


def ids(inventory):
    return sorted(device["id"] for device in (inventory or {}).get("devices", ()))


def test_live_in_the_testbed_is_as_replayed():
    vendors = sorted(path.name for path in PLUGINS.iterdir() if path.name in TARGETS)
    # One process for all. In short, two recordings of each vendor: the first with devices, and the last.
    pairs = []
    for vendor in vendors:
        found = [*recordings(vendor)]
        busy = next(each for each in found if isinstance(wanted := expected(vendor, each), dict) and ids(wanted))
        pairs += [(vendor, each) for each in length([busy, found[-1]], found)]
    done = subprocess.run(
        [sys.executable, str(HELPER)],
        input=json.dumps([(TARGETS[vendor], str(directory)) for vendor, directory in pairs]),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == NO_TESTBED:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(pairs) >= 2 * len(vendors)
    wrong = {}
    for (vendor, directory), answer in zip(pairs, answers, strict=True):
        wanted = expected(vendor, directory)
        if wanted == "failed" or "failed" in answer:
            faults = [] if wanted == "failed" and "failed" in answer else [f"{wanted}, not {answer}"]
        elif directory.name in OTHER_ERRORS:
            continue
        # An error or a file that no testbed can show: the reasons and states differ. So does what a driver of this host
        # tells in /proc, which is no part of a testbed.
        elif answer["gaps"] or os.path.exists(f"/proc/driver/{vendor}"):
            faults = [*find_differences(ids(wanted), ids(answer["found"]), "ids")]
        else:
            faults = [*find_differences(in_order(wanted), in_order(answer["found"]), "the inventory")]
        if faults:
            wrong[f"{vendor}/{directory.name}"] = faults
    assert wrong == {}
