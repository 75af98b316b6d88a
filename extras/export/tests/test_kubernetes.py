import re

import anyaccel
import pytest
import slice_rules
import yaml
from anyaccel.model import Health
from anyaccel.scheduler import facts
from anyaccel_export.kubernetes import export
from anyaccel_export.ray import node_type
from anyaccel_export.slices import device_classes
from anyaccel_export.source import ExportSource
from export_machines import device, machines, source
from hypothesis import given, settings
from lanes import laned, lanes
from lengths import length
from small_machines import machine

__all__ = ["lanes"]


def written(*devices, **changes):
    documents = list(yaml.safe_load_all(export(source(*devices, **changes)).text))
    slices = [document for document in documents if document["kind"] == "ResourceSlice"]
    slice_rules.check_all(slices)
    classes = [document for document in documents if document["kind"] == "DeviceClass"]
    for found in classes:
        slice_rules.check_class(found)
    return slices, classes


def choose(device_class, slices):
    """The names of the devices that a class selects."""
    expression = device_class["spec"]["selectors"][0]["cel"]["expression"]
    driver, *wanted = re.fullmatch(
        r'device\.driver == "([^"]+)"(?: && device\.attributes\["([^"]+)"\]\.(\w+) == "([^"]+)")?', expression
    ).groups()
    assert wanted[0] in (None, driver)
    return [
        entry["name"]
        for found in slices
        for entry in found["spec"]["devices"]
        if found["spec"]["driver"] == driver
        and (wanted[1] is None or entry["attributes"][wanted[1]]["string"] == wanted[2])
    ]


def test_a_device_with_what_claims_select_by():
    changes = {"id": "GPU-0A", "attributes": {"mode": "whole", "cores": 8, "fast": True, "clock": 1.5, "no name": 1}}
    [found], _ = written(device(0, parent="card-0", **changes), node="Host.Example")
    assert found["metadata"]["name"] == "host.example-anyaccel.dev-0"
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
        "resource.kubernetes.io/numaNode": {"int": 0},
        "resource.kubernetes.io/pciBusID": {"string": "0000:00:00.0"},
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


def test_a_slice_holds_64_devices():
    slices, _ = written(*(device(index) for index in range(130)))
    assert [len(found["spec"]["devices"]) for found in slices] == [64, 64, 2]


def test_classes_select_all_devices_those_of_a_resource_and_those_of_a_type():
    slices, classes = written(
        device(0), device(1, resource="neuron_cores", vendor="other", tags=("Trn",)), device(2, tags=("Acme-Two",))
    )
    assert {found["metadata"]["name"]: choose(found, slices) for found in classes} == {
        "accelerator.anyaccel.dev": ["acme-0", "acme-1", "acme-2"],
        "gpu.anyaccel.dev": ["acme-0", "acme-2"],
        "neuron-cores.anyaccel.dev": ["acme-1"],
        "acme-one.anyaccel.dev": ["acme-0"],
        "trn.anyaccel.dev": ["acme-1"],
        "acme-two.anyaccel.dev": ["acme-2"],
    }
    extended = [found["spec"].get("extendedResourceName") for found in classes]
    assert extended[:2] == [None, "anyaccel.dev/gpu"]


def test_types_that_differ_in_signs_only_have_classes_of_their_own():
    classes = device_classes({"Acme One": "GPU", "Acme-One": "GPU", 'a"b\\c': "GPU", "r" * 128: "r" * 64})
    assert len({found["metadata"]["name"] for found in classes}) == len(classes) == 7
    assert len({found["spec"].get("extendedResourceName") for found in classes}) == len(classes)
    for found in classes:
        slice_rules.check_class(found)


def test_a_device_with_the_longest_type_is_selected_by_its_class():
    slices, classes = written(device(0, tags=("t" * 128,)))
    assert choose(classes[-1], slices) == ["acme-0"]


def test_unusable_devices_are_not_published():
    [found], classes = written(device(0, visible=False), device(1, health=Health.UNHEALTHY, resource="TPU"))
    assert (found["spec"]["devices"], classes) == ([], [])


def test_of_a_device_and_its_parts_the_parts_are_published():
    [found], _ = written(device(0), device(1, parent="acme-0"), device(2, parent="acme-0", health=Health.UNHEALTHY))
    assert [entry["name"] for entry in found["spec"]["devices"]] == ["acme-1"]


def test_too_long_attributes_are_left_out_with_a_note():
    exported = export(source(device(0, model="m" * 65)))
    assert "model" not in yaml.safe_load_all(exported.text).send(None)["spec"]["devices"][0]["attributes"]
    assert exported.notes == ("Attributes longer than 64 bytes are left out, such as model of acme-0.",)


@settings(max_examples=length(15, 40), deadline=None)
@given(machines())
def test_the_rules_allow_whatever_plugins_may_report(devices):
    slices, _ = written(*devices)
    assert sum(len(found["spec"]["devices"]) for found in slices) == len(devices)


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
