"""What a container with devices needs, from the edits of the vendors' plug-ins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anyaccel.errors import EnvConflictError
from anyaccel.model import ContainerEdits, Device
from anyaccel.vendors import vendor_process


def container(devices: Iterable[Device]) -> ContainerEdits:
    """Return the device nodes, mounts, groups and variables that a container with the devices needs.

    Args:
        devices: The devices of one container, of any vendors. A mask is right for exactly these. Declared devices,
            which no plug-in knows, need nothing.

    Raises:
        EnvConflictError: If two vendors set one variable differently.
        PluginError: If a plug-in is not installed, or cannot answer.

    Examples:
        >>> edits = anyaccel.container(anyaccel.detect("sim:TPU-V4:4").devices[:1])
        >>> edits.nodes
        ('/dev/accel0',)
    """
    by_vendor: dict[str, list[Device]] = {}
    for device in devices:
        if not device.declared:  # by the administrator: no plug-in knows them
            by_vendor.setdefault(device.vendor, []).append(device)
    return merge_edits({vendor: vendor_process(vendor).container(tuple(own)) for vendor, own in by_vendor.items()})


def merge_edits(edits: Mapping[str, ContainerEdits]) -> ContainerEdits:
    """Merge the container edits of several vendors: each node, group and mount target once, groups sorted.

    Of different mounts at one target, the last vendor's is kept.

    Raises:
        EnvConflictError: If two vendors set one variable differently.
    """
    env: dict[str, str] = {}
    owner: dict[str, str] = {}
    for vendor, edit in edits.items():
        for name, value in edit.env.items():
            if env.setdefault(name, value) != value:
                raise EnvConflictError(
                    f"{owner[name]} and {vendor} set the variable {name} differently in a container"
                    f" ({env[name]!r} and {value!r}), so one container cannot hold both",
                    hint="set ANYACCEL_PLUGINS to one",
                )
            owner.setdefault(name, vendor)
    all_of_them = edits.values()
    return ContainerEdits(
        nodes=tuple(dict.fromkeys(node for edit in all_of_them for node in edit.nodes)),
        # By target: two vendors may mount the same library, and a container refuses a second mount there.
        mounts=tuple({mount.target: mount for edit in all_of_them for mount in edit.mounts}.values()),
        env=env,
        groups=tuple(sorted({group for edit in all_of_them for group in edit.groups})),
    )
