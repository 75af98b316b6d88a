"""What is built once for all tests of packages."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributions import FOLDERS, QUIET, check


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """A folder with the sdist of every distribution, and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")

    def build(folder):
        check(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder, env=QUIET)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, FOLDERS.values()))
    return out
