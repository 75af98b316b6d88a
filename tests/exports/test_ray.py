import json
import re
import shlex

import yaml
from anyaccel.exports.ray import command, kuberay, node_type
from anyaccel.model import Health
from export_machines import device, machines, source
from hypothesis import given, settings

MIXED = (
    device(0, tags=("H100",)),
    device(1, tags=("H100",)),
    device(2, tags=("TPU-V4",), resource="TPU", vendor="other"),
    device(3, tags=("H100",), health=Health.UNHEALTHY),
)
LABEL = re.compile(r"anyaccel/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Ray takes as a label's key: the syntax of Kubernetes."""


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
        {"RAY_custom_unit_instance_resources": "TPU"},
        2,
        {"TPU": 1, "accelerator_type:H100": 1, "accelerator_type:TPU-V4": 1},
        {"anyaccel/H100": "2", "anyaccel/TPU-V4": "1"},
    )


def test_no_devices_are_none_whatever_ray_would_find():
    assert command(source()).text == "ray start --num-gpus=0\n"


def test_a_worker_group_of_kuberay():
    [group] = yaml.safe_load(kuberay(source(*MIXED)).text)
    assert group["groupName"] == "node-1"
    assert group["labels"] == {"anyaccel/H100": "2", "anyaccel/TPU-V4": "1"}
    parameters = group["rayStartParams"]
    assert all(isinstance(value, str) for value in parameters.values())
    assert "labels" not in parameters, "the operator refuses them there"
    assert parameters["num-gpus"] == "2"
    # The operator reads the map without its quotes, and puts it into the command of a shell with them.
    assert json.loads(parameters["resources"].strip("'")) == json.loads(shlex.split(parameters["resources"])[0])
    [container] = group["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "RAY_custom_unit_instance_resources", "value": "TPU"}]


def test_a_node_type_of_the_cluster_launcher():
    exported = node_type(source(*MIXED))
    found = yaml.safe_load(exported.text)["available_node_types"]["node-1"]
    assert found["resources"] == {"GPU": 2, "TPU": 1, "accelerator_type:H100": 1, "accelerator_type:TPU-V4": 1}
    assert found["labels"] == {"anyaccel/H100": "2", "anyaccel/TPU-V4": "1"}
    assert found["node_config"] == {}
    assert any("RAY_custom_unit_instance_resources=TPU" in note for note in exported.notes)


@settings(max_examples=40, deadline=None)
@given(machines())
def test_whatever_plugins_may_report_can_be_read_back(devices):
    _, gpus, resources, labels = read(command(source(*devices)).text)
    counted = {name: count for name, count in resources.items() if not name.startswith("accelerator_type:")}
    assert gpus + sum(counted.values()) == sum(map(int, labels.values())) == len(devices)
    assert all(map(LABEL.fullmatch, labels))
    yaml.safe_load(kuberay(source(*devices)).text)
    yaml.safe_load(node_type(source(*devices)).text)
