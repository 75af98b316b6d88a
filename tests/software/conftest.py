"""The vendors' own software in testbeds. ``tox -e real-VENDOR`` installs it; elsewhere these tests are skipped."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
RESULTS = Path(__file__).parent / "results.json"
WRITE = bool(os.environ.get("ANYACCEL_TEST_WRITE_SOFTWARE"))  # read once: tests run without variables of ours


@pytest.fixture
def recordings():
    """Return the recordings of a vendor by name; those of simulated or other machines as well."""

    def recordings(vendor):
        return {path.name: path for path in sorted((PLUGINS / vendor / "recordings").iterdir()) if path.is_dir()}

    return recordings


@pytest.fixture
def ask(accel_testbed):
    """Run a Python program in the testbed of a recording; what it prints last is JSON."""

    def ask(recording, program, *arguments, **options):
        done = accel_testbed(recording, sys.executable, "-c", program, *arguments, **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.fixture
def report():
    """Compare how many recordings agree with the row of ``results.json``, of which the table of support is made.

    With ``ANYACCEL_TEST_WRITE_SOFTWARE`` set, the row is written instead. ``cases`` says what was compared: recordings,
    or values of a variable, names and the like. ``own`` is False for programs of others.
    """

    def report(vendor, software, asked, agreeing, release=None, *, cases="recordings", own=True):
        row = {
            "vendor": vendor,
            "software": software,
            "version": release or version(software).partition("+")[0],  # without the build, as in 2.13.0+cpu
            "asked": asked,
            "cases": cases,
            "compared": len(agreeing),
            "agree": sum(not faults for faults in agreeing.values()),
            **({} if own else {"own": False}),
        }
        known = json.loads(RESULTS.read_text())
        rest = [each for each in known if (each["vendor"], each["software"]) != (vendor, software)]
        if WRITE:
            ordered = sorted([*rest, row], key=lambda each: (each["vendor"], each["software"]))
            RESULTS.write_text(json.dumps(ordered, indent=1) + "\n")
        assert {name: faults for name, faults in agreeing.items() if faults} == {}
        assert row in json.loads(RESULTS.read_text()), "write results.json: set ANYACCEL_TEST_WRITE_SOFTWARE=1"

    return report
