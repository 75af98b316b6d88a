"""How a machine becomes a node of Ray: what ``ray start`` is told about its devices.

The result holds for calls of ours, which look into the snapshot of the node, and is as good as Ray allows for calls
that know nothing of us: these get the masks that Ray itself writes, and where those would be wrong, none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from anyaccel.exports.ray import labels
from anyaccel.exports.shell import shell_join
from anyaccel.model import Device, Inventory, Value

TYPE_LABEL = "ray.io/accelerator-type"


class RayNode(Value):
    """What Ray is told about a machine.

    Attributes:
        gpus: Devices of the resource that has an option of its own.
        resources: Quantities of all other resources.
        labels: Labels of the node.
        variables: Variables that the node's processes need.
        notes: Sentences that people should see.
    """

    gpus: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    variables: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """The options of ``ray start``."""
        found = [f"--num-gpus={self.gpus}"]
        if self.resources:
            found.append(f"--resources={json.dumps(dict(self.resources), separators=(',', ':'))}")
        if self.labels:
            found.append(f"--labels={','.join(f'{name}={value}' for name, value in self.labels.items())}")
        return found

    def command(self, options: Sequence[str] = ()) -> str:
        """The whole command, for a shell."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return shell_join([*(["env", *variables] if variables else []), "ray", "start", *self.arguments, *options])


def describe(
    inventory: Inventory,
    *,
    resources: Mapping[str, float] | None = None,
    node_labels: Mapping[str, str] | None = None,
) -> RayNode:
    """Say what Ray should be told about a machine.

    Args:
        inventory: What is on it.
        resources: Further resources that somebody wants the node to have; they win.
        node_labels: Further labels; they win.
    """
    devices = inventory.usable
    quantities: dict[str, float] = {
        **labels.node_resources(devices),
        **labels.slice_resources(devices),
        **(resources or {}),
    }
    gpus = int(quantities.pop(labels.PREDEFINED, 0))
    types = {device.type for device in devices}
    own = {TYPE_LABEL: labels.label_value(types.pop())} if len(types) == 1 else {}
    variables = unit_variables(inventory)
    kept, notes = _kept_from_ray(inventory, devices)
    return RayNode(
        gpus=gpus,
        resources=quantities,
        labels={**labels.node_labels(inventory), **own, **labels.slice_labels(devices), **(node_labels or {})},
        variables={**variables, **kept},
        notes=tuple(notes),
    )


def unit_variables(inventory: Inventory) -> dict[str, str]:
    """What makes Ray hand out the machine's devices one by one; nothing where Ray does so by itself."""
    if all(device.resource == labels.PREDEFINED for device in inventory.usable):
        return {}
    return {labels.UNIT_VARIABLE: labels.unit_instances(countable(inventory))}


def countable(inventory: Inventory) -> set[str]:
    """The resources that are counted by device: the machine's own, and those of the installed plug-ins."""
    known = {report.resource for report in inventory.vendors if report.resource}
    return known | {device.resource for device in inventory.devices} | {labels.PREDEFINED}


def _kept_from_ray(inventory: Inventory, devices: Sequence[Device]) -> tuple[dict[str, str], list[str]]:
    """Keep Ray from masks where several vendors share a resource: it would number one vendor's devices as another's."""
    kept: dict[str, str] = {}
    notes = []
    for resource, own in labels.by_resource(devices).items():
        vendors = sorted({device.vendor for device in own if not device.declared})
        if len(vendors) > 1:
            switches = (labels.mask_switch(report) for report in map(inventory.report, vendors) if report)
            kept |= {switch: "1" for switch in switches if switch}
            notes.append(
                f"{resource} of this node are of {' and '.join(vendors)}, and Ray's own tasks see all of them: to Ray"
                " a resource is one vendor's. Calls of a Pool see theirs alone."
            )
    return kept, notes
