"""A machine as a node of Ray: the arguments and variables of ``ray start``.

The result is exact for calls of anyaccel, which read the snapshot of the node. For other calls Ray itself writes the
masks; masks that would be wrong are disabled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from anyaccel.model import Device, Inventory, Value

from anyaccel_export.ray import labels
from anyaccel_export.text import by_resource, shell_join

TYPE_LABEL = "ray.io/accelerator-type"


class RayNode(Value):
    """Description of a machine for Ray.

    Attributes:
        gpus: Number of devices of the predefined resource.
        resources: Quantities of other resources.
        labels: Labels of the node.
        variables: Variables of the node's processes.
        notes: Sentences for the user.
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
        """Return the whole command, for a shell."""
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return shell_join([*(["env", *variables] if variables else []), "ray", "start", *self.arguments, *options])


def describe(
    inventory: Inventory,
    *,
    resources: Mapping[str, float] | None = None,
    node_labels: Mapping[str, str] | None = None,
) -> RayNode:
    """Describe a machine for Ray.

    Args:
        inventory: The machine.
        resources: Further resources of the node; they win.
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
    """Return the variables for giving out devices one by one; empty if Ray does so by default."""
    if all(device.resource == labels.PREDEFINED for device in inventory.usable):
        return {}
    return {labels.UNIT_VARIABLE: labels.unit_instances(countable(inventory))}


def countable(inventory: Inventory) -> set[str]:
    """Return the resources counted by device: the machine's own, and those of installed plug-ins."""
    known = {report.resource for report in inventory.vendors if report.resource}
    return known | {device.resource for device in inventory.devices} | {labels.PREDEFINED}


def _kept_from_ray(inventory: Inventory, devices: Sequence[Device]) -> tuple[dict[str, str], list[str]]:
    """Disable Ray's masks for a resource with several vendors: Ray would apply one vendor's numbers to another's."""
    kept: dict[str, str] = {}
    notes = []
    for resource, own in by_resource(devices).items():
        vendors = sorted({device.vendor for device in own if not device.declared})
        if len(vendors) > 1:
            switches = (labels.mask_switch(report) for report in map(inventory.report, vendors) if report)
            kept |= {switch: "1" for switch in switches if switch}
            notes.append(
                f"{resource} of this node are of {' and '.join(vendors)}, and Ray's own tasks see all of them: to Ray"
                " a resource is one vendor's. Calls of a Pool see theirs alone."
            )
    return kept, notes
