"""What Ray is asked for where a request has filters, and what a node makes of the answer."""

import pytest
from anyaccel.errors import WorkerStartError
from anyaccel.model import replace
from anyaccel.scheduler import parse_request
from anyaccel_export.ray import node_labels, node_resources
from anyaccel_ray.given import identify_devices
from anyaccel_ray.plan import NodeKind, find_plan
from lanes import laned, lanes
from small_machines import gpus, machine

__all__ = ["lanes"]

GIB = 1 << 30


def node(name, *devices):
    inventory = machine(replace(device, declared=True) for device in devices)
    return NodeKind(
        names=(name,), resources=node_resources(devices), labels=node_labels(inventory), inventory=inventory
    )


def plan(request, *kinds, grows=False):
    """What Ray is asked for; None when it cannot be."""
    return find_plan(parse_request(request), kinds, dict, grows=grows)[0]


def why_not(request, *kinds):
    found, fitting = find_plan(parse_request(request), kinds, dict, grows=False)
    assert found is None
    return fitting.reasons[0]


@pytest.mark.usefixtures("lanes")
class TestAFilterOfATest:
    def test_ray_is_asked_for_nodes_that_pass(self):
        few, many = node("few", *laned(4, 4)), node("many", *laned(16, 16))
        assert plan("GPU:1,lanes=8", few, many).selector == {"anyaccel/GPU.lanes": "16"}
        assert plan("GPU:1,lanes=2", few, many).selector == {"anyaccel/GPU.lanes": "in(4,16)"}
        assert plan("GPU:1", few, many).selector == {}
        assert "not lanes=32" in why_not("GPU:1,lanes=32", few, many)

    def test_ray_is_not_asked_where_it_could_give_another_device(self):
        why = why_not("GPU:1,lanes=8", node("both", *laned(4, 16)))
        assert "Ray gives any of its GPU, and some will not do (not lanes=8: acme/0 (4))" in why
        assert "no label says 'lanes' of all its GPU" in why_not("GPU:1,lanes=2", node("unlike", *laned(4, 16)))
        assert plan("GPU:1,lanes=8", grows=True) is None, "no product says what its devices have"

    def test_a_device_of_rays_that_does_not_pass_is_refused_on_the_node(self):
        with pytest.raises(WorkerStartError, match="Ray gave h100-0 for GPU:1,lanes=8"):
            identify_devices(parse_request("GPU:1,lanes=8"), ("GPU",), {"GPU": [(0, 1.0)]}, machine(laned(4, 16)))


def test_ray_is_asked_for_the_labels_of_devices():
    vision, others = (
        node(name, *(replace(device, labels=labels) for device in gpus(2)))
        for name, labels in (("vision", {"team": "vision", "rack": "a3"}), ("others", {"team": "nlp"}))
    )
    assert plan("GPU:1,label=team=vision", vision, others).selector == {"anyaccel/GPU.label": "rack-a3-team-vision"}
    assert "not label=team=vision: acme/0-1 (team=nlp)" in why_not("GPU:1,label=team=vision", others)
    assert plan("GPU:1,label=-rack", vision, others).selector == {"anyaccel/GPU.label": "team-nlp"}
    assert "no label says 'label' of all its GPU" in why_not("GPU:1,label=-rack", node("unlabeled", *gpus(2)))


def test_nodes_of_one_type_with_less_memory_are_told_apart():
    small, large = node("small", *gpus(2)), node("large", *gpus(2, memory_bytes=94 * GIB))
    assert plan("GPU:1,mem=90GiB", small, large).selector == {"anyaccel/GPU": "H100", "anyaccel/GPU.mem": "94GiB"}
    assert plan("GPU:1,mem=90GiB", large).selector == {"anyaccel/GPU": "H100"}


def test_ray_is_asked_for_no_id():
    why = why_not("GPU:1,id=h100-0", node("one", *gpus(1)))
    assert "Ray cannot be asked for id=ID, which is of one machine" in why
    several = why_not("acme/1", node("several", *gpus(4)))
    assert "Ray cannot be asked for NAME/INDEX, which is of one machine" in several
    assert "anyaccel/GPU.id" not in node_labels(machine(gpus(1)))
