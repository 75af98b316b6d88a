"""What a Ray node says of its devices: quantities, accelerator types, labels, slices, and what is counted one by one.

The label ``anyaccel/RESOURCE`` names the type of the devices that are counted under a resource. Ray gives a call whole
slots of a resource and knows nothing of their types, so a node with several types under one resource cannot serve a
request for one of them: it is labeled :data:`MIXED`.

A plug-in reports what a host knows about its slice, whose devices are wired together and are of use only together, as
attributes of the devices: ``slice_name``, ``worker_id``, ``pod_type`` and ``topology``. Resources and labels of slices
are named after the resource and the kind of the devices, which for the slices that Ray knows itself gives Ray's own
names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from anyaccel.model import Device, Inventory, PluginInfo, VendorReport
from anyaccel.scheduler.filters import shared_facts

PREFIX = "anyaccel/"
MIXED = "mixed"
"""Value of the label where a resource has devices of several types."""
TYPE_PREFIX = "accelerator_type:"
UNIT_VARIABLE = "RAY_custom_unit_instance_resources"
PREDEFINED = "GPU"
"""The resource that has an option of its own and is always counted device by device."""
_LONGEST = 63
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_SLICE_FACTS = ("slice_name", "worker_id", "topology", "pod_type")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Ray takes as a label's value."""


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
    suffix = f".{filter_name}" if filter_name else ""
    return PREFIX + label_value(resource, _LONGEST - len(suffix)) + suffix


def label_value(text: str, most: int = _LONGEST) -> str:
    """Text as the value of a label: so many letters, digits and ``. _ -`` at most, the first and last no sign."""
    return _UNFIT.sub("-", text).strip("-_.")[:most].rstrip("-_.") or "x"


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


def slice_resources(devices: Iterable[Device]) -> dict[str, int]:
    """Resources of a host that is part of a slice.

    The slice's name counts 1 on each of its hosts, so that all of them can be asked for; ``TPU-v6e-16-head`` and the
    like count 1 on worker 0, so that whoever holds it may have the slice. There is none unless name, worker and type
    are all known.

    Args:
        devices: The devices of the host.
    """
    devices = tuple(devices)
    taken = {device.resource for device in devices} | {"CPU", "GPU", "memory", "object_store_memory"}
    found: dict[str, int] = {}
    for device, facts in _slices(devices):
        if {"slice_name", "worker_id", "pod_type"} <= facts.keys() and facts["slice_name"] not in taken:
            found[facts["slice_name"]] = 1
            if facts["worker_id"] == "0":
                found[head_resource(device.resource, facts["pod_type"])] = 1
    return found


def slice_labels(devices: Iterable[Device]) -> dict[str, str]:
    """Labels of a host that is part of a slice, such as ``ray.io/tpu-slice-name``: those that are known.

    Args:
        devices: The devices of the host.
    """
    return {
        slice_label(device.kind, fact): value for device, facts in _slices(devices) for fact, value in facts.items()
    }


def slice_label(kind: str, fact: str) -> str:
    """The label under which a host tells a fact about its slice."""
    return f"ray.io/{kind}-{fact.replace('_', '-')}"


def head_resource(resource: str, pod_type: str) -> str:
    """The resource of which the first host of a slice has one."""
    return f"{resource}-{pod_type}-head"


def _slices(devices: Iterable[Device]) -> Iterator[tuple[Device, Mapping[str, str]]]:
    """For each resource, one of its devices and what it knows about the slice; values that no label takes are left out.

    All devices of a host know the same.
    """
    seen: set[str] = set()
    for device in devices:
        if device.resource not in seen:
            seen.add(device.resource)
            texts = {name: str(device.attributes[name]) for name in _SLICE_FACTS if name in device.attributes}
            yield device, {name: text for name, text in texts.items() if _VALUE.fullmatch(text)}
