"""Pools on a Ray cluster of several machines: every device to one call at a time, every mask right, nodes that die."""

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.launcher.sandbox import find_obstacle
from anyaccel_export.ray import own_unit_instances
from mixed_calls import ONE, TWO, check_mixed_calls, report, variables
from ray_nodes import needs_ray, uses_ray
from waiting import until

MISSING = [name for name in ("amd", "nvidia", "tpu") if importlib.util.find_spec(f"anyaccel_{name}") is None]
pytestmark = [
    needs_ray,
    pytest.mark.skipif(bool(MISSING), reason=f"needs the plug-ins anyaccel-{{{','.join(MISSING)}}}"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray's own
]

WAIT = 90
CARDS = (Path(__file__).parents[3] / "tests" / "vendors" / "cards.py").read_text()
TASKS = int(os.environ.get("ANYACCEL_TEST_RAY_TASKS", "120"))
"""Calls of the large test; a thousand take a minute or two on two processors."""


@pytest.fixture(scope="module")
def nodes(ray_nodes):
    """Two more nodes, which this module may use as it likes."""
    added = [ray_nodes.add(ONE, cpus=1), ray_nodes.add(TWO, cpus=1)]
    yield ray_nodes
    for node in added:
        ray_nodes.kill(node)


@pytest.fixture
def pool(ray_nodes, new_pool):
    """Make pools on the cluster."""
    return partial(new_pool, engine="ray", address=ray_nodes.address)


def test_calls_of_every_kind_at_once(nodes, pool):
    check_mixed_calls(pool(max_workers=12), TASKS, WAIT)


def test_types_lead_to_the_nodes_that_have_them(nodes, pool):
    every = pool()
    for needs, types in {
        "H100:1": {"H100"},
        "MI300X:1": {"AMD-Instinct-MI300X-OAM"},
        "A100|MI300X:1": {"AMD-Instinct-MI300X-OAM"},
        "amd:1": {"AMD-Instinct-MI300X-OAM"},
        "tpu-v4-podslice:1": {"TPU-V4"},
        "GPU:1,mem=100G": {"AMD-Instinct-MI300X-OAM"},
    }.items():
        allocations = [future.allocation for future in map_all(every.options(needs=needs), 4)]
        assert {device.type for allocation in allocations for device in allocation.devices} == types, needs


def map_all(pool, number):
    futures = [pool.submit(time.sleep, 0.01) for _ in range(number)]
    for future in futures:
        future.result(WAIT)
    return futures


def test_devices_of_one_machine_are_no_matter_for_a_cluster(nodes, pool):
    for needs in ("H100/0", "H100/0-3:1"):
        with pytest.raises(aa.NeverFitsError, match="Ray cannot be asked for NAME/INDEX, which is of one machine"):
            pool(needs)


def test_what_no_node_can_ever_serve_is_refused_with_what_they_have(nodes, pool):
    with pytest.raises(aa.NeverFitsError, match=r"A100:1: node .*it has 4 H100") as caught:
        pool("A100:1")
    assert "TPU-V4" in str(caught.value), "what each node has"
    with pytest.raises(aa.NeverFitsError, match=r"\(got 3\)"):
        pool("TPU:3")
    with pytest.raises(aa.NeverFitsError):
        pool("H100:1 TPU:1")  # each is there, on different nodes
    assert pool("H100:5,else=cpu").submit(report, {"CUDA_VISIBLE_DEVICES"}).result(WAIT)[1] == []


def test_a_node_that_is_masked_itself_gives_its_devices_in_its_order(ray_nodes, pool):
    mask = ["7", "5", "3", "1", *map(str, range(15, 7, -1))]
    names = {"CUDA_VISIBLE_DEVICES"}
    node = ray_nodes.add("sim:L4:16", CUDA_VISIBLE_DEVICES=",".join(mask))
    try:
        one = pool(mask="index")
        assert one.options(needs="L4:12").submit(report, names).result(WAIT)[0] == {names.copy().pop(): ",".join(mask)}
        two = [one.options(needs="L4:2").submit(report, names, 0.2) for _ in range(2)]
        seen = [future.result(WAIT)[0]["CUDA_VISIBLE_DEVICES"] for future in two]
        assert {*seen} <= {"7,5", "3,1", "15,14"}
    finally:
        ray_nodes.kill(node)


def test_companions_of_one_call_do_not_reach_the_next(nodes, pool):
    names = variables(TWO)
    one = pool()
    assert one.options(needs="TPU:1").submit(report, names).result(WAIT)[0]["TPU_CHIPS_PER_HOST_BOUNDS"] == "1,1,1"
    for _ in range(4):
        seen, _, _ = one.submit(report, names).result(WAIT)
        assert not [name for name in seen if "BOUNDS" in name]


@pytest.mark.skipif(bool(find_obstacle()), reason=f"workers cannot be confined here: {find_obstacle()}")
def test_the_kernel_refuses_a_call_the_nodes_of_other_devices(ray_nodes, pool, install):
    """The devices' nodes are nodes of this machine: A is /dev/zero, B is /dev/full."""
    install("cards", CARDS)
    files = {"A": "/dev/zero", "B": "/dev/full"}
    node = ray_nodes.add("sim:A,B")
    try:
        for enforce, refused in ((True, 1), (False, 0)):
            one = pool("CARD:1", enforce=enforce)
            future = one.submit(lambda: (aa.current().devices[0].type, aa.current().confined, unopened(files)))
            own, confined, closed = future.result(WAIT)
            assert (confined, len(closed), own in closed) == (enforce, refused, False)
            assert future.allocation.confined == enforce
    finally:
        ray_nodes.kill(node)


def unopened(files):
    """Those that may not be opened."""
    found = []
    for name, path in files.items():
        try:
            os.close(os.open(path, os.O_RDONLY))
        except PermissionError:
            found.append(name)
    return found


def test_what_was_on_a_node_that_dies(ray_nodes, pool, tmp_path):
    nodes = [ray_nodes.add("sim:A10:4") for _ in range(2)]
    go_on = tmp_path / "go on"

    def run():
        until(go_on.exists, "the end of the test")
        return aa.current().devices[0].type

    def dead():
        try:
            actor.copy().result(WAIT)
        except aa.BrokenWorkerError as error:
            return str(error)
        return ""

    try:
        one = pool("A10:1")
        again = one.options(retries=2)
        actor = one.options(needs="A10:2").actor(list)
        calls = [each.submit(run) for each in (one, again) * 3]
        until(lambda: actor.ready.done() and all(future.running() for future in calls), "all")
        home = actor._group.begun[0].member.started.node
        where = {member.call: member.started.node for member in one._core.members if hasattr(member, "call")}
        here = [where[future._call] == home for future in calls]
        assert sum(here) == 2, "the other four are on the other node"
        ray_nodes.kill(next(node for node in nodes if node.node_id[:8] in home))
        nodes = [node for node in nodes if node.node_id[:8] not in home]
        assert "died" in until(dead, "the end of the actor")
        go_on.touch()
        for number, (future, lost) in enumerate(zip(calls, here, strict=True)):
            if lost and number % 2 == 0:
                with pytest.raises(aa.BrokenWorkerError, match=r"on the node [0-9.]+ \([0-9a-f]+\) ended .* died"):
                    future.result(WAIT)
            else:
                assert future.result(WAIT) == "A10"
        assert one.submit(run).result(WAIT) == "A10", "the rest goes on"
    finally:
        for node in nodes:
            ray_nodes.kill(node)


def test_leases_are_seen_by_others_on_the_node(nodes, pool, monkeypatch):
    future = pool("H100:1").submit(time.sleep, 30)
    until(future.running, "the call")
    monkeypatch.setenv("ANYACCEL_STATE_DIR", nodes.states[ONE])
    (lease,) = aa.leases(aa.detect(ONE))
    assert lease.device == future.allocation.devices[0].id
    assert "sleep (Ray job " in lease.note
    assert future.cancel()


def test_the_list_of_unit_instances_is_that_of_ray():
    from ray._private.accelerators import get_all_accelerator_resource_names

    assert {*own_unit_instances(), "GPU"} == {*get_all_accelerator_resource_names()}


KILLED = """
import os, signal, sys, time, anyaccel as aa
if __name__ == "__main__":
    pool = aa.Pool(engine="ray", address=sys.argv[1])
    future = pool.submit(time.sleep, 600)
    while not future.running():  # a notice says so
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def notices():
    import ray

    return ray.experimental.internal_kv._internal_kv_list(b"", namespace=b"anyaccel")


def test_notices_of_a_program_that_was_killed_are_removed_by_the_next_pool(ray_nodes, pool, tmp_path):
    one = pool()
    assert one.submit(abs, -1).result(WAIT) == 1, "this process is connected"
    path = tmp_path / "killed.py"
    path.write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(path), ray_nodes.address],
        env={**os.environ, "RAY_LOG_TO_DRIVER": "0"}, timeout=WAIT, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert notices(), "what it has left"

    def next_pool():
        with pool() as following:
            following.submit(abs, -1).result(WAIT)
        return not notices()

    until(next_pool, "Ray to know of the death, and the notices to be removed")


PROGRAM = """
import sys, time, anyaccel as aa, ray
def late(path):
    time.sleep(0.5)
    open(path, "w").write("done")
class Sleeper:
    def sleep(self, seconds):
        time.sleep(seconds)
if __name__ == "__main__":
    pool = aa.Pool(engine="ray", address=sys.argv[1], grace=0.5)
    pool.submit(abs, 1).result(60)
    if sys.argv[3] == "leave":
        actor = pool.actor(Sleeper)
        sleeps = actor.sleep(60)
        actor.ready.result(60)
    future = pool.submit(late, sys.argv[2])
    if sys.argv[3] == "leave":
        ray.shutdown()
        print(type(future.exception(60)).__name__, type(sleeps.exception(60)).__name__)
        print(pool.submit(abs, 1).exception(60), ray.is_initialized())
        pool.shutdown()
"""


LEFT = "BrokenWorkerError BrokenWorkerError\nthis process has left the Ray cluster of the pool False"


@pytest.mark.parametrize(("how", "said"), [("exit", ""), ("leave", LEFT)])
def test_a_program_that_ends_or_leaves_the_cluster_with_a_call_on_its_way(ray_nodes, tmp_path, how, said):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(path), ray_nodes.address, str(tmp_path / "late"), how],
        env={**os.environ, "RAY_LOG_TO_DRIVER": "0"},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(said)
    assert (tmp_path / "late").exists() or how == "leave"


@uses_ray
def test_the_example_starts_a_cluster_of_its_own():
    path = Path(__file__).parents[3] / "examples" / "ray_pool.py"
    promised = ast.get_docstring(ast.parse(path.read_text())).partition("Prints:\n")[2].strip()
    program = [sys.executable, str(path)]
    environ = {**os.environ, "RAY_ADDRESS": "local"}
    del environ["ANYACCEL_MACHINE"]  # it names its own
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == promised
