"""What Ray itself makes of the exports; only where Ray is installed, since the tests do not bring it along."""

import json
import shlex
import sys
from pathlib import Path

import yaml
from anyaccel_export.ray import command, node_type

sys.path.append(str(Path(__file__).parents[3] / "tests" / "exports"))

from export_machines import device, source
from ray_nodes import (
    environment,
    free_port,
    head_options,
    needs_ray,
    run_program,
    short_directory,
    started_node,
    uses_ray,
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
print(json.dumps([node["Resources"], node["Labels"], ray.get([held.remote(both) for _ in "12"], timeout=150)]))
"""


@uses_ray
def test_a_node_has_the_resources_device_by_device(tmp_path):
    port, log = free_port(), tmp_path / "node"
    with short_directory() as files:
        start = [
            *shlex.split(command(source(*DEVICES)).text),
            *head_options(port, files),
            "--num-cpus=2",
        ]
        with started_node(start, environment(), log) as node:
            address = f"127.0.0.1:{port}"
            printed = run_program(PROGRAM, [address], environ=environment(), log=tmp_path / "driver", needs=node)
    resources, labels, held = json.loads(printed.splitlines()[-1])
    found = {name: resources[name] for name in ("GPU", "WPU", "accelerator_type:NPU-9")}
    assert found == {"GPU": 1, "WPU": 2, "accelerator_type:NPU-9": 1}
    assert (labels["anyaccel/GPU"], labels["anyaccel/WPU"]) == ("H100", "NPU-9")
    assert len({*held}) == 2, "each task has a device of its own"


@needs_ray
def test_the_cluster_launcher_takes_the_node_type():
    from ray.autoscaler._private.util import prepare_config, validate_config

    fragment = yaml.safe_load(node_type(source(*DEVICES)).text)
    provider = {"type": "aws", "region": "us-west-2"}
    cluster = {"cluster_name": "c", "max_workers": 1, "provider": provider, "auth": {"ssh_user": "u"}}
    validate_config(prepare_config({**cluster, "head_node_type": "node-1", **fragment}))
