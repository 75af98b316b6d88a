"""The tests of ``examples/test_on_devices.py``, run as its first lines say."""

import os
import re
import shutil
import subprocess
import sys

import anyaccel
from example_programs import EXAMPLES

PLUGINS = ["-p", "no:cacheprovider", "-p", "xdist", "-p", "anyaccel_testing.pytest_plugin"]


def run(where, *options):
    shutil.copy(EXAMPLES / "test_on_devices.py", where)
    argv = [sys.executable, "-m", "pytest", *PLUGINS, *options, "test_on_devices.py"]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    return subprocess.run(argv, cwd=where, env=environ, capture_output=True, text=True, timeout=100, check=False)


def test_they_pass_on_a_simulated_machine(start, tmp_path):
    done = run(tmp_path, "-n", "2", "--accel", "GPU:1", "--accel-required")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^=+ 4 passed in ", done.stdout, re.MULTILINE)


def test_they_fail_where_no_device_is_free_and_one_is_required(start, tmp_path):
    with anyaccel.acquire("GPU:2"):
        done = run(tmp_path, "--accel", "GPU:1", "--accel-required", "-k", "program")
    assert done.returncode == 1
    assert "no accelerator for this test worker: GPU:1 does not fit now" in done.stdout
