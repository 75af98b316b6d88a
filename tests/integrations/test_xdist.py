"""The fixture ``accel`` under pytest-xdist, in two runs at the same time: no two workers have the same device."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

PLUGIN = "anyaccel_testing.pytest_plugin"
TEST = """
    import json, os, pathlib, time

    def test_own_device(accel):
        pathlib.Path(f"there-{os.getpid()}").write_text(json.dumps([accel.devices[0].id, os.environ["ACME_VISIBLE"]]))
        until = time.monotonic() + 200
        # A worker that is done gives its device back: all four must have theirs before the first one is.
        while len(list(pathlib.Path().glob("there-*"))) < 4:
            assert time.monotonic() < until
            time.sleep(0.02)
"""


@pytest.mark.full  # workers of one run are in test_pytest_plugin.py, several programs in tests/launcher
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("acme")
def test_two_runs_at_the_same_time(tmp_path):
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TEST))
    plugins = ["-p", "no:cacheprovider", "-p", "xdist", "-p", PLUGIN]  # and no others, for speed
    options = ["-q", "-rsf", "-n", "2", "--dist", "each", "--accel", "APU:1"]
    argv = [sys.executable, "-m", "pytest", *plugins, *options, "test_it.py"]
    environ = {**os.environ, "ANYACCEL_MACHINE": "sim:Acme-One:4", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    more = {"cwd": tmp_path, "env": environ, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    runs = [subprocess.Popen(argv, **more) for _ in range(2)]
    outputs = [run.communicate(timeout=250)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    seen = [json.loads(path.read_text()) for path in tmp_path.glob("there-*")]
    assert len({device for device, _ in seen}) == len(seen) == 4
    assert all(device == mask for device, mask in seen)
