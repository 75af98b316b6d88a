"""What a container needs so that certain NPUs work inside."""

from __future__ import annotations

from collections.abc import Sequence

from anyaccel.plugin import ContainerEdits, Device, Mount

from anyaccel_ascend import environment, files

_NO_DVPP = ("950",)
"""Families without ``/dev/dvpp_cmdlist``."""


def edits(devices: Sequence[Device]) -> ContainerEdits:
    """Nodes, mounts and variables for exactly these devices.

    ``ASCEND_VISIBLE_DEVICES`` is for Ascend Docker Runtime, which mounts the devices that it names by physical number,
    and none for ``void``; other runtimes ignore it and go by the nodes. ``ASCEND_RT_VISIBLE_DEVICES`` is left out on
    purpose: inside, the runtime numbers what is mounted from 0, and sees all of it.
    """
    if not devices:
        return ContainerEdits(env={environment.CONTAINER: "void"})
    first = devices[0].attributes
    control = [path for path in str(first.get("control_nodes", "")).split(",") if path]
    if not control:
        control = [path for path in files.CONTROL_NODES if "dvpp" not in path or first.get("family") not in _NO_DVPP]
    paths = [path for path in str(first.get("host_paths", "")).split(",") if path] or files.HOST_PATHS[:4]
    partitions = sorted(number for device in devices if (number := environment.vnpu_id(device)) is not None)
    numbers = partitions or sorted({_physical(device) for device in devices})
    variables = {environment.CONTAINER: ",".join(map(str, numbers))}
    if partitions:
        variables[environment.CONTAINER_OPTIONS] = "VIRTUAL"
    return ContainerEdits(
        nodes=(*(node for device in devices for node in device.nodes), *control),
        mounts=tuple(Mount(source=path, target=path) for path in paths),
        env=variables,
    )


def _physical(device: Device) -> int:
    number = device.attributes.get("phy_id", device.index)
    return number if isinstance(number, int) else device.index
