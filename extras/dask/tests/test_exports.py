import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from dask_nodes import needs_dask

pytestmark = [needs_dask, pytest.mark.timeout(360)]

CLIENT = """
import json, os, sys
from distributed import Client, wait

def held(number):
    import anyaccel, time
    start = time.monotonic()
    time.sleep(0.3)
    given = [device.id for device in anyaccel.current().devices]
    return os.environ["ACME_VISIBLE"], given, os.getpid(), start, time.monotonic()

with Client(sys.argv[1]) as client:
    client.wait_for_workers(2, timeout=200)
    tasks = client.map(held, range(6), resources={"APU": 1}, pure=False)
    tasks += client.map(held, range(2), resources={"Acme-One": 1}, pure=False)
    known = {worker["name"]: worker["resources"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()}
    print(json.dumps([known, client.gather(tasks)]))
"""


@pytest.fixture
def scheduler(tmp_path):
    """A scheduler of Dask on a free port."""
    known = tmp_path / "scheduler.json"
    options = ["--host=127.0.0.1", "--port=0", "--no-dashboard", "--no-show", f"--scheduler-file={known}"]
    with (tmp_path / "scheduler.log").open("w") as log:
        process = subprocess.Popen(["dask", "scheduler", *options], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while not known.exists() or not known.read_text().endswith("}"):
            assert process.poll() is None, (tmp_path / "scheduler.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield json.loads(known.read_text())["address"]
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def workers(script, address, log):
    """The exported script, running; its process ends with SIGTERM and takes the workers along."""
    with log.open("w") as output:
        options = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen(["sh", str(script), address, "--no-dashboard"], cwd=log.parent, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def test_a_worker_per_device_runs_one_task_at_a_time(acme, anyaccel, scheduler, tmp_path):
    script = tmp_path / "workers.sh"
    done = anyaccel("export", "dask", "--machine", "sim:A1:2", "--node", "n1", "--out", str(script))
    assert (done.returncode, done.stdout) == (0, "")
    with workers(script, scheduler, tmp_path / "workers.log") as process:
        asked = subprocess.run(
            [sys.executable, "-c", CLIENT, scheduler], capture_output=True, text=True, timeout=240, check=False
        )
        assert asked.returncode == 0, asked.stderr + (tmp_path / "workers.log").read_text()
        known, results = json.loads(asked.stdout)
        assert known == {f"n1-acme-{index}": {"APU": 1.0, "Acme-One": 1.0} for index in range(2)}
        assert len(results) == 8
        by_device = {}
        for mask, given, pid, start, end in results:
            assert given == [mask]
            by_device.setdefault(mask, []).append((start, end, pid))
        assert len(by_device) == 2
        for held in by_device.values():
            assert len({pid for _, _, pid in held}) == 1
            ordered = sorted(held)
            assert all(before[1] <= after[0] for before, after in pairwise(ordered))

        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        gone, alive = psutil.wait_procs(children, timeout=60)
        assert (len(gone), alive) == (len(children), [])


def test_without_an_address_the_script_says_what_it_wants(acme, anyaccel, tmp_path):
    script = tmp_path / "workers.sh"
    anyaccel("export", "dask", "--machine", "sim:A1:2", "--node", "n1", "--out", str(script))
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the address of the Dask scheduler" in done.stderr
    assert Path(script).stat().st_mode & 0o777 == 0o644
