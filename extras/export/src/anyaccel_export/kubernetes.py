"""Kubernetes: the objects of a driver for dynamic resource allocation on a node (resource.k8s.io/v1).

One driver, ``anyaccel``, and one pool per node. Each resource has a DeviceClass for claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyaccel.model import Device

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import by_resource, slug, to_yaml, unique_names

DRIVER = "anyaccel"
API = "resource.k8s.io/v1"
MOST_DEVICES = 128
"""Most devices in a slice, by the API; a pool may have several slices."""
MOST_FACTS = 32
"""Most attributes and capacities of a device together, by the API."""
MOST_CHARACTERS = 64
"""Longest text of an attribute in bytes, by the API."""
_LABEL = 63
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
"""Names of attributes that the API takes."""
_INT64 = 1 << 63


def export(source: ExportSource) -> Export:
    """Write ResourceSlices and DeviceClasses, as documents of one YAML stream."""
    node = slug(source.node, "a-z0-9.-")
    names = unique_names((device.id for device in source.devices), allowed="a-z0-9-", most=_LABEL)
    notes: list[str] = []
    devices = [_device(device, source.facts.get(device.id, {}), names[device.id], notes) for device in source.devices]
    chunks = [devices[at : at + MOST_DEVICES] for at in range(0, len(devices), MOST_DEVICES)] or [[]]
    documents = [_slice(node, chunk, number, len(chunks)) for number, chunk in enumerate(chunks)]
    classes = unique_names(by_resource(source.devices), allowed="a-z0-9-", most=_LABEL)
    # Classes do not depend on the machine: the file of each node has the same, and applying it again changes nothing.
    documents += [_device_class(resource, name) for resource, name in classes.items()]
    text = "---\n".join(to_yaml(document) for document in documents)
    return Export(text=text, notes=tuple(dict.fromkeys(notes)))


def _slice(node: str, devices: Sequence[dict[str, Any]], number: int, count: int) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-{DRIVER}-{number}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": count},
            "devices": devices,
        },
    }


def _device(device: Device, facts: Mapping[str, str], name: str, notes: list[str]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for key, value in _facts(device, facts):
        if isinstance(value, str) and len(value.encode(errors="replace")) > MOST_CHARACTERS:
            notes.append(f"Attributes longer than {MOST_CHARACTERS} bytes are left out, such as {key} of {device.id}.")
        elif len(attributes) < MOST_FACTS - 1 and key not in attributes:  # one place is for the capacity
            attributes[key] = attribute_value(value)
    entry: dict[str, Any] = {"name": name, "attributes": attributes}
    if device.memory_bytes is not None:
        entry["capacity"] = {"memory": {"value": str(device.memory_bytes)}}
    return entry


def _facts(device: Device, facts: Mapping[str, str]) -> Iterator[tuple[str, str | float | bool]]:
    """Yield the facts for selectors of claims: our own, facts of filters, then the vendor's, in this order."""
    yield from own_facts(device)
    yield from facts.items()
    yield from vendor_facts(device)


def own_facts(device: Device) -> Iterator[tuple[str, str | float | bool]]:
    """Yield the facts for selectors of claims that each device has, the most useful first, then the known places."""
    yield "id", device.id
    yield "vendor", device.vendor
    yield "resource", device.resource
    yield "kind", device.kind
    yield "type", device.type
    yield "model", device.model
    yield "index", device.index
    yield "fractional", device.fractional.value
    if device.numa_node is not None:
        yield "numaNode", device.numa_node
    if device.pci_bus_id is not None:
        yield "pciBusID", device.pci_bus_id
    if device.parent is not None:
        yield "parent", device.parent


def vendor_facts(device: Device) -> Iterator[tuple[str, str | float | bool]]:
    """Yield the vendor's attributes whose names the API takes, by name."""
    yield from ((key, device.attributes[key]) for key in sorted(device.attributes) if IDENTIFIER.fullmatch(key))


def attribute_value(value: str | float | bool) -> dict[str, Any]:
    """Return the value of an attribute; floats and integers of more than 64 bits become texts."""
    if isinstance(value, bool):  # before int, of which bool is a subclass
        return {"bool": value}
    # The API has integers of 64 bits; a larger one would make the API server refuse the whole slice.
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return {"int": value}
    return {"string": str(value)}  # also floats: attributes have no such type


def _device_class(resource: str, name: str) -> dict[str, Any]:
    expression = (
        f'device.driver == "{DRIVER}" && device.attributes["{DRIVER}"].resource == "{resource}"'  # resource is a word
    )
    return {
        "apiVersion": API,
        "kind": "DeviceClass",
        "metadata": {"name": f"{DRIVER}-{name}"},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }
