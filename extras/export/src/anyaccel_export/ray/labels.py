"""Facts about the devices of a Ray node: quantities, accelerator types, labels, slices, and units.

The label ``anyaccel/RESOURCE`` has the type of the devices of a resource. Ray gives a call whole slots of a resource
without regard to types, so a node with several types under one resource cannot serve a request for one of them: its
label is :data:`MIXED`.

A plug-in reports a host's slice, whose devices are wired together and only useful together, as attributes of the
devices: ``slice_name``, ``worker_id``, ``pod_type`` and ``topology``. Resources and labels of slices are named after
the resource and kind of the devices, which gives Ray's own names for the slices that Ray knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from anyaccel.model import Device, Inventory, PluginInfo, VendorReport
from anyaccel.scheduler import shared_facts

from anyaccel_export.text import by_resource

PREFIX = "anyaccel/"
MIXED = "mixed"
"""Value of the label of a resource with devices of several types."""
TYPE_PREFIX = "accelerator_type:"
UNIT_VARIABLE = "RAY_custom_unit_instance_resources"
PREDEFINED = "GPU"
"""The resource with an option of its own, which Ray always counts by device."""
_LONGEST = 63  # Ray follows the syntax of labels in Kubernetes
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
_SLICE_FACTS = ("slice_name", "worker_id", "topology", "pod_type")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Values of labels that Ray accepts."""


def mask_switch(vendor: PluginInfo | VendorReport) -> str:
    """Return the variable that keeps Ray from writing the mask of a vendor's devices; empty without a mask."""
    return vendor.ray_switch or "".join(f"RAY_EXPERIMENTAL_NOSET_{name}" for name in vendor.env_vars[:1])


def node_resources(devices: Sequence[Device]) -> dict[str, int]:
    """Return the quantities of a node: the devices of each resource, and 1 of ``accelerator_type:TYPE`` per type."""
    counted = by_resource(devices)
    quantities = {resource: len(own) for resource, own in counted.items()}
    return quantities | {f"{TYPE_PREFIX}{device.type}": 1 for own in counted.values() for device in own}


def node_labels(inventory: Inventory) -> dict[str, str]:
    """Return the labels of a node: the type of each resource's devices, or :data:`MIXED`, and common facts."""
    labels = {}
    for resource, own in by_resource(inventory.usable).items():
        labels[label_name(resource)] = type_label(own)
        facts = shared_facts(own, inventory)
        labels |= {label_name(resource, name): label_value(facts[name]) for name in sorted(facts)}
    return labels


def label_name(resource: str, filter_name: str = "") -> str:
    """Return the label with the type of a resource's devices, or with their common fact for a filter."""
    suffix = f".{filter_name}" if filter_name else ""
    return PREFIX + label_value(resource, _LONGEST - len(suffix)) + suffix


def label_value(text: str, most: int = _LONGEST) -> str:
    """Return a text as a value of a label: letters, digits and ``. _ -``, with no sign at the ends."""
    return _UNFIT.sub("-", text).strip("-_.")[:most].rstrip("-_.") or "x"


def type_label(devices: Iterable[Device]) -> str:
    """Return the value of a label for devices of one resource."""
    types = {label_value(device.type) for device in devices}
    return types.pop() if len(types) == 1 else MIXED


def unit_instances(resources: Iterable[str]) -> str:
    """Return the value of :data:`UNIT_VARIABLE`: Ray's own list, which the variable replaces, then ours."""
    names = dict.fromkeys((*own_unit_instances(), *sorted(resources)))
    return ",".join(name for name in names if name != PREDEFINED)


def own_unit_instances() -> tuple[str, ...]:
    """Return the resources that Ray counts by device by default, without the predefined one."""
    return tuple(Path(__file__).with_name("unit_instances.txt").read_text(encoding="ascii").split())


def slice_resources(devices: Iterable[Device]) -> dict[str, int]:
    """Return the resources of a host in a slice.

    The slice's name counts 1 on each of its hosts, so that a gang can ask for the whole slice; ``TPU-v6e-16-head`` and
    the like count 1 on worker 0, so that a single holder gets the slice. There is none unless name, worker and type are
    known.

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
    """Return the known labels of a host in a slice, such as ``ray.io/tpu-slice-name``.

    Args:
        devices: The devices of the host.
    """
    return {
        slice_label(device.kind, fact): value for device, facts in _slices(devices) for fact, value in facts.items()
    }


def slice_label(kind: str, fact: str) -> str:
    """Return the label for a fact about a host's slice."""
    return f"ray.io/{kind}-{fact.replace('_', '-')}"


def head_resource(resource: str, pod_type: str) -> str:
    """Return the resource of a slice's first host."""
    return f"{resource}-{pod_type}-head"


def _slices(devices: Iterable[Device]) -> Iterator[tuple[Device, Mapping[str, str]]]:
    """Yield a device of each resource with its facts about the slice, without values that no label accepts.

    The devices of a host know the same facts.
    """
    seen: set[str] = set()
    for device in devices:
        if device.resource not in seen:
            seen.add(device.resource)
            texts = {name: str(device.attributes[name]) for name in _SLICE_FACTS if name in device.attributes}
            yield device, {name: text for name, text in texts.items() if _VALUE.fullmatch(text)}
