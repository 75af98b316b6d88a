import json
import re
import shlex

import yaml
from anyaccel.model import Health, Inventory, VendorReport, VendorState
from anyaccel_export.ray import command, kuberay, node_type
from export_machines import device, machines, source
from hypothesis import given, settings
from lengths import length

MIXED = (
    device(0, tags=("H100",)),
    device(1, tags=("H100",)),
    device(2, tags=("TPU-V4",), resource="TPU", vendor="other"),
    device(3, tags=("H100",), health=Health.UNHEALTHY),
)
FACTS = {"mem": "16GiB", "numa": "0"}
"""What requests filter by and all devices of these tests have."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Ray takes as a label's name and value: the syntax of Kubernetes."""
UNITS = "neuron_cores,TPU,NPU,HPU,RBLN,FURIOSA,TTNPU,MBLT"
"""Ray's own list of what it counts device by device."""


def labels_of(resource):
    return {f"anyaccel/{resource}.{name}": fact for name, fact in FACTS.items()}


def read(text):
    """Variables, GPUs, other resources and labels of a command."""
    words = shlex.split(text)
    at = words.index("ray")
    assert words[at : at + 2] == ["ray", "start"]
    variables = dict(word.split("=", 1) for word in words[1:at])
    options = dict(word.removeprefix("--").split("=", 1) for word in words[at + 2 :])
    assert set(options) <= {"num-gpus", "resources", "labels"}
    labels = dict(pair.split("=") for pair in options.get("labels", "").split(",") if pair)
    return variables, int(options["num-gpus"]), json.loads(options.get("resources", "{}")), labels


def test_the_command_that_starts_a_node():
    assert read(command(source(*MIXED)).text) == (
        {"RAY_custom_unit_instance_resources": UNITS},
        2,
        {"TPU": 1, "accelerator_type:H100": 1, "accelerator_type:TPU-V4": 1},
        {"anyaccel/GPU": "H100", "anyaccel/TPU": "TPU-V4", **labels_of("GPU"), **labels_of("TPU")},
    )


def test_devices_of_one_type_get_rays_own_label_too():
    assert read(command(source(*MIXED[:2])).text)[3] == {
        "anyaccel/GPU": "H100",
        **labels_of("GPU"),
        "ray.io/accelerator-type": "H100",
    }


def test_types_that_a_slot_does_not_tell_apart_are_no_label():
    assert read(command(source(device(0), device(1, tags=("Acme-Two",)))).text)[3] == {
        "anyaccel/GPU": "mixed",
        **labels_of("GPU"),
    }


def test_a_resource_that_ray_does_not_know_is_counted_device_by_device():
    variables, *_ = read(command(source(device(resource="APU"))).text)
    assert variables == {"RAY_custom_unit_instance_resources": f"{UNITS},APU"}


def test_a_host_of_a_slice():
    facts = {"slice_name": "pod-7", "worker_id": 0, "pod_type": "v4-16", "topology": "2x2x2"}
    chip = {"tags": ("TPU-V4",), "resource": "TPU", "kind": "tpu"}
    _, _, resources, labels = read(command(source(device(attributes=facts, **chip))).text)
    assert resources == {"TPU": 1, "accelerator_type:TPU-V4": 1, "pod-7": 1, "TPU-v4-16-head": 1}
    assert labels == {
        "anyaccel/TPU": "TPU-V4",
        **labels_of("TPU"),
        "ray.io/accelerator-type": "TPU-V4",
        "ray.io/tpu-slice-name": "pod-7",
        "ray.io/tpu-worker-id": "0",
        "ray.io/tpu-pod-type": "v4-16",
        "ray.io/tpu-topology": "2x2x2",
    }
    _, _, resources, _ = read(command(source(device(attributes={**facts, "worker_id": 1}, **chip))).text)
    assert resources == {"TPU": 1, "accelerator_type:TPU-V4": 1, "pod-7": 1}, "only the first host is the head"
    [group] = yaml.safe_load(kuberay(source(device(attributes=facts, **chip))).text)
    assert list(group["labels"]) == ["anyaccel/TPU", *labels_of("TPU")], "a group has many hosts"


def test_two_vendors_of_one_resource_are_not_masked_by_ray():
    both = (device(0), device(1, vendor="zeta"))
    reports = [
        VendorReport(vendor=v, state=VendorState.OK, env_vars=(f"{v.upper()}_VISIBLE",)) for v in ("acme", "zeta")
    ]
    exported = command(source(inventory=Inventory(machine="host", devices=both, vendors=tuple(reports))))
    assert read(exported.text)[0] == {
        "RAY_EXPERIMENTAL_NOSET_ACME_VISIBLE": "1",
        "RAY_EXPERIMENTAL_NOSET_ZETA_VISIBLE": "1",
    }
    assert "Ray's own tasks see all of them" in exported.notes[0]


def test_a_vendor_whose_switch_ray_calls_otherwise():
    both = (device(0), device(1, vendor="zeta"))
    reports = (
        VendorReport(vendor="acme", state=VendorState.OK, env_vars=("ACME_VISIBLE",)),
        VendorReport(vendor="zeta", state=VendorState.OK, env_vars=("ZETA_VISIBLE",), ray_switch="KEEP_ZETA"),
    )
    exported = command(source(inventory=Inventory(machine="host", devices=both, vendors=reports)))
    assert read(exported.text)[0] == {"RAY_EXPERIMENTAL_NOSET_ACME_VISIBLE": "1", "KEEP_ZETA": "1"}


def test_no_devices_are_none_whatever_ray_would_find():
    assert command(source()).text == "ray start --num-gpus=0\n"


def test_a_worker_group_of_kuberay():
    [group] = yaml.safe_load(kuberay(source(*MIXED)).text)
    assert group["groupName"] == "node-1"
    assert group["labels"] == {"anyaccel/GPU": "H100", "anyaccel/TPU": "TPU-V4", **labels_of("GPU"), **labels_of("TPU")}
    parameters = group["rayStartParams"]
    assert all(isinstance(value, str) for value in parameters.values())
    assert "labels" not in parameters, "the operator refuses them there"
    assert parameters["num-gpus"] == "2"
    # The operator reads the map without its quotes, and puts it into the command of a shell with them.
    assert json.loads(parameters["resources"].strip("'")) == json.loads(shlex.split(parameters["resources"])[0])
    [container] = group["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "RAY_custom_unit_instance_resources", "value": UNITS}]


def test_a_node_type_of_the_cluster_launcher():
    exported = node_type(source(*MIXED))
    found = yaml.safe_load(exported.text)["available_node_types"]["node-1"]
    assert found["resources"] == {"GPU": 2, "TPU": 1, "accelerator_type:H100": 1, "accelerator_type:TPU-V4": 1}
    assert found["labels"] == {"anyaccel/GPU": "H100", "anyaccel/TPU": "TPU-V4", **labels_of("GPU"), **labels_of("TPU")}
    assert found["node_config"] == {}
    assert any(f"RAY_custom_unit_instance_resources={UNITS}" in note for note in exported.notes)


def test_a_label_of_the_longest_resource_is_no_longer_than_ray_takes():
    _, _, _, labels = read(command(source(device(0, resource="r" * 64))).text)
    assert {name.rpartition(".")[2] for name in labels} >= {"mem", "numa"}
    assert all(NAME.fullmatch(name.partition("/")[2]) for name in labels), labels


@settings(max_examples=length(15, 40), deadline=None)
@given(machines())
def test_whatever_plugins_may_report_can_be_read_back(devices):
    _, gpus, resources, labels = read(command(source(*devices)).text)
    counted = {name: count for name, count in resources.items() if not name.startswith("accelerator_type:")}
    assert gpus + sum(counted.values()) == len(devices)
    assert all(NAME.fullmatch(name.partition("/")[2]) and NAME.fullmatch(value) for name, value in labels.items())
    yaml.safe_load(kuberay(source(*devices)).text)
    yaml.safe_load(node_type(source(*devices)).text)
