"""Workers run on the processors of the NUMA node that is nearest to their devices."""

import json
import os
import subprocess
import sys

import anyaccel as aa
import cloudpickle
import pytest
from anyaccel.model import format_slots
from anyaccel.probe import processors
from numa_nodes import OURS, SHOW, nodes, run_on_nodes, two_nodes, two_processors

__all__ = ["nodes", "two_nodes"]


MACHINE = "sim:A1:2"  # one device of node 0, one of node 1


@pytest.fixture(autouse=True)
def functions_travel_by_value(request):
    cloudpickle.register_pickle_by_value(request.module)  # test modules cannot be imported by workers
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


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


@two_processors
def test_the_command_line_binds(two_nodes):
    done = run_on_nodes("run", "acme/1", "-v", "--bind", "--machine", MACHINE, "--", sys.executable, "-c", SHOW)
    assert json.loads(done.stdout) == [two_nodes[1]] * 2
    assert f"runs on the processors {format_slots(two_nodes[1])}, nearest" in done.stderr
    done = run_on_nodes("run", "acme/1", "--no-bind", "--machine", MACHINE, "--", sys.executable, "-c", SHOW)
    assert json.loads(done.stdout) == [OURS, []]


def test_a_wish_that_cannot_be_had_is_answered(acme, nodes):
    nodes({})
    done = run_on_nodes("run", "A1:1", "--bind", "--machine", MACHINE, "--", "true")
    assert done.returncode == 0
    assert "--bind has no effect" in done.stderr


def test_processors_are_written_as_the_kernel_does():
    assert format_slots([9, 0, 1, 2, 5, 8]) == "0-2,5,8-9"
    assert processors.numbers(format_slots(range(64))) == list(range(64))
