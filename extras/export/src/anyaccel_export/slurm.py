"""Slurm: lines for gres.conf, and the node's line for slurm.conf.

A generic resource is named after the resource in lower case, its type after the accelerator type. The device files are
those of no other device: with ``ConstrainDevices=yes`` a job without the device cannot open them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from anyaccel.errors import UsageError
from anyaccel.model import Device, Fractional, format_slots

from anyaccel_export.source import Export, ExportSource, own_nodes
from anyaccel_export.text import by_resource, comment, slug

_FILE = re.compile(r"/[A-Za-z0-9_./:@+-]*")
"""Paths that gres.conf reads literally: brackets and commas mean several files, a blank or ``#`` ends the value."""
_SHARED_NAME = "gpu"
"""The only resource with shards in Slurm."""


def gres_conf(source: ExportSource) -> Export:
    """Write the node's lines of gres.conf. Each line names the node, so that one file can serve a cluster."""
    machine = comment(source.inventory.machine)
    lines = [f"# {machine}: written by anyaccel export slurm; slurm.conf needs what slurm-node prints"]
    notes: list[str] = []
    files = _files(source)
    for name, devices in _named(source).items():
        if all(files[device.id] for device in devices):  # Slurm wants files for each device of a name, or for none
            lines += [_device_line(source, name, device, devices, files[device.id]) for device in devices]
            continue
        without = next(device for device in devices if not files[device.id])
        notes.append(
            f"{name} is counted without device files, because {without.id} has none of its own that gres.conf"
            " can name: Slurm cannot keep jobs from devices that they were not given; start them with 'anyaccel run'."
        )
        lines += [f"NodeName={source.node} Name={name} Type={kind} Count={n}" for kind, n in _types(devices).items()]
    lines += _shard_lines(source, files)
    return Export(text="".join(f"{line}\n" for line in lines), notes=tuple(notes))


def node_line(source: ExportSource) -> Export:
    """Write the node's line of slurm.conf, and the names of the resources."""
    named = _named(source)
    gres = [f"{name}:{kind}:{n}" for name, devices in named.items() for kind, n in _types(devices).items()]
    names = list(named)
    shards = source.shards * len(list(_shardable(source)))
    if shards:
        gres.append(f"shard:{shards}")
        names.append("shard")
    if not gres:
        return Export(text=f"NodeName={source.node}\n")
    note = "Add CPUs, RealMemory and the like to the node's line, as 'slurmd -C' prints them there."
    return Export(
        text=f"GresTypes={','.join(names)}\nNodeName={source.node} Gres={','.join(gres)}\n",
        notes=(note,),
    )


def _named(source: ExportSource) -> dict[str, list[Device]]:
    named: dict[str, list[Device]] = {}
    for resource, devices in by_resource(source.devices).items():
        named.setdefault(slug(resource, "a-z0-9_", "_"), []).extend(devices)
    return named


def _type(device: Device) -> str:
    return slug(device.type, "a-z0-9_.-")


def _types(devices: Sequence[Device]) -> dict[str, int]:
    return Counter(map(_type, devices))


def _files(source: ExportSource) -> dict[str, tuple[str, ...]]:
    return {
        device_id: nodes if all(map(_FILE.fullmatch, nodes)) else ()
        for device_id, nodes in own_nodes(source.inventory).items()
    }


def _device_line(source: ExportSource, name: str, device: Device, peers: Sequence[Device], nodes: Sequence[str]) -> str:
    # Slurm marks the device itself with -1 in its own list, and compares the other numbers only.
    links = ["-1" if peer.id == device.id else str(max(0, device.links.get(peer.id, 0))) for peer in peers]
    linked = any(int(strength) > 0 for strength in links)
    option = "File" if len(nodes) == 1 else "MultipleFiles"
    line = f"NodeName={source.node} Name={name} Type={_type(device)} {option}={','.join(nodes)}"
    near = () if device.numa_node is None else source.cores.get(device.numa_node, ())
    if near:
        line = f"{line} Cores={format_slots(near)}"
    return f"{line} Links={','.join(links)}" if linked else line


def _shardable(source: ExportSource) -> Iterator[Device]:
    for device in _named(source).get(_SHARED_NAME, ()):
        if device.fractional is Fractional.SHARED:
            yield device


def _shard_lines(source: ExportSource, files: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of shards: for devices with one name and one file each; memory is shared by agreement."""
    if not source.shards:
        return
    devices = list(_shardable(source))
    alike = [device for device in devices if len(files[device.id]) == 1]
    if not devices or len(alike) < len(devices):  # a shard without a device file belongs to no device
        raise UsageError(
            f"Slurm cuts only devices that it calls {_SHARED_NAME}, can be shared and have one device file each"
            f" ({len(alike)} of the {len(source.devices)} devices here are such); leave --shards out"
        )
    for device in devices:
        yield f"NodeName={source.node} Name=shard Count={source.shards} File={files[device.id][0]}"
