"""Run one stage of .ci/run. The few tests that fail in it run once more, alone.

    run_stage.py FOLDER pytest PYTEST -- COMMAND...          a command that runs PYTEST, in this folder
    run_stage.py FOLDER tox TOX ARGUMENT... -- PASSED_ON...  tox; what is passed on to pytest comes last

A stage passes when at most five of its tests failed, nothing else did, and all of these pass when they run again. Their
names go to FOLDER/unstable, the last lines of the runs of pytest to FOLDER/summary.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST = 5
"""Tests that may run again; where more fail, something is broken."""
TESTS_FAILED = 1
"""Exit status of pytest when tests failed, and nothing else went wrong."""
NO_TEST = re.compile(r"worker '\w+' crashed while running|^INTERNALERROR>", re.MULTILINE)
"""What pytest prints when more than a test failed."""
SUMMARY = re.compile(r"^.*\b\d+ (?:passed|failed|errors?)\b.* in [\d.]+s.*$", re.MULTILINE)
"""The last line of a run of pytest."""
CACHE = "pytest_cache"


class StageError(Exception):
    """Why a stage failed for good."""


@dataclass
class Run:
    """A run of pytest in which tests failed: its environment, their names, and what runs tests there again."""

    environment: str
    tests: list[str]
    again: list[str]


def tee(command: Sequence[str]) -> tuple[int, str]:
    """Run a command and print its output; return output and exit status."""
    printed = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        for line in process.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            printed.append(line)
    return process.returncode, b"".join(printed).decode(errors="replace")


def failed_tests(cache: Path) -> list[str]:
    """Name the tests that failed, by the cache of their run.

    Raises:
        StageError: When none is known, or a file failed before its tests could run.
    """
    try:
        names = sorted(json.loads((cache / "v" / "cache" / "lastfailed").read_text(encoding="utf-8")))
    except FileNotFoundError:
        names = []
    if not names:
        raise StageError("it failed without a failed test")
    for name in names:
        if "::" not in name:
            raise StageError(f"{name} could not be collected")
    return [without_group(name) for name in names]


def without_group(name: str) -> str:
    """Take off the group that pytest-xdist has put behind a test's name."""
    test, sign, _ = name.rpartition("@")
    return test if sign and not name.endswith("]") and "::" in test else name


def pytest_run(status: int, pytest: str) -> list[Run]:
    """Return the failed tests of a command with one run of pytest."""
    if status != TESTS_FAILED:
        raise StageError(f"its exit status is {status}, not that of failed tests")
    return [Run("", failed_tests(Path(".pytest_cache")), [pytest, "-q", "--tb=short"])]


def tox_runs(tox: str, result: Path) -> list[Run]:
    """Return the failed tests of the environments of tox."""
    runs = []
    for name, found in json.loads(result.read_text(encoding="utf-8"))["testenvs"].items():
        if found.get("result", {}).get("success", True):
            continue
        failed = [command["retcode"] for command in found.get("test", ()) if command["retcode"]]
        if failed != [TESTS_FAILED]:
            raise StageError(f"{name}: it could not be made, or did not end as with failed tests")
        again = [tox, "exec", "-e", name, "--", "pytest", "-q", "--tb=short"]
        try:
            runs.append(Run(name, failed_tests(Path(".tox", name, CACHE)), again))
        except StageError as error:
            raise StageError(f"{name}: {error}") from error
    if not runs:
        raise StageError("no environment of tox says what failed")
    return runs


def summary_of(printed: str) -> str:
    """The last line of the last run of pytest."""
    lines = SUMMARY.findall(printed)
    return f"{lines[-1]}\n" if lines else ""


def run_again(run: Run) -> str:
    """Run tests once more, one after the other, and return the last line of that.

    Raises:
        StageError: When one does not pass.
    """
    status, printed = tee([*run.again, *run.tests])
    summary = summary_of(printed)
    if status or not re.search(rf"\b{len(run.tests)} passed\b", summary):
        raise StageError("what failed in it does not pass alone either")
    return summary


def main(folder: Path, kind: str, program: str, *command: str) -> None:
    """Run a stage.

    Raises:
        StageError: When it failed for good.
    """
    result = folder / "result.json"
    if kind == "tox":
        for cache in Path().glob(f".tox/*/{CACHE}"):
            shutil.rmtree(cache)
        result.unlink(missing_ok=True)
        at = command.index("--")
        own = ("--result-json", str(result), "--", "-o", f"cache_dir=$TOX_ENV_DIR/{CACHE}")
        status, printed = tee([program, *command[:at], *own, *command[at + 1 :]])
    else:
        shutil.rmtree(".pytest_cache", ignore_errors=True)
        status, printed = tee(command[1:])
    summary = summary_of(printed)
    if status:
        if NO_TEST.search(printed):
            raise StageError("a process that ran tests has crashed")
        runs = tox_runs(program, result) if kind == "tox" else pytest_run(status, program)
        names = [f"unstable: {name}" for run in runs for name in run.tests]
        if len(names) > MOST:
            raise StageError(f"{len(names)} tests failed: only {MOST} run again")
        print(f"\n{len(names)} failed and run once more, alone:", *names, sep="\n", flush=True)
        summary += "".join(map(run_again, runs))
        with (folder / "unstable").open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in names)
    (folder / "summary").write_text(summary, encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    except StageError as error:
        raise SystemExit(f"The stage failed: {error}") from error
