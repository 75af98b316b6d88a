"""What Ray itself makes of the exports; for whoever has Ray installed, since the tests do not bring it along."""

import contextlib
import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from anyaccel.exports.ray import command, node_type
from export_machines import device, source

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray, which is not installed here (try: pip install ray)"
)

DEVICES = (
    device(0, tags=("H100",)),
    device(1, tags=("NPU-9",), resource="WPU"),
    device(2, tags=("NPU-9",), resource="WPU"),
)
PROGRAM = """
import json, ray, sys
ray.init(address=sys.argv[1], logging_level="ERROR")

@ray.remote
class Both:
    def __init__(self):
        self.here = 0
    def meet(self):
        self.here += 1
    def met(self):
        return self.here == 2

@ray.remote(resources={"WPU": 1})
def held(both):
    import time
    ray.get(both.meet.remote())
    while not ray.get(both.met.remote()):  # so that both tasks hold theirs at once
        time.sleep(0.05)
    return repr(ray._private.worker.global_worker.core_worker.resource_ids()["WPU"])

node, both = ray.nodes()[0], Both.options(num_cpus=0).remote()
print(json.dumps([node["Resources"], node["Labels"], ray.get([held.remote(both) for _ in "12"], timeout=60)]))
"""


@pytest.fixture
def ray_node(tmp_path):
    """Start a node as the export says, and end what was started and nothing else; its address."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    options = ["--head", "--block", "--num-cpus=2", f"--port={port}", "--include-dashboard=false"]
    start = [*shlex.split(command(source(*DEVICES)).text), *options, "--disable-usage-stats"]
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(start, env=environ, stdout=output, stderr=output)
    try:
        until = time.monotonic() + 90
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        started = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
        process.wait(60)
        for each in psutil.wait_procs(started[1:], timeout=30)[1]:
            each.kill()


def test_a_node_has_the_resources_device_by_device(ray_node):
    program = [sys.executable, "-c", PROGRAM, ray_node]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    resources, labels, held = json.loads(done.stdout.splitlines()[-1])
    found = {name: resources[name] for name in ("GPU", "WPU", "accelerator_type:NPU-9")}
    assert found == {"GPU": 1, "WPU": 2, "accelerator_type:NPU-9": 1}
    assert labels["anyaccel/NPU-9"] == "2"
    assert len({*held}) == 2, "each task has a device of its own"


def test_the_cluster_launcher_takes_the_node_type():
    from ray.autoscaler._private.util import prepare_config, validate_config

    fragment = yaml.safe_load(node_type(source(*DEVICES)).text)
    provider = {"type": "aws", "region": "us-west-2"}
    cluster = {"cluster_name": "c", "max_workers": 1, "provider": provider, "auth": {"ssh_user": "u"}}
    validate_config(prepare_config({**cluster, "head_node_type": "node-1", **fragment}))
