"""A demand for a type that no node has reaches Ray's autoscaler, which starts a node of the type that our export wrote.

The nodes come from Ray's fake provider. Ray's ``AutoscalingCluster`` is not used: it ends every Ray on the machine, and
needs a file that is not in the wheel.
"""

import contextlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import yaml
from ray_nodes import (
    environment,
    free_port,
    head_options,
    run_program,
    short_directory,
    started_node,
    uses_ray,
)

HEAD = "f" * 51 + "00000"
"""The id under which the fake provider knows the head."""
HEAD_TYPE = "ray.head.default"

CONNECT = """
import json, os, ray, sys, time, anyaccel
from anyaccel_ray.cluster import grows

ray.init(address=sys.argv[1], logging_level="ERROR")
until = time.monotonic() + 150
while not grows(ray):  # it has not yet shown itself
    assert time.monotonic() < until
    time.sleep(0.1)
print("it grows")
"""
USE = """
def see():
    return os.environ["ACME_VISIBLE"].split(",")

with anyaccel.Pool("Acme-Whole:2", engine="ray") as pool:
    ours = pool.submit(see).result(150)

@ray.remote(num_cpus=0, accelerator_type="Acme-One")
def plain():
    return "ran"

@ray.remote(num_cpus=0, resources={"APU": 1}, label_selector={"anyaccel/APU": "in(Acme-Zero,Acme-One)"})
def labelled():
    return "ran"

theirs = ray.get([plain.remote(), labelled.remote()], timeout=150)
types = [node["Labels"]["anyaccel/APU"] for node in ray.nodes() if "APU" in node["Resources"]]
print(json.dumps([ours, theirs, sorted(types)]))
"""


def node_types(*products):
    """What ``anyaccel export ray-autoscaler`` writes for machines that do not exist yet."""
    found = {}
    for product in products:
        command = [sys.executable, "-m", "anyaccel", "export", "ray-autoscaler", "--node", product.lower()]
        text = subprocess.run(
            [*command, "--machine", f"sim:{product}:4"], check=True, capture_output=True, text=True, timeout=60
        ).stdout
        found |= yaml.safe_load(text)["available_node_types"]
    for entry in found.values():
        entry["resources"]["CPU"] = 1
    return found


def configuration(types, address):
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "gcs_address": address,
        "head_node_id": HEAD,
        "launch_multiple": True,
    }
    head = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 0}
    lists = "cluster_synced_files initialization_commands setup_commands head_setup_commands worker_setup_commands"
    lists += " head_start_ray_commands worker_start_ray_commands rsync_exclude rsync_filter"
    return {
        **{name: [] for name in lists.split()},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "upscaling_speed": 1.0,
        "cluster_name": "fake",
        "max_workers": 4,
        "idle_timeout_minutes": 10,
        "provider": provider,
        "auth": {"ssh_user": "nobody"},
        "head_node_type": HEAD_TYPE,
        "available_node_types": {**types, HEAD_TYPE: head},
    }


@contextlib.contextmanager
def growing_cluster(version, tmp_path):
    """The head of a cluster with an autoscaler; runs a program on it."""
    port, log, config = free_port(), tmp_path / "node", tmp_path / "cluster.json"
    address = f"127.0.0.1:{port}"
    config.write_text(json.dumps(configuration(node_types("Acme-One", "Acme-Whole"), address)))
    environ = environment(
        ANYACCEL_MACHINE="sim:Acme-Whole:4",  # on every node that the provider makes up
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        RAY_CLOUD_INSTANCE_ID=HEAD,
        RAY_FAKE_CLUSTER="1",
        RAY_custom_unit_instance_resources="APU",
        RAY_enable_autoscaler_v2=str(version - 1),
    )
    with short_directory() as files:
        options = (*head_options(port, files), "--num-cpus=1", f"--autoscaling-config={config}")
        own = {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD}
        with started_node([Path(sys.executable).parent / "ray", "start", *options], environ | own, log) as node:
            try:
                yield partial(run_program, arguments=(address,), environ=environ, log=tmp_path / "driver", needs=node)
            except AssertionError as error:
                error.add_note(log.read_text()[-6000:])
                error.add_note((Path(files) / "session_latest" / "logs" / "monitor.log").read_text()[-6000:])
                raise


@uses_ray
def test_the_node_that_is_asked_for_comes_up(acme, tmp_path):
    with growing_cluster(2, tmp_path) as run:
        [answer] = [line for line in run(CONNECT + USE).splitlines() if line.startswith("[[")]
    ours, theirs, types = json.loads(answer)
    assert len(ours) == 2, "the mask of our call"
    assert theirs == ["ran", "ran"]
    assert types == ["Acme-One", "Acme-Whole"], "one node of each type that was asked for"


@uses_ray
def test_the_older_autoscaler_shows_itself_too(acme, tmp_path):
    with growing_cluster(1, tmp_path) as run:  # it ends nodes of the fake provider, so that none is asked for
        assert run(CONNECT).endswith("it grows\n")
