"""Programs of ``examples/`` that need other packages: started as their first lines say, on a simulated machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from example_programs import EXAMPLES

MACHINE = "sim:H100:2"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start Python programs that find the examples as modules; those that still run in the end are ended."""
    pytest.importorskip("anyaccel_nvidia", reason="needs the plug-in nvidia, for a machine to simulate")
    monkeypatch.setenv("ANYACCEL_MACHINE", MACHINE)
    path = [str(EXAMPLES), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    running = []

    def start(*arguments, **more):
        log = (tmp_path / f"log-{len(running)}").open("w")
        options = {"cwd": tmp_path, "env": environ | more, "stdout": log, "stderr": subprocess.STDOUT}
        running.append(subprocess.Popen([sys.executable, *arguments], **options))
        log.close()
        running[-1].log = Path(log.name)
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
