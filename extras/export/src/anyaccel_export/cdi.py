"""Container Device Interface: a specification of the machine, which container engines read from /etc/cdi.

The kind is ``anyaccel/device`` for every vendor, since ids are unique on a machine: ``anyaccel/device=ID`` is one
device, ``anyaccel/device=VENDOR`` every device of a vendor, ``anyaccel/device=all`` every device.
"""

from __future__ import annotations

import json
from typing import Any

from anyaccel.errors import AnyaccelError, EnvConflictError
from anyaccel.launcher import merge_edits
from anyaccel.model import ContainerEdits, Device, replace

from anyaccel_export.source import Export, ExportSource, own_nodes
from anyaccel_export.text import slug, unique_names

KIND = "anyaccel/device"
_NAME = "A-Za-z0-9_.:-"
_LONGEST = 128
_FIRST_VERSION = "0.3.0"
_DIGITS_VERSION = "0.5.0"
_GROUPS_VERSION = "0.7.0"
"""CDI versions by feature: the first at all, names that begin with a digit, groups. Older readers refuse newer
versions, so a specification has the lowest version that it needs."""


def export(source: ExportSource) -> Export:
    """Write the specification.

    Raises:
        AnyaccelError: When there is nothing to write: a specification without devices is not valid.
    """
    notes: list[str] = []
    names = unique_names((device.id for device in source.devices), allowed=_NAME, most=_LONGEST)
    entries: dict[str, dict[str, Any]] = {}
    for device in source.devices:
        edits, dependent = _alone(source, device)
        entries[names[device.id]] = cdi_edits(edits)
        if dependent:
            notes.append(
                f"{names[device.id]} goes without {' and '.join(dependent)}, which would be wrong beside another device"
                f" in one container; {device.vendor} has it."
            )
    for vendor, edits in source.together.items():
        _add_group(entries, slug(vendor, _NAME), edits, notes)
    try:
        _add_group(entries, "all", merge_edits(source.together), notes)
    except EnvConflictError as error:
        notes.append(f"There is no {KIND}=all: {error}.")
    entries = {name: edits for name, edits in entries.items() if edits}  # edits that change nothing are not valid
    notes += [
        f"{device.id} is left out, because a container needs nothing for it."
        for device in source.devices
        if names[device.id] not in entries
    ]
    if not entries:
        raise AnyaccelError(
            "there is no device here that a container could be given, and a CDI specification must have one;"
            " see 'anyaccel' for what was found"
        )
    gids = any("additionalGids" in edits for edits in entries.values())
    digits = any(name[0].isdigit() for name in entries)
    specification = {
        "cdiVersion": _GROUPS_VERSION if gids else _DIGITS_VERSION if digits else _FIRST_VERSION,
        "kind": KIND,
        "devices": [{"name": name, "containerEdits": edits} for name, edits in entries.items()],
    }
    return Export(text=json.dumps(specification, indent=2) + "\n", notes=tuple(dict.fromkeys(notes)))


def _add_group(entries: dict[str, dict[str, Any]], name: str, edits: ContainerEdits, notes: list[str]) -> None:
    if name in entries:  # a device whose id is the name of a vendor, or "all": CDI permits each name once
        notes.append(f"{KIND}={name} is one device, and no name of several.")
        return
    entries[name] = cdi_edits(edits)  # one name for a vendor's devices, so that a mask is right for the set


def _alone(source: ExportSource, device: Device) -> tuple[ContainerEdits, list[str]]:
    """Return the edits for a device in a container that may hold others, and the variables left out.

    With two devices in one container, the last value of a variable wins. A mask for one device would hide the other, so
    if the device's own nodes limit access, a mask that depends on the set of devices is left out. Variables for a
    container runtime only add, and stay.
    """
    edits = source.alone[device.id]
    report = source.inventory.report(device.vendor)
    if not own_nodes(source.inventory)[device.id] or report is None:
        return edits, []
    together = source.together[device.vendor].env
    dependent = sorted(name for name in report.env_vars if name in edits.env and edits.env[name] != together.get(name))
    # A variable with the same value for one device and for all is no mask, and stays.
    env = {name: value for name, value in edits.env.items() if name not in dependent}
    return replace(edits, env=env), dependent


def cdi_edits(edits: ContainerEdits) -> dict[str, Any]:
    """Convert edits to CDI's form."""
    found = {
        "env": [f"{name}={value}" for name, value in edits.env.items()],
        "deviceNodes": [{"path": node} for node in edits.nodes],
        "mounts": [
            {
                "hostPath": mount.source,
                "containerPath": mount.target,
                # A set-uid file or a device node below the path must give the container no rights.
                "options": ["rbind", "nosuid", "nodev", "ro" if mount.read_only else "rw"],
            }
            for mount in edits.mounts
        ],
        "additionalGids": sorted(edits.groups),
    }
    return {name: value for name, value in found.items() if value}
