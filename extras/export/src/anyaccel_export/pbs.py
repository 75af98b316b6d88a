"""PBS: a vnode definition (version 2), as ``pbs_mom -s insert NAME FILE`` reads it.

A resource is named ``nRESOURCEs``, so GPUs are ``ngpus``, as sites name them.
"""

from __future__ import annotations

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import by_resource, only_type, slug

_BUILT_IN = "ncpus"  # counted by PBS itself


def export(source: ExportSource) -> Export:
    """Write the definition: the quantity of each resource, and the type of the devices."""
    counts: dict[str, int] = {}
    for resource, devices in by_resource(source.devices).items():
        name = _name(resource)
        counts[name] = counts.get(name, 0) + len(devices)  # two resources may get the same name
    lines = ["$configversion 2", *(f"{source.node}: resources_available.{name}={n}" for name, n in counts.items())]
    notes: list[str] = []
    if counts:
        kind = only_type(source.devices)
        lines.append(f"{source.node}: resources_available.accelerator_type={slug(kind, 'a-z0-9_-')}")
        created = [f'qmgr -c "create resource {name} type=long,flag=nh"' for name in counts]
        created.append('qmgr -c "create resource accelerator_type type=string,flag=h"')
        notes.append(f"PBS must know these resources: {'; '.join(created)}; add them to 'resources' in sched_config.")
    return Export(text="".join(f"{line}\n" for line in lines), notes=tuple(notes))


def _name(resource: str) -> str:
    name = slug(resource, "a-z0-9_", "_")
    # Sites call GPUs ngpus: the plural of a resource that ends in s is not marked twice.
    found = f"n{name}" if name.endswith("s") else f"n{name}s"
    return f"naccelerator_{name}s" if found == _BUILT_IN else found
