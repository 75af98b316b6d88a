"""LSF: sections of lsf.shared, which defines resources, and of lsf.cluster, with the quantities of a host.

A resource is named ``accel_RESOURCE``, since LSF uses ``ngpus`` and the like itself, and the type of its devices
``acceltype_RESOURCE``.
"""

from __future__ import annotations

from anyaccel.model import Device

from anyaccel_export.source import Export, ExportSource
from anyaccel_export.text import by_resource, only_type, slug, unique_names

_LONGEST = 32
"""Longest name of a resource: LSF takes 39 characters, and the prefix needs some of them."""


def resource_map(source: ExportSource) -> Export:
    """Write the section ResourceMap, for lsf.cluster."""
    lines = [f"{'RESOURCENAME':<40} LOCATION"]
    for name, devices in _named(source).items():
        kind = slug(only_type(devices), "a-z0-9_", "_")
        lines.append(f"{name:<40} ({len(devices)}@[{source.node}])")
        lines.append(f"{_type_of(name):<40} ({kind}@[{source.node}])")
    return _section("ResourceMap", lines)


def resources(source: ExportSource) -> Export:
    """Write the section Resource, for lsf.shared."""
    lines = [f"{'RESOURCENAME':<40} TYPE    INTERVAL INCREASING CONSUMABLE DESCRIPTION"]
    for name in _named(source):
        lines.append(f"{name:<40} Numeric ()       N          Y          (devices)")
        lines.append(f"{_type_of(name):<40} String  ()       ()         ()         (type of the devices or mixed)")
    return _section("Resource", lines)


def _named(source: ExportSource) -> dict[str, list[Device]]:
    found = by_resource(source.devices)
    names = unique_names(found, allowed="a-z0-9_", most=_LONGEST - len("accel_"))
    # unique_names() joins its checksum with a hyphen, which LSF does not accept.
    return {f"accel_{names[resource].replace('-', '_')}": devices for resource, devices in found.items()}


def _type_of(name: str) -> str:
    return f"acceltype_{name.removeprefix('accel_')}"


def _section(name: str, lines: list[str]) -> Export:
    if len(lines) == 1:  # only the heading
        return Export(text="")
    return Export(text="".join(f"{line}\n" for line in (f"Begin {name}", *lines, f"End {name}")))
