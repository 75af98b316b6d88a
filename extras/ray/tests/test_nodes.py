"""``anyaccel ray start``: what Ray is told about a machine, and what its own tasks make of it."""

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

import anyaccel as package
import pytest
from anyaccel_export.ray import describe
from anyaccel_ray.snapshot import read_snapshot
from anyaccel_ray.start import narrowed
from ray_nodes import (
    environment,
    free_port,
    head_options,
    listening,
    run_program,
    short_directory,
    started_node,
    uses_ray,
)

UNITS = "RAY_custom_unit_instance_resources=neuron_cores,TPU,NPU,HPU,RBLN,FURIOSA,TTNPU,MBLT,APU"


def dry_run(anyaccel, *arguments, **options):
    """What would be run: variables, and the words behind ``ray start``."""
    options["env"] = {
        "RAY_AUTH_MODE": "disabled",
        **options.get("env", {}),
    }  # the user who tests may have a token of Ray's
    done = anyaccel("ray", "start", "--dry-run", *arguments, **options)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    at = words.index("ray")
    assert words[at : at + 2] == ["ray", "start"]
    return words[1:at], words[at + 2 :], done.stderr


def refused(anyaccel, *arguments, **options):
    done = anyaccel("ray", "start", *arguments, **options)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def test_the_dry_run_prints_what_the_export_prints(acme, anyaccel):
    machine = ("--machine", "sim:A1:4")
    printed = anyaccel("ray", "start", "--print", *machine, env={"RAY_AUTH_MODE": "disabled"}).stdout
    assert printed == anyaccel("export", "ray", *machine).stdout


def test_what_the_user_says_stands_behind_it(acme, anyaccel):
    variables, words, _ = dry_run(anyaccel, "--head", "--port", "7000", "--machine", "sim:A1:4", "--block", "-v")
    assert variables == [UNITS]
    labels = "--labels=anyaccel/APU=Acme-One,anyaccel/APU.mem=16GiB,ray.io/accelerator-type=Acme-One"
    resources = '--resources={"APU":4,"accelerator_type:Acme-One":1}'
    assert words == ["--num-gpus=0", resources, labels, "--head", "--port", "7000", "--block", "-v"]


def test_what_the_user_says_wins(acme, anyaccel):
    own = ("--resources", '{"APU": 2, "fast": 1.5}', "--labels", "anyaccel/APU=mine, zone=a")
    _, words, _ = dry_run(anyaccel, "--machine", "sim:A1:4", *own)
    assert words == [
        "--num-gpus=0",
        '--resources={"APU":2,"accelerator_type:Acme-One":1,"fast":1.5}',
        "--labels=anyaccel/APU=mine,anyaccel/APU.mem=16GiB,anyaccel/APU.numa=0,ray.io/accelerator-type=Acme-One,zone=a",
    ]


def test_a_type_of_which_nothing_is_left_is_not_told(acme, anyaccel):
    machine = ("--machine", "sim:A1:2,Acme-Whole:2")
    assert "accelerator_type:Acme-Whole" in dry_run(anyaccel, *machine)[1][1]
    _, words, _ = dry_run(anyaccel, *machine, "--resources", '{"APU": 2}')
    assert words[1] == '--resources={"APU":2,"accelerator_type:Acme-One":1}'


def test_as_json(acme, anyaccel):
    command = ("ray", "start", "--dry-run", "--json", "--machine", "sim:A1:1", "--head")
    done = anyaccel(*command, env={"RAY_AUTH_MODE": "disabled"})
    document = json.loads(done.stdout)
    assert (document["schema"], document["command"][:2], document["command"][-1]) == (
        "anyaccel.ray/1",
        ["ray", "start"],
        "--head",
    )
    assert [f"{name}={value}" for name, value in document["variables"].items()] == [UNITS]


def test_declared_devices_are_counted(acme, anyaccel):
    _, words, _ = dry_run(anyaccel, "--declare", "GPU=3", "--num-gpus", "2")
    assert words[0] == "--num-gpus=2"


def test_what_is_hidden_is_not_told(acme, anyaccel, record):
    _, words, _ = dry_run(anyaccel, "--machine", record({}, {}, {}, {}), env={"ACME_VISIBLE": "3,1"})
    assert words[1].startswith('--resources={"APU":2,')


def test_inside_a_lease_the_node_has_what_it_holds(acme, anyaccel):
    inner = (sys.executable, "-m", "anyaccel", "ray", "start", "--dry-run")
    done = anyaccel("run", "APU:1", "--machine", "sim:A1:4", "--", *inner)
    assert '{"APU":1,' in done.stdout, done.stderr


def test_broken_devices_are_hidden_from_tasks_that_know_nothing_of_us(acme, anyaccel, record):
    machine = record({}, {"health": "unhealthy", "reason": "it is lost."}, {})
    variables, words, _ = dry_run(anyaccel, "--machine", machine)
    assert "ACME_VISIBLE=0,2" in variables
    assert words[1].startswith('--resources={"APU":2,')


def test_a_vendor_that_fails_costs_its_devices_and_is_named(install, anyaccel):
    install("acme", "import os\nos._exit(3)\n")
    _, words, said = dry_run(anyaccel, "--declare", "GPU=1")
    assert words[0] == "--num-gpus=1"
    assert "the node gets no device of acme" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--resources", '{"APU": 5}'), "this node cannot have 5 APU: it has 4 that may be given out (see 'anyaccel')"),
        (("--num-gpus=1",), "this node cannot have 1 GPU: it has 0"),
        (("--resources", '{"APU": 0.5}'), "the quantity of APU must be a whole number (got 0.5)"),
        (("--resources", "APU=4"), "argument --resources: must be JSON such as"),
        (("--resources", "[]"), "must be a JSON object of quantities"),
        (("--resources", '{"APU": -1}'), "must be a JSON object of quantities"),
        (("--resources", '{"APU": NaN}'), "must be a JSON object of quantities"),
        (("--resources", '{"GPU": 1}'), "cannot hold GPU, which has an option of its own: --num-gpus"),
        (("--num-gpus", "two"), "argument --num-gpus: must be a whole number from 0 to 65536 (got 'two')"),
        (("--labels", "zone"), "argument --labels: must be KEY=VALUE, separated by commas"),
        (("--json",), "--json prints the command as JSON and starts nothing: add --dry-run"),
        (("--", "true"), "a command after '--' belongs to 'anyaccel run'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused(arguments, reason, acme, anyaccel):
    assert reason in refused(anyaccel, "--machine", "sim:A1:4", *arguments, here=True)


def test_without_ray_it_says_which_extra_brings_it(acme, anyaccel, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    path = f"{hidden}{os.pathsep}{os.environ['PYTHONPATH']}"
    said = refused(anyaccel, "--head", "--machine", "sim:A1:4", env={"PYTHONPATH": path})
    assert said.splitlines()[-2:] == [
        "anyaccel: Ray is not installed beside anyaccel",
        "anyaccel: pip install 'anyaccel[ray]'",
    ]
    assert list(Path(os.environ["ANYACCEL_STATE_DIR"]).glob("ray-*")) == []


def test_slots_are_the_first_devices_of_a_resource(acme, record):
    inventory = package.detect(record({}, {"health": "unhealthy", "reason": "it is lost."}, {}, {}))
    left = narrowed(inventory, {"APU": 2, "fast": 3})
    assert [device.index for device in left.devices if device.usable] == [0, 2]
    assert describe(left, resources={"fast": 3}).resources == {"APU": 2, "accelerator_type:Acme-One": 1, "fast": 3}


PROGRAM = """
import anyaccel, json, os, ray, sys
from anyaccel_ray.cluster import grows
ray.init(address=sys.argv[1], logging_level="ERROR")

@ray.remote(resources={"APU": 1}, label_selector={"anyaccel/APU": "Acme-One"})
def see():
    slots = ray._private.worker.global_worker.core_worker.resource_ids()["APU"]
    return slots, os.environ["ANYACCEL_RAY_NODE"], os.environ["ANYACCEL_MACHINE"]

def held():
    return len(anyaccel.current().devices)

with anyaccel.Pool("APU:2", engine="ray", address=sys.argv[1]) as pool:
    devices = pool.submit(held).result(150)
node = ray.nodes()[0]
print(json.dumps([node["Resources"], node["Labels"], ray.get(see.remote(), timeout=150), grows(ray), devices]))
"""


@uses_ray
def test_a_node_has_what_was_found_and_listens_on_loopback_alone_where_it_shall(acme, record, tmp_path):
    """The variable for that is on the page on many machines, which says that a pool needs it too."""
    machine = record({}, {}, {})
    port, log = free_port(), tmp_path / "node"
    environ = environment(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    with short_directory() as files:
        start = [sys.executable, "-m", "anyaccel", "ray", "start", "--machine", machine, *head_options(port, files)]
        with started_node([*start, "--num-cpus", "2"], environ, log) as node:
            assert Path(f"/proc/{node.pid}/cmdline").read_bytes().split(b"\0")[2:3] == [b"start"], "it has become Ray"
            printed = run_program(PROGRAM, [f"127.0.0.1:{port}"], environ=environ, log=tmp_path / "driver", needs=node)
            addresses = listening(node)
    resources, labels, (slots, snapshot, seen), growing, devices = json.loads(printed.splitlines()[-1])
    assert (resources["APU"], resources["CPU"], labels["anyaccel/APU"]) == (3, 2, "Acme-One")
    assert [share for _, share in slots] == [1.0]
    assert seen == machine
    assert not growing, "no autoscaler can add nodes"
    assert [device.index for device in read_snapshot(snapshot).devices] == [0, 1, 2]
    assert devices == 2
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


SLICE = """
import anyaccel, json, os, ray, sys
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import slice_placement_group
ray.init(address=sys.argv[1], logging_level="ERROR")

@ray.remote(num_cpus=0)
def see():
    return os.environ["TPU_WORKER_ID"]

found = slice_placement_group(topology="2x2x2", accelerator_version="v7x")
ray.get(found.placement_group.ready(), timeout=150)
strategies = [PlacementGroupSchedulingStrategy(found.placement_group, index) for index in range(found.num_bundles)]
calls = [see.options(resources={"TPU": found.chips_per_host}, scheduling_strategy=each).remote() for each in strategies]
by_ray = ray.get(calls, timeout=150)
found.shutdown()

def place():
    names = "RANK", "WORLD_SIZE", "TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "MASTER_ADDR"
    return [os.environ[name] for name in names], len(anyaccel.current().devices), os.environ.get("TPU_VISIBLE_CHIPS")

with anyaccel.Pool("TPU:4", engine="ray", address=sys.argv[1]) as pool:
    gang = pool.gang(2, place).result(150)
    refused = []
    for hosts in (1, 3):
        try:
            pool.gang(hosts, place)
        except anyaccel.NeverFitsError as error:
            refused.append(str(error))
print(json.dumps([by_ray, gang, refused]))
"""


@uses_ray
def test_ray_reserves_a_slice_and_starts_one_task_on_each_of_its_hosts(tmp_path):
    """Two hosts of a slice, of which only the second was recorded; the first is told apart by its number."""
    pytest.importorskip("anyaccel_tpu", reason="needs the plug-in anyaccel-tpu")
    recorded = Path(__file__).parents[3] / "plugins" / "tpu" / "recordings" / "tpu7x-16-gke-worker-1" / "machine.json"
    facts = json.loads(recorded.read_text())
    port = free_port()
    with short_directory() as files, contextlib.ExitStack() as nodes:
        for worker in range(2):
            own = {"TPU_NAME": "slice-7", "TPU_WORKER_ID": str(worker), "TPU_WORKER_HOSTNAMES": "slice-7-0,slice-7-1"}
            facts["environ"] |= own
            machine = tmp_path / f"host-{worker}"
            machine.mkdir()
            (machine / "machine.json").write_text(json.dumps(facts))
            where = (f"--address=127.0.0.1:{port}",) if worker else head_options(port, files)
            start = [sys.executable, "-m", "anyaccel", "ray", "start", f"--machine={machine}", "--num-cpus=1"]
            log = tmp_path / f"node-{worker}"
            environ = environment(**facts["environ"])  # which Ray looks at, too
            node = nodes.enter_context(started_node([*start, *where], environ, log))
        address = f"127.0.0.1:{port}"
        printed = run_program(SLICE, [address], environ=environment(), log=tmp_path / "driver", needs=node)
    by_ray, gang, refused = json.loads(printed.splitlines()[-1])
    assert sorted(by_ray) == ["0", "1"]
    assert [[*place[:4], *held] for place, *held in gang] == [
        ["0", "2", "0", "slice-7-0,slice-7-1", 4, None],
        ["1", "2", "1", "slice-7-0,slice-7-1", 4, None],
    ], "ranks are the numbers of the hosts, and whole hosts are not masked"
    assert refused == [
        f"a gang of {hosts} needs as many nodes that can serve TPU:4, and the cluster has 0 and 2 in slice slice-7;"
        " a slice is of use only as a whole"
        for hosts in (1, 3)
    ]
