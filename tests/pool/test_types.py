"""What type checkers say about programs with pools."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TYPED = Path(__file__).parent / "typed"
PROGRAMS = ("right.py", "mistakes.py")
CHECKERS = {
    "mypy": ("mypy", "--strict", "--no-error-summary", "--cache-dir"),
    "pyright": ("pyright", "--pythonpath", sys.executable),
}


def check(checker, cache):
    """Have a checker look at both programs; return the lines in which it finds errors by program, and what it says."""
    program, *options = CHECKERS[checker]
    program = shutil.which(program, path=Path(sys.executable).parent)
    if program is None:
        pytest.skip(f"needs {checker} (tox -e type)")
    options += [str(cache)] if checker == "mypy" else []
    command = [program, *options, *PROGRAMS]
    done = subprocess.run(command, cwd=TYPED, capture_output=True, text=True, check=False)
    assert not done.stderr, done.stderr
    return [
        sorted({int(line) for line in re.findall(rf"{name}:(\d+):.*\berror:", done.stdout)}) for name in PROGRAMS
    ], done.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_finds_ten_mistakes_and_none_in_the_same_calls_without_them(checker, tmp_path):
    (in_right, in_mistakes), said = check(checker, tmp_path)
    assert not in_right, said
    lines = (TYPED / "mistakes.py").read_text().splitlines()
    expected = [number for number, line in enumerate(lines, 1) if line.endswith("# mistake")]
    assert (len(expected), in_mistakes) == (10, expected), said


def test_the_right_calls_run(script):
    out, err = script((TYPED / "right.py").read_text() + "\n\nmain()\n").communicate()
    assert (out.splitlines()[1:], err) == (["2 [0.2] [6]"], "")
