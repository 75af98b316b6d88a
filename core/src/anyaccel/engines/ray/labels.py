"""What a Ray node says of its devices: quantities, accelerator types, labels, and what is counted device by device.

The label ``anyaccel/RESOURCE`` names the type of the devices that are counted under a resource. Ray gives a call whole
slots of a resource and knows nothing of their types, so a node with several types under one resource cannot serve a
request for one of them: it is labeled :data:`MIXED`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from anyaccel.model import Device, Inventory, PluginInfo, VendorReport
from anyaccel.scheduler.filters import shared_facts

PREFIX = "anyaccel/"
MIXED = "mixed"
"""Value of the label where a resource has devices of several types."""
TYPE_PREFIX = "accelerator_type:"
TYPE_SHARE = 0.001
"""How much of ``accelerator_type:TYPE`` a call asks for, of the 1 that a node has: what Ray itself asks for."""
UNIT_VARIABLE = "RAY_custom_unit_instance_resources"
PREDEFINED = "GPU"
"""The resource that has an option of its own and is always counted device by device."""
_LONGEST = 63
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


def mask_switch(vendor: PluginInfo | VendorReport) -> str:
    """The variable that keeps Ray from writing the mask of a vendor's devices; empty where they have no mask."""
    return vendor.ray_switch or "".join(f"RAY_EXPERIMENTAL_NOSET_{name}" for name in vendor.env_vars[:1])


def by_resource(devices: Iterable[Device]) -> dict[str, list[Device]]:
    """The devices by resource. Slot i of a resource is the i-th of its devices, on the node as in the worker.

    Ray gives out whatever it counts. Of a device and its parts only the parts are counted.
    """
    known = tuple(devices)
    divided = {device.parent for device in known}
    found: dict[str, list[Device]] = {}
    for device in known:
        if device.id not in divided:
            found.setdefault(device.resource, []).append(device)
    return found


def node_resources(devices: Sequence[Device]) -> dict[str, int]:
    """Quantities of a node: the devices of each resource, and 1 of ``accelerator_type:TYPE`` for each type."""
    counted = by_resource(devices)
    quantities = {resource: len(own) for resource, own in counted.items()}
    return quantities | {f"{TYPE_PREFIX}{device.type}": 1 for own in counted.values() for device in own}


def node_labels(inventory: Inventory) -> dict[str, str]:
    """Labels of a node: the type of the devices of each resource, or :data:`MIXED`, and what all of them have."""
    labels = {}
    for resource, own in by_resource(inventory.usable).items():
        labels[label_name(resource)] = type_label(own)
        facts = shared_facts(own, inventory)
        labels |= {label_name(resource, name): label_value(facts[name]) for name in sorted(facts)}
    return labels


def label_name(resource: str, filter_name: str = "") -> str:
    """The label that says of which type the devices of a resource are, or what they all have that a filter asks for."""
    return PREFIX + label_value(resource) + (f".{filter_name}" if filter_name else "")


def label_value(text: str) -> str:
    """Text as the value of a label: letters, digits and ``. _ -``, at most 63, the first and last no sign."""
    return _UNFIT.sub("-", text).strip("-_.")[:_LONGEST].rstrip("-_.") or "x"


def among(values: Iterable[str]) -> str:
    """What a selector says of a label that must have one of some values."""
    (*others, last) = values
    return f"in({','.join((*others, last))})" if others else last


def satisfies(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node has the labels that a selector of ours asks for."""
    for name, wanted in selector.items():
        values = wanted.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
        if (labels.get(name) in values) == wanted.startswith("!"):
            return False
    return True


def type_label(devices: Iterable[Device]) -> str:
    """What the label says of devices of one resource."""
    types = {label_value(device.type) for device in devices}
    return types.pop() if len(types) == 1 else MIXED


def unit_instances(resources: Iterable[str]) -> str:
    """The value of :data:`UNIT_VARIABLE`: Ray's own list, which the variable replaces, then ours."""
    names = dict.fromkeys((*own_unit_instances(), *sorted(resources)))
    return ",".join(name for name in names if name != PREDEFINED)


def own_unit_instances() -> tuple[str, ...]:
    """The resources that Ray counts device by device where nobody tells it otherwise, but for the predefined one."""
    return tuple(Path(__file__).with_name("unit_instances.txt").read_text(encoding="ascii").split())
