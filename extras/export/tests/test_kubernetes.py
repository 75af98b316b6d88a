import copy

import anyaccel
import kubernetes_rules
import pytest
import yaml
from anyaccel.model import Health
from anyaccel.scheduler import facts
from anyaccel_export.kubernetes import export
from anyaccel_export.ray import node_type
from anyaccel_export.source import ExportSource
from export_machines import device, machines, source
from hypothesis import given, settings
from lanes import laned, lanes
from lengths import length
from small_machines import machine

__all__ = ["lanes"]


def written(*devices, **changes):
    documents = list(yaml.safe_load_all(export(source(*devices, **changes)).text))
    kubernetes_rules.check(documents)
    slices = [document for document in documents if document["kind"] == "ResourceSlice"]
    return slices, [document for document in documents if document["kind"] == "DeviceClass"]


def test_a_device_with_what_claims_select_by():
    changes = {"id": "GPU-0A", "attributes": {"mode": "whole", "cores": 8, "fast": True, "clock": 1.5, "no name": 1}}
    [found], _ = written(device(0, parent="card-0", **changes), node="Host.Example")
    assert found["metadata"]["name"] == "host.example-anyaccel-0"
    assert found["spec"]["nodeName"] == found["spec"]["pool"]["name"] == "host.example"
    [entry] = found["spec"]["devices"]
    assert entry["name"] == "gpu-0a"
    assert entry["capacity"] == {"memory": {"value": str(16 << 30)}}
    assert entry["attributes"] == {
        "id": {"string": "GPU-0A"},
        "vendor": {"string": "acme"},
        "resource": {"string": "GPU"},
        "kind": {"string": "gpu"},
        "type": {"string": "Acme-One"},
        "model": {"string": "Acme One"},
        "index": {"int": 0},
        "fractional": {"string": "shared"},
        "numaNode": {"int": 0},
        "pciBusID": {"string": "0000:00:00.0"},
        "parent": {"string": "card-0"},
        "mode": {"string": "whole"},
        "cores": {"int": 8},
        "fast": {"bool": True},
        "clock": {"string": "1.5"},
    }


def test_a_device_has_32_facts_and_ours_come_first():
    [found], _ = written(device(0, attributes={f"a{index:02}": index for index in range(40)}))
    [entry] = found["spec"]["devices"]
    assert len(entry["attributes"]) == 31
    assert {"id", "pciBusID", "a00"} < set(entry["attributes"])
    assert entry["capacity"]


def test_a_slice_holds_128_devices():
    slices, _ = written(*(device(index) for index in range(130)))
    assert [len(found["spec"]["devices"]) for found in slices] == [128, 2]


def test_a_class_selects_the_devices_of_its_resource():
    slices, classes = written(device(0), device(1, resource="neuron_cores", vendor="other"), device(2))
    assert [found["metadata"]["name"] for found in classes] == ["anyaccel-gpu", "anyaccel-neuron-cores"]
    names = [[entry["name"] for entry in kubernetes_rules.chosen_by(found, slices)] for found in classes]
    assert names == [["acme-0", "acme-2"], ["acme-1"]]


def test_a_class_of_the_longest_resource_has_a_name_that_kubernetes_takes():
    _, [found] = written(device(0, resource="r" * 64))
    assert found["metadata"]["name"].startswith("anyaccel-rrr")


def test_unusable_devices_are_not_published():
    [found], classes = written(device(0, visible=False), device(1, health=Health.UNHEALTHY, resource="TPU"))
    assert (found["spec"]["devices"], classes) == ([], [])


def test_what_is_too_long_is_left_out_and_told():
    exported = export(source(device(0, model="m" * 65)))
    assert "model" not in yaml.safe_load_all(exported.text).send(None)["spec"]["devices"][0]["attributes"]
    assert exported.notes == ("Attributes longer than 64 bytes are left out, such as model of acme-0.",)


@settings(max_examples=length(15, 40), deadline=None)
@given(machines())
def test_the_rules_allow_whatever_plugins_may_report(devices):
    slices, _ = written(*devices)
    assert sum(len(found["spec"]["devices"]) for found in slices) == len(devices)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: spec.update(driver="Any_Accel"),
        lambda spec: spec.update(allNodes=True),
        lambda spec: spec["pool"].update(resourceSliceCount=2),
        lambda spec: spec["devices"].append(copy.deepcopy(spec["devices"][0])),
        lambda spec: spec["devices"].extend({"name": f"d{index}"} for index in range(128)),
        lambda spec: spec["devices"][0].update(name="GPU-0"),
        lambda spec: spec["devices"][0]["attributes"].update(two={"string": "", "int": 1}),
        lambda spec: spec["devices"][0]["attributes"].update({"a-b": {"int": 1}}),
        lambda spec: spec["devices"][0]["attributes"].update(long={"string": "m" * 65}),
        lambda spec: spec["devices"][0]["attributes"].update({f"a{index}": {"int": 1} for index in range(30)}),
        lambda spec: spec["devices"][0]["capacity"]["memory"].update(value="16 GiB"),
        lambda spec: spec["devices"][0].update(basic={}),
    ],
)
def test_the_rules_refuse_what_is_wrong(wrong):
    [found], classes = written(device(0))
    wrong(found["spec"])
    with pytest.raises(AssertionError):
        kubernetes_rules.check([found, *classes])


def test_labels_are_told_to_programs_that_choose_in_our_place():
    inventory = anyaccel.label(source(device(0), device(1)).inventory, {"GPU/1": ["rack=a3", "team=nlp"]})
    told = {each.id: facts(each, inventory, typed=False) for each in inventory.devices}
    assert "rack=a3+team=nlp" in export(ExportSource(inventory=inventory, facts=told)).text


@pytest.mark.usefixtures("lanes")
def test_a_new_filter_is_told_to_programs_that_choose_in_our_place():
    inventory = machine(laned(8, 8))
    told = {each.id: facts(each, inventory, typed=False) for each in inventory.devices}
    published = export(ExportSource(inventory=inventory, facts=told)).text
    assert '"lanes":' in published or "lanes:\n" in published
    assert "anyaccel/GPU.lanes" in node_type(ExportSource(inventory=inventory)).text
