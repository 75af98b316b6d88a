"""Pools on a machine with Acme devices; processes found by what is in their environment."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyaccel as aa
import cloudpickle
import pytest

sys.path.append(str(Path(__file__).parent))  # workers have our path, and so find the helpers that tests import


@pytest.fixture(autouse=True)
def functions_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Test modules cannot be imported by workers: pytest gives them names that are on no path."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def pool(acme: object) -> Iterator[Callable[..., aa.Pool]]:
    """Make pools on a simulated machine with two devices that can be shared; all are ended after the test."""
    made: list[aa.Pool] = []

    def pool(needs: Any = None, machine: str = "sim:A1:2", **options: Any) -> aa.Pool:
        made.append(aa.Pool(needs, machine=machine, **options))
        return made[-1]

    yield pool
    for each in made:
        each._core.stop(0)
        each.shutdown()


@pytest.fixture
def script(acme: object, tmp_path: Any) -> Callable[..., subprocess.Popen[str]]:
    """Run a program that uses pools in a process of its own."""

    def script(source: str, *, arguments: tuple[object, ...] = (), **options: Any) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(source))
        return subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return script
