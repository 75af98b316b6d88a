"""Ray: the command that starts a node, a worker group of KubeRay, and a node type of the cluster launcher.

Each type of accelerator is the resource ``accelerator_type:TYPE``, for ``accelerator_type=`` of a task, and each
resource has its type in the label ``anyaccel/RESOURCE``, for label selectors.
"""

from __future__ import annotations

import json

from anyaccel_export.ray import labels
from anyaccel_export.ray.node import describe, unit_variables
from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import slug, to_yaml


def command(source: ExportSource) -> Export:
    """Write the command ``ray start``, on one line; append ``--head`` or ``--address``."""
    node = describe(source.inventory)
    return Export(text=f"{node.command()}\n", notes=node.notes)


def kuberay(source: ExportSource) -> Export:
    """Write the fields of a RayCluster's group: labels, start parameters, and variables of its container."""
    resources = labels.node_resources(source.devices)
    parameters = {"num-gpus": str(resources.pop(labels.PREDEFINED, 0))}
    if resources:
        quantities = json.dumps(resources, separators=(",", ":"))
        for sign in "'$":  # the operator puts it into a shell command as it stands, and Kubernetes expands $(NAME)
            quantities = quantities.replace(sign, f"\\u{ord(sign):04x}")
        parameters["resources"] = f"'{quantities}'"
    group: dict[str, object] = {"groupName": slug(source.node), "rayStartParams": parameters}
    if found := labels.node_labels(source.inventory):
        group["labels"] = found
    if variables := unit_variables(source.inventory):
        env = [{"name": name, "value": value} for name, value in variables.items()]
        group["template"] = {"spec": {"containers": [{"name": "ray-worker", "env": env}]}}
    return Export(text=to_yaml([group]), notes=("Add the image and the replicas to the group.",))


def node_type(source: ExportSource) -> Export:
    """Write a node type of the cluster launcher's configuration."""
    entry: dict[str, object] = {"resources": labels.node_resources(source.devices)}
    if found := labels.node_labels(source.inventory):
        entry["labels"] = found
    entry |= {"node_config": {}, "min_workers": 0, "max_workers": 1}
    notes = ["Add CPU to the resources, and the provider's node_config."]
    if variables := unit_variables(source.inventory):
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        notes.append(f"The start commands of these nodes need {settings} before 'ray start'.")
    return Export(
        text=to_yaml({"available_node_types": {slug(source.node, "A-Za-z0-9._-"): entry}}), notes=tuple(notes)
    )
