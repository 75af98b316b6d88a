"""HyperQueue: the command that starts a worker with the devices as indexed resources, grouped by NUMA node.

A resource is named ``KINDs/VENDOR``. HyperQueue knows some of these names and puts a task's values into the mask of
that vendor's runtime; so a value is the device's name in the vendor's own mask: the id if the mask takes ids, else the
index. Tasks find the values of every resource in ``HQ_RESOURCE_VALUES_KINDs_VENDOR``.
"""

from __future__ import annotations

from collections.abc import Collection

from anyaccel.model import Device, EnvEdits

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import shell_join, slug


def export(source: ExportSource) -> Export:
    """Write the command, on one line."""
    groups: dict[str, dict[int | None, list[str]]] = {}
    owned = {report.vendor: report.env_vars for report in source.inventory.vendors}
    for device in source.devices:
        label = _label(device, source.environments[device.id], owned.get(device.vendor, ()))
        groups.setdefault(_name(device), {}).setdefault(device.numa_node, []).append(_quoted(label))
    words = ["hq", "worker", "start", "--detect-resources=cpus,mem"]
    notes: list[str] = []
    for name, numa in groups.items():
        # A list of lists is HyperQueue's form of groups: a task's devices come from as few groups as possible.
        lists = [f"[{','.join(labels)}]" for labels in numa.values()]
        words.append(f"--resource={name}={lists[0] if len(lists) == 1 else '[' + ','.join(lists) + ']'}")
        if len(lists) > 1:
            nodes = ", ".join("unknown" if node is None else str(node) for node in numa)
            notes.append(
                f"The groups of {name} are those of NUMA nodes {nodes}: add --coupling, such as cpus[0]:{name}[0],"
                " where the worker's CPUs are in groups too."
            )
    return Export(text=f"{shell_join(words)}\n", notes=tuple(notes))


def _name(device: Device) -> str:
    """Return a name for HyperQueue: letters, digits and slashes, beginning with a letter."""
    kind, vendor = (slug(part, "A-Za-z0-9", "").replace("-", "") for part in (device.kind, device.vendor))
    return f"{kind}s/{vendor}"


def _label(device: Device, edits: EnvEdits, owned: Collection[str]) -> str:
    """Return the device's name in the vendor's mask. Only variables of the plug-in are masks: our own name ids, too."""
    values = {value for name, value in edits.set.items() if name in owned}
    names = (device.id, device.raw_id, str(device.index))
    return next((name for name in names if name in values), device.id)  # a mask by prefix or none: the id is unique


def _quoted(label: str) -> str:
    return f'"{label}"' if set(label) & set("[],") else label
