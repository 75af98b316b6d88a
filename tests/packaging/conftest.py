"""What is built once for all tests of packages."""

import sys

import pytest
from distributions import FOLDERS, QUIET, check

BUILD = """
import os, sys, tarfile, tempfile
from hatchling.build import build_sdist, build_wheel
out, *folders = sys.argv[1:]
safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # which Python 3.11.2 lacks
for folder in folders:
    os.chdir(folder)
    sdist = build_sdist(out)
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(os.path.join(out, sdist)) as archive:
            archive.extractall(unpacked, **safely)
        os.chdir(os.path.join(unpacked, sdist.removesuffix(".tar.gz")))
        build_wheel(out)
        os.chdir(out)
"""
"""What ``build`` has the backend do, in one process: five for each distribution take forty times as long."""


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """A folder with the sdist of every distribution, and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    check(sys.executable, "-c", BUILD, out, *FOLDERS.values(), env=QUIET)
    return out
