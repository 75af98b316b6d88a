"""What the tests of exports share: the builders beside this file, and the tools of the targets."""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
os.environ["PATH"] += f"{os.pathsep}{Path(sys.executable).parent}{os.pathsep}/usr/sbin"  # dask and anyaccel; slurmd


@pytest.fixture
def needs():
    """Skip a test whose tools are not installed, and say how to get them."""

    def needs(*programs: str, packages: str) -> None:
        missing = [program for program in programs if shutil.which(program) is None]
        if missing:
            pytest.skip(f"needs {' and '.join(missing)}, which is not installed here (try: {packages})")

    return needs


@pytest.fixture
def as_root():
    """Skip a test that must be root."""
    if os.geteuid() != 0:
        pytest.skip("needs root: it mounts a file system of its own, so that the machine's stays untouched")
