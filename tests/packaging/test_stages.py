"""What .ci/run does when tests fail: a few run once more, alone; more, and what is no failed test, fail the stage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_stage.py"
SUITE = """
import os, pathlib, pytest
HERE = pathlib.Path(__file__).parent

def once(name):
    mark = HERE / f"{name}.tried"
    fails = not mark.exists()
    mark.touch()
    assert not fails

@pytest.mark.xdist_group("a group")
def test_fails_once(): once("one")

@pytest.mark.parametrize("what", ["a@b/page.md", "[odd] - name"])
@pytest.mark.xdist_group("another")
def test_fails_once_with(what): once(what.replace("/", " "))

@pytest.mark.skipif(not hasattr(os, "sixth"), reason="there are five")
def test_is_skipped(): raise AssertionError

@pytest.mark.parametrize("number", range(3))
def test_passes(number): pass
"""
NAMES = ["test_fails_once", "test_fails_once_with[[odd] - name]", "test_fails_once_with[a@b/page.md]"]
ENVIRON = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PYTEST = (sys.executable, "-m", "pytest", "-q")
SPREAD = (*PYTEST, "-p", "xdist.plugin", "-n", "1", "--dist", "loadgroup")


class Stage:
    """A stage that runs a small suite."""

    def __init__(self, where):
        self.where = where
        self.kept = where / "kept"
        self.kept.mkdir()
        (where / "pytest.ini").write_text("[pytest]\nmarkers =\n    xdist_group: of tests\n")
        # What runs the tests again is one program.
        (where / "runs-tests").write_text(f'#!/bin/sh\nexec {sys.executable} -m pytest "$@"\n')
        (where / "runs-tests").chmod(0o755)

    def run(self, *command):
        return subprocess.run(
            [sys.executable, SCRIPT, self.kept, "pytest", "./runs-tests", "--", *command],
            cwd=self.where, env=ENVIRON, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def read(self, name):
        path = self.kept / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)


def write(stage, text):
    (stage.where / "test_it.py").write_text(text)


def test_what_fails_once_passes_and_is_named(stage):
    write(stage, SUITE)
    done = stage.run(*SPREAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert stage.read("unstable") == [f"unstable: test_it.py::{name}" for name in NAMES]
    first, again = stage.read("summary")
    assert "3 failed, 3 passed, 1 skipped" in first
    assert "3 passed" in again
    assert done.stdout.splitlines()[-1] == again
    assert stage.run(*PYTEST).returncode == 0  # all pass now, and nothing is left of the first run
    (only,) = stage.read("summary")
    assert "6 passed, 1 skipped" in only


FAILING = "import os, pytest\n"
LASTING = {
    "a test that fails again": ("def test_it(): assert False", "what failed in it does not pass alone either"),
    "a test that is skipped when it is alone": (
        'def test_it():\n    if os.path.exists("tried"): pytest.skip()\n    open("tried", "w"); assert False',
        "what failed in it does not pass alone either",
    ),
    "more tests than five": (
        '@pytest.mark.parametrize("number", range(6))\ndef test_it(number): assert False',
        "6 tests failed: only 5 run again",
    ),
    "a module that cannot be imported": ("import no_such_module", "test_it.py could not be collected"),
    "a process that crashes": ("def test_it(): os._exit(3)", "a process that ran tests has crashed"),
}


@pytest.mark.full  # two to four runs of pytest each, about .ci/run, which runs them
@pytest.mark.parametrize("what", LASTING)
def test_what_is_broken_fails(stage, what):
    text, reason = LASTING[what]
    write(stage, FAILING + text)
    done = stage.run(*(PYTEST if "test" in what else (*SPREAD, "--max-worker-restart=0")))
    assert (done.returncode, done.stderr) == (1, f"The stage failed: {reason}\n")
    assert stage.read("unstable") == []


@pytest.mark.full  # two to four runs of pytest each, about .ci/run, which runs them
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("sh", "-c", "exit 1"), "it failed without a failed test"),
        (("sh", "-c", "exit 124"), "its exit status is 124, not that of failed tests"),
    ],
    ids=["a command", "a time limit"],
)
def test_what_fails_without_a_test_fails(stage, command, reason):
    done = stage.run(*command)
    assert (done.returncode, done.stderr) == (1, f"The stage failed: {reason}\n")


TOX = """
import json, os, pathlib, subprocess, sys
arguments, tests = sys.argv[1:], []
if arguments[0] == "exec":
    raise SystemExit(subprocess.call([sys.executable, "-m", *arguments[arguments.index("--") + 1 :]]))
at = arguments.index("--")
found = {}
for name, path in ENVIRONMENTS.items():
    folder = pathlib.Path(".tox", name)
    command = [sys.executable, "-m", "pytest", path, *arguments[at + 1 :]]
    if path is None:
        command = [sys.executable, "-c", "raise SystemExit(1)"]
    status = subprocess.call(command, env=os.environ | {"TOX_ENV_DIR": str(folder.absolute())})
    found[name] = {"result": {"success": not status}, "test": [{"command": command, "retcode": status}]}
pathlib.Path(arguments[arguments.index("--result-json") + 1]).write_text(json.dumps({"testenvs": found}))
raise SystemExit(any(not each["result"]["success"] for each in found.values()))
"""


@pytest.mark.full  # two to four runs of pytest each, about .ci/run, which runs them
@pytest.mark.parametrize(
    ("environments", "reason"),
    [
        ({"core": "test_it.py", "acme": "test_other.py"}, ""),
        ({"core": "test_it.py", "lint": None}, "lint: it failed without a failed test"),
    ],
    ids=["tests alone", "style as well"],
)
def test_each_environment_of_tox_runs_its_own_tests_again(stage, environments, reason):
    """Tox itself would install each environment: what it writes and runs is done by a program that stands for it."""
    write(stage, SUITE)
    (stage.where / "test_other.py").write_text("def test_passes(): pass\n")
    tox = stage.where / "tox"
    tox.write_text(f"#!{sys.executable}\nENVIRONMENTS = {environments!r}\n{TOX}")
    tox.chmod(0o755)
    done = subprocess.run(
        [sys.executable, SCRIPT, stage.kept, "tox", "./tox", "run", "-e", ",".join(environments), "--", "-q"],
        cwd=stage.where, env=ENVIRON, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert json.loads((stage.kept / "result.json").read_text())["testenvs"].keys() == environments.keys()
    if reason:
        assert (done.returncode, done.stderr) == (1, f"The stage failed: {reason}\n")
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert stage.read("unstable") == [f"unstable: test_it.py::{name}" for name in NAMES]
    assert "3 passed" in stage.read("summary")[-1]
