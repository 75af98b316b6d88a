"""What Ray is asked for, given the nodes that there are; no Ray is needed to say that."""

import anyaccel as aa
import pytest
from anyaccel.errors import WorkerStartError
from anyaccel.model import Device, Extent, Fractional, Inventory, Product
from anyaccel.scheduler import Choice, parse_request
from anyaccel_export.ray import label_value, node_labels, node_resources, type_label, unit_instances
from anyaccel_ray.given import Preferred, has_rules, identify_devices, plain
from anyaccel_ray.plan import NodeKind, find_plan

GIB = 1 << 30


def device(index, kind="H100", resource="GPU", memory=80, **more):
    tags = {"H100": ("H100", "H100-80GB"), "MI300X": ("Long-MI300X-OAM", "MI300X")}.get(kind, (kind,))
    facts = {"model": kind, "tags": tags, "resource": resource, "memory_bytes": memory * GIB, "vendor": "declared"}
    facts |= {"fractional": Fractional.SHARED, "declared": True}
    return Device(id=f"{kind}-{index}", index=index, **(facts | more))


def node(name, *devices, labels=True, **resources):
    inventory = Inventory(machine="host", devices=devices, vendors=())
    return NodeKind(
        names=(name,),
        resources=node_resources(devices) | resources,
        labels=node_labels(inventory) if labels else {},
        inventory=inventory,
    )


H100 = node("one", *(device(index) for index in range(4)))
OTHER = node("two", *(device(i, "MI300X", memory=192) for i in range(4)), *(device(i, "V4", "TPU") for i in range(4)))
MIXED = node("mixed", device(0, "T4"), device(1, "T4"), device(2, "V100"), device(3, "V100"))
PRODUCTS = {
    "GPU": [
        Product(name="H100", model="H100", memory_bytes=80 * GIB),
        Product(name="B200", model="B200", aliases=("Blackwell",), memory_bytes=180 * GIB),
        Product(name="Acme-Whole", model="Acme Whole"),
        Product(name="Long-MI300X-OAM", model="MI300X", aliases=("MI300X",), memory_bytes=192 * GIB),
    ]
}


def plan(request, *kinds, grows=False):
    """What Ray is asked for; None when it cannot be."""
    return find_plan(parse_request(request), kinds or (H100, OTHER), lambda: PRODUCTS, grows=grows)[0]


def why_not(request, *kinds):
    found, fitting = find_plan(parse_request(request), kinds, lambda: PRODUCTS, grows=False)
    assert found is None
    return fitting.reasons[0]


@pytest.mark.parametrize(
    ("request_", "resources", "selector"),
    [
        ("GPU:2", {"GPU": 2}, {}),
        ("GPU:0.25", {"GPU": 0.25}, {}),
        ("H100:20GiB", {"GPU": 0.25, "accelerator_type:H100": 0.001}, {"anyaccel/GPU": "H100"}),
        ("MI300X:48GiB", {"GPU": 0.25, "accelerator_type:Long-MI300X-OAM": 0.001}, {"anyaccel/GPU": "Long-MI300X-OAM"}),
        ("H100", {"GPU": 1, "accelerator_type:H100": 0.001}, {"anyaccel/GPU": "H100"}),
        ("h100-80gb:1", {"GPU": 1, "accelerator_type:H100": 0.001}, {"anyaccel/GPU": "H100"}),
        ("H100|MI300X:1", {"GPU": 1}, {"anyaccel/GPU": "in(H100,Long-MI300X-OAM)"}),
        ("H100|Acme-Whole:1", {"GPU": 1}, {"anyaccel/GPU": "in(H100,Acme-Whole)"}),
        ("GPU:1 TPU:2", {"GPU": 1, "TPU": 2}, {}),
        ("GPU:1 GPU:1", {"GPU": 2}, {}),
        ("TPU:4", {"TPU": 4}, {}),
        ("TPU|GPU:1", {"TPU": 1}, {}),
    ],
)
def test_what_ray_is_asked_for(acme, request_, resources, selector):
    found = plan(request_)
    assert (found.resources, found.selector) == (resources, selector)


def test_a_share_by_memory_goes_to_nodes_where_it_is_one_quantity():
    found = plan("GPU:20GiB")
    assert str(found.request) == "GPU:0.25,mem=20GiB"
    assert (found.resources["GPU"], found.selector) == (0.25, {"anyaccel/GPU": "H100"})
    assert "some will not do" in why_not("GPU:20GiB", node("small", device(0), device(1, memory=16)))


def test_memory_leads_to_types_that_have_it():
    assert plan("GPU:1,mem=100G").selector == {"anyaccel/GPU": "Long-MI300X-OAM"}
    assert plan("GPU:1,mem=300G") is None


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("T4:1", "several types, of which Ray cannot give one"),
        ("T4|V100:1", "several types, of which Ray cannot give one"),
        ("GPU:2", "which Ray mixes; ask for GPU:2,mixed"),
        ("GPU:5,mixed", "4 GPU"),
        ("GPU:1 GPU:0.5", "a share of GPU only where no other term"),
        ("GPU:0.5 GPU:0.25", "a share of GPU only where no other term"),
    ],
)
def test_what_ray_cannot_be_asked_for(request_, words):
    assert words in why_not(request_, MIXED)


def test_nodes_of_several_types_serve_what_is_the_same_for_all():
    assert plan("GPU:1", MIXED).selector == {}
    assert plan("GPU:2,mixed", MIXED).selector == {}
    assert plan("GPU:2", MIXED, H100).selector == {"anyaccel/GPU": "H100"}, "not the mixed one"


def test_nodes_without_labels_serve_what_names_no_type():
    bare = node("bare", device(0), labels=False)
    assert plan("GPU:1", bare).resources == {"GPU": 1}
    assert "start it with 'anyaccel ray start'" in why_not("H100:1", bare)


def test_a_node_that_was_started_with_less_than_it_has():
    assert "it was started with 1 GPU" in why_not("GPU:2", node("less", *H100.inventory.devices, GPU=1))


def test_links_that_ray_does_not_look_at():
    ring = [device(0, links={"H100-1": 9}), device(1, links={"H100-0": 9})]
    assert plan("GPU:2,linked", node("all", *ring)).resources == {"GPU": 2}
    assert "not all of its GPU are linked" in why_not("GPU:2,linked", node("some", *ring, device(2)))


def test_types_that_only_an_autoscaler_could_bring():
    assert plan("Blackwell:2") is None
    found = plan("Blackwell:2", grows=True)
    assert found.resources == {"GPU": 2, "accelerator_type:B200": 0.001}
    assert found.selector == {"anyaccel/GPU": "B200"}
    assert plan("Unheard:1", grows=True) is None


def test_labels_are_what_ray_takes():
    assert label_value("NVIDIA A-1 (Rev. ö)") == "NVIDIA-A-1-Rev"
    assert label_value("x" * 80) == "x" * 63
    assert label_value("") == "x"
    assert type_label(MIXED.inventory.devices) == "mixed"
    assert node_labels(OTHER.inventory) == {
        "anyaccel/GPU": "Long-MI300X-OAM",
        "anyaccel/GPU.mem": "192GiB",
        "anyaccel/TPU": "V4",
        "anyaccel/TPU.mem": "80GiB",
    }


def test_what_is_counted_one_by_one():
    names = unit_instances(["APU", "GPU", "TPU"]).split(",")
    assert "APU" in names
    assert "GPU" not in names, "Ray counts it so anyway"
    assert len(names) == len({*names}) > 2, "Ray's own list stays"


def test_slots_are_devices_in_their_order():
    wanted = parse_request("GPU:2 TPU:1")
    found = identify_devices(wanted, ("GPU", "TPU"), {"GPU": [(3, 1.0), (1, 1.0)], "TPU": [(2, 1.0)]}, OTHER.inventory)
    assert [share.device.id for grant in found.grants for share in grant.shares] == ["MI300X-1", "MI300X-3", "V4-2"]
    again = identify_devices(wanted, ("GPU", "TPU"), {"GPU": [(1, 1.0), (3, 1.0)], "TPU": [(2, 1.0)]}, OTHER.inventory)
    other = identify_devices(wanted, ("GPU", "TPU"), {"GPU": [(1, 1.0), (2, 1.0)], "TPU": [(2, 1.0)]}, OTHER.inventory)
    assert found == again != other
    assert hash(found) == hash(again)
    assert plain(found) == wanted


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ({"GPU": [(0, 2.0)]}, "not devices one by one"),
        ({"GPU": [(0, 1.0)]}, "not devices one by one"),
        ({"GPU": [(0, 1.0), (9, 1.0)]}, "GPU number 9 and this node has 4"),
        ({}, "not devices one by one"),
    ],
)
def test_slots_that_are_no_devices(slots, words):
    with pytest.raises(WorkerStartError, match=words):
        identify_devices(parse_request("GPU:2"), ("GPU",), slots, OTHER.inventory)


def test_a_resource_that_ray_counts_as_one_pool():
    with pytest.raises(WorkerStartError, match="one pool on this node"):
        identify_devices(parse_request("WPU:1"), ("WPU",), {"WPU": [(0, 1.0)]}, OTHER.inventory)


def test_devices_that_others_hold_are_waited_for():
    wanted = identify_devices(parse_request("GPU:2"), ("GPU",), {"GPU": [(0, 1.0), (1, 1.0)]}, H100.inventory)
    choice = Preferred(H100.inventory, wanted, ruled=False)
    assert isinstance(choice, Choice)
    assert choice.choose({}) == wanted.grants
    assert choice.choose({"H100-1": Extent(1)}) is None
    assert [each.id for each in choice.candidates] == ["H100-0", "H100-1"]


def test_where_a_vendor_has_rules_others_are_chosen_too():
    wanted = identify_devices(parse_request("GPU:2"), ("GPU",), {"GPU": [(0, 1.0), (1, 1.0)]}, H100.inventory)
    choice = Preferred(H100.inventory, wanted, ruled=True)
    assert choice.choose({}) == wanted.grants
    (grant,) = choice.choose({"H100-1": Extent()})
    assert "H100-1" not in {share.device.id for share in grant.shares}
    assert len(choice.candidates) == 4


def test_a_vendor_with_rules_is_told_from_others(acme):
    inventory = aa.detect("sim:A1:4")
    assert has_rules(inventory.devices[0], inventory), "never 3"
    assert not has_rules(H100.inventory.devices[0], H100.inventory)


def test_an_unknown_name_is_refused_with_the_names_of_all_nodes():
    _, found = find_plan(parse_request("Quux:1"), (H100, OTHER), lambda: PRODUCTS, grows=False)
    with pytest.raises(aa.UnknownNameError, match=r"; on the cluster there are .*H100.*MI300X.*TPU") as refused:
        found.refuse(parse_request("Quux:1"))
    assert "this machine" not in str(refused.value)
