"""HTCondor: the output of an inventory command, for ``MACHINE_RESOURCE_INVENTORY_GPUs`` and the like.

``DetectedGPUs`` lists the ids, and a nested ClassAd for each device has the properties that jobs may require, under the
names of ``condor_gpu_discovery``. A custom resource is named after the resource, in the plural.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from anyaccel.model import Device
from anyaccel.text import printable

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import slug, unique_names

_ID = "A-Za-z0-9_.:-"
_LONGEST = 128
_NUMBER = re.compile(r"(?![A-Za-z])|(true|false|undefined|error|inf|infinity|nan)\b", re.IGNORECASE)
"""Ids that HTCondor would evaluate: a list of a single such id would be a quantity."""
_RESERVED = {"cpus", "disks", "swaps", "mems", "memorys", "rams"}  # HTCondor's own resources, in the plural
_MIB = 1 << 20


def export(source: ExportSource) -> Export:
    """Write the ClassAd, an attribute on each line; empty without devices."""
    names = unique_names((device.id for device in source.devices), allowed=_ID, most=_LONGEST)
    ids = {
        device.id: f"{device.vendor}-{names[device.id]}" if _NUMBER.match(names[device.id]) else names[device.id]
        for device in source.devices
    }
    tags: dict[str, list[str]] = {}
    for device in source.devices:
        tags.setdefault(_tag(device.resource), []).append(ids[device.id])
    lines = [f"Detected{tag}={_string(', '.join(found))}" for tag, found in tags.items()]
    lines += [
        f"Device{number}=[ {' '.join(f'{name}={value};' for name, value in _properties(device, ids[device.id]))} ]"
        for number, device in enumerate(source.devices)
    ]
    note = "Each resource needs a line in HTCondor's configuration: " + "; ".join(
        f"MACHINE_RESOURCE_INVENTORY_{tag} = anyaccel export htcondor" for tag in tags
    )
    return Export(text="".join(f"{line}\n" for line in lines), notes=(note,) if tags else ())


def _tag(resource: str) -> str:
    name = slug(resource, "A-Za-z0-9_", "_")
    tag = name if name.endswith("s") else f"{name}s"  # 'request_gpus' finds 'GPUs', never 'GPU'
    return f"Accelerator{tag}" if tag.lower() in _RESERVED or not tag[0].isalpha() else tag


def _properties(device: Device, name: str) -> Iterator[tuple[str, str]]:
    yield "id", _string(name)
    yield "DeviceName", _string(device.model)
    yield "DeviceType", _string(device.type)
    yield "DeviceVendor", _string(device.vendor)
    yield "DeviceIndex", str(device.index)
    if device.memory_bytes is not None:
        yield "GlobalMemoryMb", str(device.memory_bytes // _MIB)
    if device.pci_bus_id is not None:
        yield "DevicePciBusId", _string(device.pci_bus_id)
    if device.numa_node is not None:
        yield "DeviceNumaNode", str(device.numa_node)


def _string(text: str) -> str:
    """Write a string. Older readers know a single escape, so characters that need another are replaced."""
    return '"' + printable(text).replace("\\", "/").replace('"', "'") + '"'
