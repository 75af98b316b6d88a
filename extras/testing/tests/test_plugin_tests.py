"""The pytest class: six lines for an author, a test per check, and no silent overrides."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from anyaccel_testing import CHECKS

ACME = (Path(__file__).parents[3] / "tests" / "vendors" / "acme.py").read_text()
HIDES_NOTHING = ACME.replace(
    "    names = [", "    if not devices:\n        return EnvEdits(unset=frozenset({'ACME_VISIBLE'}))\n    names = ["
)

AUTHORS = """
    from pathlib import Path
    from anyaccel_testing import AcceleratorPluginTests

    class TestAcme(AcceleratorPluginTests):
        vendor = "acme"
        recordings = Path(__file__).parent / "recordings"
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest on an author's file in a child process."""

    def run(*lines, source=AUTHORS, options=(), as_authors=False):
        text = textwrap.dedent(source) + "".join(f"    {line}\n" for line in lines)
        (tmp_path / "test_conformance.py").write_text(text)
        # -v: the names of tests are part of what is tested.
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rsfExX", "-v", *options, str(tmp_path)]
        # Without other plug-ins, for speed.
        environ = {**os.environ} if as_authors else {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=90, check=False)

    return run


def counts(done):
    return {end: int(number) for number, end in re.findall(r"(\d+) (passed|failed|skipped|xfailed|error)", done.stdout)}


def test_a_correct_plugin_passes_with_six_lines(run, install, recordings):
    install("acme", ACME)
    recordings(ACME)
    done = run(as_authors=True)
    assert done.returncode == 0, done.stdout
    assert counts(done).keys() == {"passed", "skipped"}
    names = set(re.findall(r"::TestAcme::test_check\[(.*?)\]", done.stdout))
    assert names == {check.label for check in CHECKS}


def test_a_failure_says_what_to_change_and_shows_no_code_of_ours(run, install, recordings):
    install("acme", HIDES_NOTHING)
    recordings(ACME)
    done = run()
    assert done.returncode == 1
    failed = set(re.findall(r"^FAILED \S+::test_check\[(.*?)\]", done.stdout, re.MULTILINE))
    assert failed == {"C17-hide"}
    for machine in ("pair", "quad", "products"):
        assert re.search(f"^E? *{machine}: .*anyaccel_env for no device must hide", done.stdout, re.MULTILINE)
    assert "anyaccel_env for no device must hide all of them" in done.stdout
    assert "Traceback" not in done.stdout
    assert "def test_check" not in done.stdout


def test_a_known_failure_is_declared_with_its_reason_and_taken_out_when_it_is_gone(run, install, recordings):
    """In the class or beside the recordings."""
    install("acme", HIDES_NOTHING)
    (recordings(ACME) / "expected_failures.json").write_text('{"C16": "acme/runtime#6"}')
    done = run('expected_failures = {"C17": "the runtime has no value for none, acme/runtime#7"}')
    assert (done.returncode, counts(done)["xfailed"], counts(done)["failed"]) == (1, 1, 1), done.stdout
    assert "acme/runtime#7" in done.stdout
    assert "C16 no longer fails: take it out of the expected failures" in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("def test_check(self): pass", "C23: TestAcme overrides test_check, so the suite would no longer check"),
        ("test_check = None", "C23: TestAcme overrides test_check"),
        ("def __init_subclass__(cls): pass", "C23: TestAcme overrides __init_subclass__"),
        (
            'expected_failures = {"C17": " "}',
            f"must map ids of checks (C01 to {CHECKS[-1].id}) to reasons (got 'C17': ' ')",
        ),
        (
            'expected_failures = {"C99": "why"}',
            f"must map ids of checks (C01 to {CHECKS[-1].id}) to reasons (got 'C99': 'why')",
        ),
    ],
)
def test_a_subclass_that_makes_the_suite_say_less_is_refused(line, message):
    source = textwrap.dedent(AUTHORS) + f"    {line}\n"
    # The class statement itself raises, so no inner run of pytest is needed.
    with pytest.raises(TypeError, match=re.escape(message)):
        exec(source, {"__file__": __file__, "__name__": "test_conformance"})


def test_a_refused_subclass_ends_the_run_and_says_why(run):
    done = run("def test_check(self): pass")
    assert done.returncode == 2, done.stdout
    assert "C23: TestAcme overrides test_check, so the suite would no longer check" in done.stdout


def test_an_override_with_a_reason_is_accepted(run, install, recordings):
    install("acme", ACME)
    recordings(ACME)
    done = run(
        '@__import__("pytest").mark.xfail(reason="our runner has no fork")',
        "def test_check(self): raise RuntimeError",
    )
    assert done.returncode == 0, done.stdout
    assert counts(done) == {"xfailed": 1}


@pytest.mark.full  # as in plugins/*/tests/test_conformance.py
def test_tests_of_its_own_are_welcome(run, install, recordings):
    install("acme", ACME)
    recordings(ACME)
    done = run("def test_more(self): assert self.vendor == 'acme'", options=("-k", "more or C01"))
    assert counts(done)["passed"] == 2, done.stdout


def test_without_recordings_it_fails_and_says_how_to_make_one(run, install):
    install("acme", ACME)
    done = run(options=("-k", "C07 or C01"))
    assert done.returncode == 1
    assert "make one with 'anyaccel record DIR'" in done.stdout
    assert counts(done) == {"passed": 1, "failed": 1}


def test_a_plugin_that_is_not_installed_fails_once(run, recordings, monkeypatch):
    monkeypatch.setenv("ANYACCEL_PLUGINS", "none")
    recordings(ACME)
    done = run()
    assert counts(done)["failed"] == 1, done.stdout
    assert "no plug-in for 'acme' is installed" in done.stdout


@pytest.mark.full  # as the suites of all plug-ins do in every run with xdist
def test_workers_of_xdist_share_the_tests(run, install, recordings):
    install("acme", ACME)
    recordings(ACME)
    done = run(options=("-n", "2"), as_authors=True)
    assert done.returncode == 0, done.stdout
    assert "failed" not in counts(done)
