"""Fixtures of the tests that every engine has: pools, and a place where the vendors of the tests are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyaccel as aa
import cloudpickle
import pytest

VENDORS = Path(__file__).parents[1] / "vendors"


@pytest.fixture(autouse=True)
def functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Test modules cannot be imported by workers: pytest gives them names that are on no path.

    Those of the suites that every engine runs are on the path of pytest alone.
    """
    modules = {request.module, *(module for name, module in sys.modules.items() if name.startswith("engine_"))}
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="session")
def acme_site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory in which the vendors of the tests are installed, for all nodes."""
    site = tmp_path_factory.mktemp("site")
    for vendor in ("acme", "cards"):
        (site / f"plug_{vendor}_everywhere.py").write_text((VENDORS / f"{vendor}.py").read_text())
        info = site / f"anyaccel_{vendor}-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: anyaccel-{vendor}\nVersion: 1.2.3\n")
        (info / "entry_points.txt").write_text(f"[anyaccel]\n{vendor} = plug_{vendor}_everywhere\n")
    return str(site)


@pytest.fixture
def new_pool() -> Iterator[Callable[..., aa.Pool]]:
    """Make pools; all are ended after the test."""
    made: list[aa.Pool] = []

    def new_pool(needs: Any = None, **options: Any) -> aa.Pool:
        made.append(aa.Pool(needs, **{"grace": 2.0, **options}))
        return made[-1]

    yield new_pool
    for each in made:
        each._core.stop(0)
        each.shutdown()


@pytest.fixture
def pool(acme: object, engine: dict[str, Any], new_pool: Callable[..., aa.Pool]) -> Callable[..., aa.Pool]:
    """Make pools on the engine, where there are four devices that can be shared."""
    return lambda needs=None, **options: new_pool(needs, **engine, **options)
