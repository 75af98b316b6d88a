"""What holds for the tests of all distributions."""

import gc
import os
from collections.abc import Generator
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import preloaded
import pytest
from anyaccel_testing import AcceleratorPluginTests
from hypothesis import HealthCheck, settings
from installed import acme, anyaccel, clean_environment, install, record, tmp_path
from lengths import length

__all__ = ["acme", "anyaccel", "clean_environment", "install", "record", "tmp_path"]

EXTRAS = [path.parent for path in sorted(Path(__file__).parent.glob("extras/*/pyproject.toml"))]
ABSENT = [path for path in EXTRAS if find_spec(f"anyaccel_{path.name}") is None]
collect_ignore = [str(path) for path in ABSENT]
for suite in ("calls", "filter", "gangs", "results", "sweep"):
    pytest.register_assert_rewrite(f"engine_{suite}")


ROOT = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Begin in another part of each folder of tests in each worker.

    The first run in a clone compiles all test modules, which takes a worker 13 s. Workers that collect in one order
    would compile the same module at the same time; so, each finds what another one has compiled.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", None)
    if worker and report.passed and collector.path.parent == ROOT and isinstance(collector, pytest.Directory):
        sizes = [_measure_modules(node.path) for node in report.result]
        begin = sum(sizes) * int(worker["workerid"][2:]) / worker["workercount"]
        before = sum(1 for end in accumulate(sizes) if end <= begin)
        report.result = [*report.result[before:], *report.result[:before]]
    return report


def _measure_modules(path: Path) -> int:
    """Return the size of the test modules in a folder, or of one module."""
    return sum(module.stat().st_size for module in (path.rglob("test_*.py") if path.is_dir() else [path]))


def _sort_as_collected(items: list[pytest.Item]) -> None:
    """Undo what ``pytest_make_collect_report`` does: all workers must have one order."""
    items.sort(key=lambda item: item.path.relative_to(ROOT).parts[:2])


def pytest_report_header() -> list[str]:
    """Say which tests are left out."""
    return [f"not installed, and not tested: {', '.join(f'anyaccel-{path.name}' for path in ABSENT)}"] if ABSENT else []


def pytest_unconfigure() -> None:
    """End what runs commands for the tests, so that its processor time is that of this run."""
    preloaded.stop()


def pytest_collection_finish() -> None:
    """Keep the collector of garbage away from what has been imported and collected: it stays, and is large."""
    gc.freeze()


# How long anything takes says how much else the machine does.
settings.register_profile(
    "anywhere", max_examples=length(25, 100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("anywhere")

SOME_RECORDINGS = pytest.StashKey[set[type]]()
"""Checks of plug-ins that look at some recordings: the checks of one plug-in, or at full length, look at all."""

NOTHING_HERE = Path(__file__).parent / "tests" / "support" / "nothing_here"
"""A recorded machine without accelerators."""


@pytest.fixture(autouse=True)
def chosen_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test, and what it starts, sees a machine without accelerators where it names none.

    With the mark ``host`` it sees the machine that it runs on, of which no vendor is asked but those that the test
    names. So no test ends as it does because of what is plugged in there. No variable of ours leaks into a test, and a
    pytest that a test starts does not take itself for a worker of this one. What it has compiled it keeps for the next
    one: it rewrites its plug-ins, Hypothesis among them, which takes longer than the rest of it.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)  # tox sets it, and odd text could not be printed at all
    for name in list(os.environ):
        if name.startswith(("ANYACCEL_", "PYTEST_XDIST_")):
            monkeypatch.delenv(name)
    if request.cls in request.config.stash.get(SOME_RECORDINGS, ()):
        monkeypatch.setattr(request.cls, "recordings", _choose_recordings(request))
    if request.node.get_closest_marker("host") is None:
        monkeypatch.setenv("ANYACCEL_MACHINE", str(NOTHING_HERE))
    else:
        monkeypatch.setenv("ANYACCEL_PLUGINS", "none")


def _choose_recordings(request: pytest.FixtureRequest) -> Path:
    """Return a folder with every third recording of a plug-in."""
    chosen: Path = request.getfixturevalue("tmp_path") / "recordings"
    chosen.mkdir()
    for path in sorted(Path(request.cls.recordings).iterdir())[::3]:
        (chosen / path.name).symlink_to(path)
    return chosen


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a distribution which is not installed, as in ``tox -e core``."""
    for name in (name for mark in item.iter_markers("needs") for name in mark.args):
        if find_spec(f"anyaccel_{name}") is None:
            pytest.skip(f"needs anyaccel-{name}, which is not installed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Two workers for each processor: tests wait for half of their time, since much of what is tested is who waits."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return 2 * len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give tests to workers at a cost that does not grow with the tests that have run."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from scheduling import Scheduling  # pytest-xdist is not everywhere

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for full length, put the checks of each plug-in into a group, and begin with what takes long.

    The checks are made all at once, so one worker has them all. What takes long has a time-out of its own; at the end,
    one worker would be busy with it alone.
    """
    left_out = [item for item in items if length(item.get_closest_marker("full"), None)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if hasattr(config, "workerinput"):
        _sort_as_collected(items)
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    suites = set()
    for item in items:
        owner = getattr(item, "cls", None)
        if owner is not None and issubclass(owner, AcceleratorPluginTests):
            item.add_marker(pytest.mark.xdist_group(owner.__name__))
            suites.add(owner)
    if length(short=len(suites) > 1, full=False):
        config.stash[SOME_RECORDINGS] = suites
