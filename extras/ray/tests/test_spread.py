"""Where Ray is asked to reserve what the calls of a gang need."""

from types import SimpleNamespace

import anyaccel as aa
import pytest
from anyaccel_ray.gangs import spread
from anyaccel_ray.plan import RayPlan, satisfies

REQUEST = aa.parse_request("TPU:4")
PLAN = RayPlan(request=REQUEST, terms=("TPU",), resources={"TPU": 4.0}, selector={"anyaccel/TPU": "TPU-V4"})
NODE, SLICE = "ray.io/node-id", "ray.io/tpu-slice-name"


def host(name="", worker=0, *, chips=4, alive=True, kind="TPU-V4"):
    labels = {"anyaccel/TPU": kind} | ({SLICE: name, "ray.io/tpu-worker-id": str(worker)} if name else {})
    identity = f"{name}/{worker}"
    return {"NodeID": identity, "Alive": alive, "Resources": {"TPU": chips, "CPU": 8.0}, "Labels": labels}


def slice_of(count, name):
    return [host(name, worker) for worker in range(count)]


def cluster_of(*nodes, grows=False):
    devices = [SimpleNamespace(resource="TPU", kind="tpu"), SimpleNamespace(resource="GPU", kind="gpu")]
    return SimpleNamespace(ray=SimpleNamespace(nodes=lambda: nodes), devices=devices, grows=grows)


def test_each_call_has_a_node_of_its_own():
    found = spread(cluster_of(host(), host(worker=1)), PLAN, REQUEST, 2)
    assert found.arguments == {
        "bundles": [{"TPU": 4.0}] * 2,
        "bundle_label_selector": [{"anyaccel/TPU": "TPU-V4"}] * 2,
        "topology_strategy": {NODE: "STRICT_SPREAD"},
    }
    assert found.by_rank({1: "x", 0: "y"}) == [0, 1]


def test_hosts_of_slices_are_all_those_of_one():
    found = spread(cluster_of(*slice_of(2, "b"), *slice_of(4, "c"), *slice_of(2, "a"), host()), PLAN, REQUEST, 2)
    assert found.arguments["bundle_label_selector"] == [{"anyaccel/TPU": "TPU-V4", SLICE: "in(a,b)"}] * 2
    assert found.arguments["topology_strategy"] == {NODE: "STRICT_SPREAD", SLICE: "STRICT_PACK"}


def test_ranks_are_the_numbers_of_the_hosts_in_their_slice():
    found = spread(cluster_of(*slice_of(12, "a")), PLAN, REQUEST, 12)
    nodes = {index: f"a/{(index * 5) % 12}" for index in range(12)}
    assert [nodes[index] for index in found.by_rank(nodes)] == [f"a/{worker}" for worker in range(12)]


def test_where_no_slice_will_do_its_hosts_are_left_alone():
    found = spread(cluster_of(*slice_of(4, "c"), host(), host(worker=1)), PLAN, REQUEST, 2)
    assert found.arguments["bundle_label_selector"][0][SLICE] == "!in(c)"
    assert found.arguments["topology_strategy"] == {NODE: "STRICT_SPREAD"}


def test_calls_without_needs_do_not_care_for_slices():
    found = spread(cluster_of(*slice_of(4, "c")), RayPlan(), None, 3)
    assert found.arguments["bundles"] == [{"CPU": 1.0}] * 3
    assert found.arguments["bundle_label_selector"] == [{}] * 3


@pytest.mark.parametrize(
    ("nodes", "has"),
    [
        ([], "0"),
        ([host(), host(alive=False), host(chips=2), host(kind="TPU-V5P")], "1"),
        (slice_of(3, "c"), "0 and 3 in slice c; a slice is of use only as a whole"),
        ([*slice_of(1, "c")], "0 and 1 in slice c; a slice is of use only as a whole"),
    ],
)
def test_nodes_that_are_not_there_are_refused_unless_they_can_come(nodes, has):
    with pytest.raises(aa.NeverFitsError) as caught:
        spread(cluster_of(*nodes), PLAN, REQUEST, 2)
    assert str(caught.value) == f"a gang of 2 needs as many nodes that can serve TPU:4, and the cluster has {has}"
    assert caught.value.verdict.request == REQUEST
    assert spread(cluster_of(*nodes, grows=True), PLAN, REQUEST, 2).hosts == 2


@pytest.mark.parametrize(
    ("wanted", "values"),
    [("a", ["a"]), ("in(a,b)", ["a", "b"]), ("!a", ["b", "c", None]), ("!in(a,b)", ["c", None])],
)
def test_selectors_are_read_as_ray_reads_them(wanted, values):
    for value in ("a", "b", "c", None):
        labels = {} if value is None else {"x": value}
        assert satisfies(labels, {"x": wanted}) == (value in values)
