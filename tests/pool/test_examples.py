"""The programs of ``examples/`` print what they say, on any machine and with no plug-in."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted([*HOME.glob("pool_*.py"), *HOME.glob("actor_*.py")])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_it_says(path):
    promised = ast.get_docstring(ast.parse(path.read_text())).partition("Prints:\n")[2]
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "ANYACCEL_PLUGINS": "none"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{line.strip()}\n" for line in promised.splitlines())
    assert "Traceback" not in done.stderr


def test_there_are_examples():
    assert len(EXAMPLES) >= 6
