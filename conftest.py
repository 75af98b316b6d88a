"""What holds for the tests of all distributions."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from anyaccel_testing import AcceleratorPluginTests
from hypothesis import HealthCheck, settings
from lengths import length

EXTRAS = [path.parent for path in sorted(Path(__file__).parent.glob("extras/*/pyproject.toml"))]
ABSENT = [path for path in EXTRAS if find_spec(f"anyaccel_{path.name}") is None]
collect_ignore = [str(path) for path in ABSENT]
for suite in ("calls", "filter", "gangs", "results", "sweep"):
    pytest.register_assert_rewrite(f"engine_{suite}")


def pytest_report_header() -> list[str]:
    """Say which tests are left out."""
    return [f"not installed, and not tested: {', '.join(f'anyaccel-{path.name}' for path in ABSENT)}"] if ABSENT else []


# How long anything takes says how much else the machine does.
settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Three workers for two processors: much of what is tested is who waits, and for whom."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    processors = len(os.sched_getaffinity(0))
    return processors + (processors + 1) // 2


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for full length, and put the checks of each plug-in into a group.

    They are made all at once, so one worker has them all.
    """
    left_out = [item for item in items if length(item.get_closest_marker("full"), None)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    for item in items:
        owner = getattr(item, "cls", None)
        if owner is not None and issubclass(owner, AcceleratorPluginTests):
            item.add_marker(pytest.mark.xdist_group(owner.__name__))
