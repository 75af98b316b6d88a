"""Slices: hosts whose devices are wired together and are of use only together, told to Ray as its own nodes tell it.

A plug-in reports what a host knows about its slice as attributes of the devices: ``slice_name``, ``worker_id``,
``pod_type`` and ``topology``. Resources and labels are named after the resource and the kind of the devices, which for
the slices that Ray knows itself gives Ray's own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from anyaccel.model import Device

_FACTS = ("slice_name", "worker_id", "topology", "pod_type")
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What Ray takes as a label's value."""


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
            texts = {name: str(device.attributes[name]) for name in _FACTS if name in device.attributes}
            yield device, {name: text for name, text in texts.items() if _VALUE.fullmatch(text)}
