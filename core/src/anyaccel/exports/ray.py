"""Ray: the command that starts a node, a worker group of KubeRay, and a node type of the cluster launcher.

Each type of accelerator is told twice: as the resource ``accelerator_type:TYPE``, which ``accelerator_type=`` of a task
asks for, and as the label ``anyaccel/TYPE`` with the number of devices, which a label selector can ask for.
"""

from __future__ import annotations

import json
import shlex

from anyaccel.exports.source import Export, Source, by_resource, count_types
from anyaccel.exports.text import slug, to_yaml

_GPU = "GPU"
"""The resource that has an option of its own and is always counted by device."""
_UNIT_VARIABLE = "RAY_custom_unit_instance_resources"
_LABEL = 63


def command(source: Source) -> Export:
    """Write the command ``ray start``, on one line; ``--head`` or ``--address`` comes behind it."""
    variables = [f"{name}={value}" for name, value in _variables(source).items()]
    words = [*(["env", *variables] if variables else []), "ray", "start"]
    resources = _resources(source)
    words.append(f"--num-gpus={resources.pop(_GPU, 0)}")
    if resources:
        words.append(f"--resources={_json(resources)}")
    if labels := _labels(source):
        words.append(f"--labels={','.join(f'{name}={value}' for name, value in labels.items())}")
    return Export(text=f"{shlex.join(words)}\n")


def kuberay(source: Source) -> Export:
    """Write what a group of a RayCluster needs: labels, start parameters, and variables of its container."""
    resources = _resources(source)
    parameters = {"num-gpus": str(resources.pop(_GPU, 0))}
    if resources:
        parameters["resources"] = f"'{_json(resources)}'"  # the operator puts it into a shell command as it stands
    group: dict[str, object] = {"groupName": slug(source.node), "rayStartParams": parameters}
    if labels := _labels(source):
        group["labels"] = labels
    if variables := _variables(source):
        env = [{"name": name, "value": value} for name, value in variables.items()]
        group["template"] = {"spec": {"containers": [{"name": "ray-worker", "env": env}]}}
    return Export(text=to_yaml([group]), notes=("Add the image and the replicas to the group.",))


def node_type(source: Source) -> Export:
    """Write a node type of the cluster launcher's configuration."""
    entry: dict[str, object] = {"resources": _resources(source)}
    if labels := _labels(source):
        entry["labels"] = labels
    entry |= {"node_config": {}, "min_workers": 0, "max_workers": 1}
    notes = ["Add CPU to the resources, and the provider's node_config."]
    if variables := _variables(source):
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        notes.append(f"The start commands of these nodes need {settings} before 'ray start'.")
    return Export(
        text=to_yaml({"available_node_types": {slug(source.node, "A-Za-z0-9._-"): entry}}), notes=tuple(notes)
    )


def _resources(source: Source) -> dict[str, int]:
    resources = {name: len(devices) for name, devices in by_resource(source.devices).items()}
    return resources | {f"accelerator_type:{kind}": 1 for kind in count_types(source.devices)}


def _labels(source: Source) -> dict[str, str]:
    counts: dict[str, int] = {}
    for kind, count in count_types(source.devices).items():
        name = f"anyaccel/{slug(kind, 'A-Za-z0-9._-')[:_LABEL].rstrip('-_.')}"
        counts[name] = counts.get(name, 0) + count
    return {name: str(count) for name, count in counts.items()}


def _variables(source: Source) -> dict[str, str]:
    """What makes Ray hand out these resources device by device. The variable replaces Ray's own list."""
    known = {report.resource for report in source.inventory.vendors if report.resource}
    names = sorted((known | {device.resource for device in source.devices}) - {_GPU})
    needed = any(device.resource != _GPU for device in source.devices)
    return {_UNIT_VARIABLE: ",".join(names)} if needed else {}


def _json(resources: dict[str, int]) -> str:
    return json.dumps(resources, separators=(",", ":"))
