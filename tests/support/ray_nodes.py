"""Real nodes of Ray on loopback, that leave nothing behind and end no other ones."""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

MARK = "STARTED_BY_A_TEST"
SECONDS = 200
"""For whatever takes some seconds, unless the machine has other things to do."""
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray, which is not installed here (try: pip install ray)"
)


def uses_ray(test):
    """Mark a test that starts a cluster of its own: it needs Ray, and time, and best no other such test beside it."""
    return needs_ray(pytest.mark.xdist_group("own ray")(pytest.mark.timeout(450)(test)))


OWNERS = (
    *("ASCEND_", "CUDA_", "FURIOSA_", "HABANA_", "HIP_", "MACA_", "NEURON_", "ONEAPI_", "QBRUNTIME_", "RAY_", "RBLN_"),
    *("ROCR_", "TPU_", "TT_", "ZE_"),
)
"""How variables of Ray and of its families begin."""


def forget_masks(monkeypatch):
    """Leave the test without masks and settings of the user who tests."""
    for name in [name for name in os.environ if name.startswith(OWNERS)]:
        monkeypatch.delenv(name)


NODE_OPTIONS = (
    "--block",
    "--disable-usage-stats",
    "--node-ip-address=127.0.0.1",
    "--object-store-memory=80000000",
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
)
"""What keeps several nodes on one machine from meeting."""


def environment(**changes):
    """The environment of a node and its drivers: Ray beside this interpreter, and no settings of the user who tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ANYACCEL_MACHINE"))}
    # Without the mode, a token in the home directory decides, and decides differently for nodes and for drivers.
    return {**kept, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **changes}


def head_options(port, files):
    options = ("--head", f"--port={port}", f"--temp-dir={files}", "--include-dashboard=false")
    if importlib.util.find_spec("grpc") is None:  # without it, Ray has no client server, and takes no port for it
        return options
    return (*options, f"--ray-client-server-port={free_port()}")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def short_directory():
    """A directory for Ray's sockets, whose paths must be short."""
    path = tempfile.mkdtemp(prefix="r", dir="/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def started(command, environ, log):
    """Run a command in the background; at the end, end whatever it started, and nothing else."""
    mark = uuid.uuid4().hex
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, env={**environ, MARK: mark}, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    try:
        yield process
    finally:
        end(mark)
        process.wait(30)


def end(mark):
    """End all processes that carry a mark, those that have left their parents too."""
    for _ in range(20):
        ours = [each for each in psutil.process_iter() if carries(each, mark)]
        if not ours:
            return
        for each in ours:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(ours, timeout=5)
    raise AssertionError(f"these do not end: {ours}")


def carries(process, mark):
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    return False


def listening(process):
    """Addresses at which the processes of a started node listen."""
    mark = psutil.Process(process.pid).environ()[MARK]
    found = set()
    for each in psutil.process_iter():
        if carries(each, mark):
            with contextlib.suppress(psutil.Error):
                found |= {here.laddr.ip for here in each.net_connections("tcp") if here.status == psutil.CONN_LISTEN}
    return found


@contextlib.contextmanager
def started_node(command, environ, log):
    """Start a node, once more where Ray gave up: it waits for its own processes for 30 seconds and no longer."""
    for last in (False, False, True):
        with started([*command, *NODE_OPTIONS], environ, log) as process:
            if wait_for(process, log) or last:
                assert process.poll() is None, Path(log).read_text()
                yield process
                return


def wait_for(process, log):
    """Wait until a node runs, or has ended; whether it runs."""
    until = time.monotonic() + SECONDS
    while "Ray runtime started" not in Path(log).read_text():
        if process.poll() is not None:
            return False
        assert time.monotonic() < until, Path(log).read_text()
        time.sleep(0.05)
    return True


def run_program(program, arguments=(), *, environ, log, needs=None, seconds=SECONDS):
    """Run a Python program to its end, or to that of the node that it needs; its output."""
    until = time.monotonic() + seconds
    with started([sys.executable, "-c", program, *arguments], environ, log) as process:
        while process.poll() is None and time.monotonic() < until and (needs is None or needs.poll() is None):
            time.sleep(0.02)
        status = process.poll()
        text = Path(log).read_text()
        assert status == 0, f"{'it did not end' if status is None else status}: {text}"
    return text
