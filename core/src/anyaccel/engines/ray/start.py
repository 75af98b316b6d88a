"""How a machine becomes a node of Ray: what ``ray start`` is told about its devices.

The result holds for calls of ours, which look into the snapshot of the node, and is as good as Ray allows for calls
that know nothing of us: these get the masks that Ray itself writes, and where those would be wrong, none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from anyaccel.engines.ray import authentication, labels
from anyaccel.errors import PluginError, UsageError
from anyaccel.model import Device, EnvContext, Health, Inventory, Share, Value, replace
from anyaccel.text import shell_join
from anyaccel.vendors.process import vendor_process

TYPE_LABEL = "ray.io/accelerator-type"


class Node(Value):
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
    environ: Mapping[str, str] | None = None,
) -> Node:
    """Say what Ray should be told about a machine.

    Args:
        inventory: What is on it; see :func:`narrowed` for giving Ray less.
        resources: Further resources that somebody wants the node to have; they win.
        node_labels: Further labels; they win.
        environ: The environment in which the node starts; when given, masks are set for devices that are broken, and
            a token of Ray's that is there is used.

    Raises:
        UsageError: When the environment asks for a token of Ray's, and there is none.
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
    masks, more = ({}, []) if environ is None else _masks(inventory, devices, environ)
    token = {} if environ is None else authentication.variables(environ)
    if token and environ is not None:
        words = " ".join(f"{name}={value}" for name, value in token.items())
        source = authentication.token_source(environ)
        more.append(
            f"this node asks for the token of Ray's in {source}. A Pool shows it by itself; a program of Ray's own that"
            f" names an address needs {words} in its environment."
        )
    return Node(
        gpus=gpus,
        resources=quantities,
        labels={**labels.node_labels(inventory), **own, **labels.slice_labels(devices), **(node_labels or {})},
        variables={**variables, **kept, **masks, **token},
        notes=(*notes, *more),
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


def narrowed(inventory: Inventory, quantities: Mapping[str, float]) -> Inventory:
    """Leave of each resource only the first so many devices; resources that are not named stay as they are.

    Args:
        inventory: What is on the machine.
        quantities: Devices to leave by resource; what is not counted by device does not matter here.

    Raises:
        UsageError: When more are asked for than there are, or a part of one.
    """
    have = labels.by_resource(inventory.usable)
    left_out: set[str] = set()
    for resource in sorted(countable(inventory) & quantities.keys()):
        quantity, own = quantities[resource], have.get(resource, [])
        if quantity != int(quantity):
            raise UsageError(
                f"a node has whole devices: the quantity of {resource} must be a whole number (got {quantity})"
            )
        if quantity > len(own):
            raise UsageError(
                f"this node cannot have {int(quantity)} {resource}: it has {len(own)} that may be given out (see"
                f" 'anyaccel'); ask for fewer, or add '--declare {resource}={int(quantity)}' where they are there and"
                " cannot be found"
            )
        left_out.update(device.id for device in own[int(quantity) :])
    devices = tuple(replace(device, visible=False) if device.id in left_out else device for device in inventory.devices)
    return replace(inventory, devices=devices)


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


def _masks(
    inventory: Inventory, devices: Sequence[Device], environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Hide broken devices from Ray's own tasks: Ray counts slots from the first device on, whatever its health."""
    masks: dict[str, str] = {}
    notes = []
    broken = {device.vendor for device in inventory.devices if device.visible and device.health is Health.UNHEALTHY}
    for vendor in sorted(broken):
        everything = inventory.of_vendor(vendor)
        own = tuple(device for device in devices if device.vendor == vendor)
        shares = {device.id: Share(device=device, memory_bytes=device.memory_bytes) for device in own}
        try:
            edits = vendor_process(vendor).env(
                own, EnvContext(devices=everything, shares=shares, environ=environ, mask="index")
            )
        except PluginError as error:
            notes.append(f"Ray's own tasks may be given broken devices of {vendor}, which cannot be hidden: {error}")
        else:
            masks |= edits.set
    return masks, notes
