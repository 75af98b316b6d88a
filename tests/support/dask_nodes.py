"""A real Dask cluster on loopback: a scheduler, and workers of which each is a simulated machine, all processes."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECONDS = 120
"""For whatever takes a second or two, unless the machine has other things to do."""
needs_dask = pytest.mark.skipif(
    importlib.util.find_spec("distributed") is None,
    reason="needs Dask, which is not installed here (try: pip install distributed)",
)


class DaskNodes:
    """The cluster.

    Args:
        directory: For logs, and for the state of each machine.
        path: Where its processes find further modules.
    """

    def __init__(self, directory: Path, path: str = "") -> None:
        self.states: dict[str, Path] = {}
        self._directory = directory
        self._environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("ANYACCEL_")},
            "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH")))),
            "DASK_TEMPORARY_DIRECTORY": str(directory),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        known = directory / "scheduler.json"
        options = ("--host=127.0.0.1", "--port=0", "--no-dashboard", "--no-show", f"--scheduler-file={known}")
        scheduler = self._start("scheduler", *options)
        self._until(scheduler, "scheduler", lambda: known.exists() and known.read_text().endswith("}"))
        self.address = str(json.loads(known.read_text())["address"])

    def add(self, machine: str, *options: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start a worker that has the devices of a machine, and wait until it is there."""
        name = f"w{len(self.states)}"
        state = self._directory / f"{name}.state"  # each stands for a machine of its own
        state.mkdir(mode=0o700)
        self.states[name] = state
        own = {"ANYACCEL_MACHINE": machine, "ANYACCEL_STATE_DIR": str(state), **environ}
        command = ("worker", self.address, "--no-dashboard", "--no-nanny", "--nthreads=4", f"--name={name}", *options)
        worker = self._start(name, *command, **own)
        self._until(worker, name, lambda: "Registered to" in (self._directory / f"{name}.log").read_text())
        return worker

    def kill(self, worker: "subprocess.Popen[bytes]") -> None:
        """Let a worker die."""
        worker.kill()
        worker.wait(SECONDS)

    def end(self) -> None:
        """End all processes, the workers first: one that hears of its scheduler's end while it ends hangs in Dask."""
        scheduler, *workers = self._processes
        for some in (workers, [scheduler]):
            for process in some:
                process.terminate()
            for process in some:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(SECONDS)

    def _start(self, name: str, *arguments: str, **environ: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "dask", *(arguments if name != "scheduler" else ("scheduler", *arguments))]
        with (self._directory / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command, env=self._environ | environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    def _until(self, process, name, there) -> None:
        until = time.monotonic() + SECONDS
        while not there():
            log = (self._directory / f"{name}.log").read_text()
            assert process.poll() is None, log
            assert time.monotonic() < until, log
            time.sleep(0.02)
