"""Workers run on the processors of the NUMA node that is nearest to their devices."""

import json
import os
import subprocess
import sys

import anyaccel as aa
import cloudpickle
import pytest
from anyaccel.launcher.bind import divide_processors
from anyaccel.model import format_slots
from anyaccel.probe import processors

OURS = sorted(os.sched_getaffinity(0))
SHOW = (
    "import anyaccel, json, os;"
    "found = [sorted(os.sched_getaffinity(0)), list(anyaccel.current().processors)];"
    "os.write(1, json.dumps(found).encode() + b'\\n')"  # at once: ranks share a pipe
)
MACHINE = "sim:A1:2"  # one device of node 0, one of node 1
two_processors = pytest.mark.skipif(len(OURS) < 2, reason="one processor cannot be divided")


@pytest.fixture(autouse=True)
def functions_travel_by_value(request):
    cloudpickle.register_pickle_by_value(request.module)  # test modules cannot be imported by workers
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Give this host the NUMA nodes that a test wants; ``cores`` has processors that are threads of one core."""

    def nodes(lists, cores=()):
        for node, found in lists.items():
            folder = tmp_path / "system" / "node" / f"node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(",".join(map(str, found)) + "\n")
        for core in cores:
            for processor in core:
                topology = tmp_path / "system" / "cpu" / f"cpu{processor}" / "topology"
                topology.mkdir(parents=True)
                (topology / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
        monkeypatch.setattr(processors, "SYSTEM", str(tmp_path / "system"))

    return nodes


@pytest.fixture
def two_nodes(acme, nodes):
    """Half of our processors near each of the two devices, and one that is not ours."""
    half = len(OURS) // 2
    nodes({0: [*OURS[:half], 4095], 1: OURS[half:]})
    return OURS[:half], OURS[half:]


def where():
    return sorted(os.sched_getaffinity(0)), list(aa.current().processors)


@two_processors
def test_a_command_runs_near_its_device_and_knows(two_nodes):
    before = os.sched_getaffinity(0)
    for device, near in enumerate(two_nodes):
        done = aa.run(
            f"acme/{device}", [sys.executable, "-c", SHOW], machine=MACHINE, bind=True, capture_output=True, check=True
        )
        assert json.loads(done.stdout) == [near, near], "and none that was never ours"
    assert os.sched_getaffinity(0) == before


@two_processors
def test_a_command_that_holds_may_start_near(two_nodes):
    with aa.acquire("acme/1", machine=MACHINE, bind=True) as hold:
        process = hold.popen([sys.executable, "-c", SHOW], stdout=subprocess.PIPE)
        assert json.loads(process.communicate(timeout=60)[0]) == [two_nodes[1]] * 2
    assert sorted(os.sched_getaffinity(0)) == OURS


@two_processors
def test_workers_of_a_pool_run_near_their_devices(two_nodes):
    with aa.Pool("A1:1", machine=MACHINE, bind=True) as pool:
        found = sorted(pool.options(needs=f"acme/{device}").submit(where).result(60) for device in (0, 1))
    assert found == sorted((near, near) for near in two_nodes)


@two_processors
def test_who_is_confined_is_bound_as_well(two_nodes):
    done = aa.run(
        "acme/1", [sys.executable, "-c", SHOW], machine=MACHINE, bind=True, enforce="try", capture_output=True
    )
    assert json.loads(done.stdout) == [two_nodes[1]] * 2


@pytest.mark.parametrize(
    ("request_", "bind"), [("A1:1", None), ("A1:1", False), ("A1:0.5", None)], ids=["simulated", "off", "share"]
)
def test_others_run_where_their_launcher_may(two_nodes, request_, bind):
    done = aa.run(request_, [sys.executable, "-c", SHOW], machine=MACHINE, bind=bind, capture_output=True, check=True)
    assert json.loads(done.stdout) == [OURS, []]


HOST = """
from anyaccel.plugin import *
@hookimpl
def anyaccel_info():
    return PluginInfo(vendor="near", resource="NPU", kind="npu", env_vars=("NEAR",))
@hookimpl
def anyaccel_detect(ctx):
    return Detected(devices=tuple(Device(id=f"near-{n}", index=n, model="N", numa_node=node)
        for n, node in enumerate((0, 1, None))))
@hookimpl
def anyaccel_fractional(device): return Fractional.SHARED
@hookimpl
def anyaccel_tags(device): return ("N1",)
@hookimpl
def anyaccel_env(devices, ctx): return EnvEdits(set={"NEAR": ",".join(d.id for d in devices)})
"""


@two_processors
def test_whole_devices_of_this_host_are_near_without_a_wish(install, nodes):
    install("near", HOST)
    half = len(OURS) // 2
    nodes({0: OURS[:half], 1: OURS[half:]})
    seen = {}
    for request in ("near/0", "near/1", "near/0-1", "near/1:0.5", "near/2"):
        done = aa.run(request, [sys.executable, "-c", SHOW], capture_output=True, check=True)
        seen[request] = json.loads(done.stdout)
    assert seen == {
        "near/0": [OURS[:half]] * 2,
        "near/1": [OURS[half:]] * 2,
        "near/0-1": [OURS] * 2,
        "near/1:0.5": [OURS, []],  # its other holder needs them, too
        "near/2": [OURS, []],  # its node is unknown
    }


def test_a_node_without_a_processor_of_ours_binds_no_process(acme, nodes):
    nodes({0: [4095], 1: [4094]})
    done = aa.run("A1:1", [sys.executable, "-c", SHOW], machine=MACHINE, bind=True, capture_output=True, check=True)
    assert json.loads(done.stdout) == [OURS, []]


CLI = "import sys; from anyaccel.probe import processors; processors.SYSTEM = sys.argv.pop(1); \
from anyaccel.cli import main; sys.exit(main())"


def command(*arguments):
    program = [sys.executable, "-c", CLI, processors.SYSTEM]
    return subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=60, check=False)


@two_processors
def test_the_command_line_binds(two_nodes):
    done = command("run", "acme/1", "-v", "--bind", "--machine", MACHINE, "--", sys.executable, "-c", SHOW)
    assert json.loads(done.stdout) == [two_nodes[1]] * 2
    assert f"runs on the processors {format_slots(two_nodes[1])}, nearest" in done.stderr
    done = command("run", "acme/1", "--no-bind", "--machine", MACHINE, "--", sys.executable, "-c", SHOW)
    assert json.loads(done.stdout) == [OURS, []]


def test_a_wish_that_cannot_be_had_is_answered(acme, nodes):
    nodes({})
    done = command("run", "A1:1", "--bind", "--machine", MACHINE, "--", "true")
    assert done.returncode == 0
    assert "--bind has no effect" in done.stderr


@two_processors
def test_ranks_run_near_their_own_device(two_nodes):
    done = command("run", "A1:2", "--ranks", "--bind", "--machine", MACHINE, "--", sys.executable, "-c", SHOW)
    assert sorted(map(json.loads, done.stdout.splitlines())) == sorted([near, near] for near in two_nodes)


@two_processors
def test_ranks_of_one_node_divide_its_processors(acme, nodes):
    nodes({0: OURS})
    machine = "sim:A1:4"  # two of node 0
    request = ["acme/0", "acme/1"]
    done = command("run", *request, "--ranks", "--bind", "--machine", machine, "--", sys.executable, "-c", SHOW)
    half = len(OURS) // 2
    assert sorted(map(json.loads, done.stdout.splitlines())) == [[OURS[:half]] * 2, [OURS[half:]] * 2]


@pytest.mark.parametrize(
    ("devices", "parts"),
    [
        ([0, 0], [(0, 1, 8, 9), (2, 3, 10, 11)]),
        ([0, 0, 1], [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        ([0, 0, 0], [(0, 8), (1, 9), (2, 3, 10, 11)]),
        ([0] * 5, [(0, 1, 2, 3, 8, 9, 10, 11)] * 5),
        ([0, None], [(0, 1, 2, 3, 8, 9, 10, 11), ()]),
    ],
)
def test_threads_of_one_core_stay_together(nodes, devices, parts):
    cores = [(core, core + 8) for core in range(8)]
    nodes({0: [*range(4), *range(8, 12)], 1: [*range(4, 8), *range(12, 16)]}, cores)
    assert divide_processors(devices, range(16)) == parts


def test_processors_are_written_as_the_kernel_does():
    assert format_slots([9, 0, 1, 2, 5, 8]) == "0-2,5,8-9"
    assert processors.numbers(format_slots(range(64))) == list(range(64))
