"""Devices of several vendors. No request gets such a device until only one plug-in is enabled."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from anyaccel.model import PCI_ADDRESS, Device, Health, replace
from anyaccel.vendors import DENY_VARIABLE

SYSFS = "/sys"
PCI_FUNCTIONS = f"{SYSFS}/bus/pci/devices"
PCI_FUNCTION = "PCI function"
DEVICE_NODE = "device node"

Claim = tuple[str, str]
"""A thing that belongs to one device, as a vendor says: its kind and name."""


def families(
    devices: Sequence[Device], control_nodes: Collection[str] = ()
) -> Iterator[tuple[list[Device], frozenset[str]]]:
    """Group a vendor's devices by physical device.

    Args:
        devices: All devices of the vendor.
        control_nodes: Device nodes that all devices of the vendor use.

    Yields:
        The listed devices of a physical device: itself, its parts, or both; and the device nodes that no other device
        of the vendor lists.
    """
    parents = {device.id: device.parent for device in devices}
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(_outermost(device.id, parents), []).append(device)
    nodes = [frozenset(node for device in group for node in device.nodes) for group in groups.values()]
    users = Counter(node for own in nodes for node in own)
    for group, listed in zip(groups.values(), nodes, strict=True):
        yield group, frozenset(node for node in listed if users[node] == 1 and node not in control_nodes)


def _outermost(device_id: str, parents: Mapping[str, str | None]) -> str:
    seen = {device_id}
    while (above := parents.get(device_id)) is not None and above not in seen:  # parents may form a circle
        seen.add(above)
        device_id = above
    return device_id


def place(node: str) -> str:
    """Return the sysfs directory of the device behind a device node, without opening the node.

    Returns:
        The directory of the PCI function, so that plug-ins agree whether they know the function or the node. Without a
        function, the directory of the device behind the node; empty where the kernel shows none.
    """
    try:
        status = os.stat(node)
    except OSError:
        return ""
    kind = "char" if stat.S_ISCHR(status.st_mode) else "block" if stat.S_ISBLK(status.st_mode) else ""
    path = f"{SYSFS}/dev/{kind}/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    if not kind or not os.path.exists(path):
        return ""
    path = os.path.realpath(path)
    # The last address is the function itself; bridges come before.
    functions = [part for part in path.split("/") if re.fullmatch(PCI_ADDRESS, part)]
    if functions:
        return f"{PCI_FUNCTIONS}/{functions[-1]}"
    parent = f"{path}/device"
    return os.path.realpath(parent) if os.path.isdir(parent) else path


def places(device: Device, own_nodes: Collection[str]) -> tuple[str, ...]:
    """Return the sysfs directories of a device: of the PCI function, or else of the nodes.

    Args:
        device: A device of this host.
        own_nodes: Device nodes of this device alone.
    """
    if device.pci_bus_id:  # also without such a directory: two vendors that name an address mean one device
        return (f"{PCI_FUNCTIONS}/{device.pci_bus_id}",)
    return tuple(dict.fromkeys(filter(None, (place(node) for node in device.nodes if node in own_nodes))))


def contest(
    found: Mapping[str, list[Device]], control_nodes: Mapping[str, Collection[str]], *, host: bool
) -> dict[str, list[Device]]:
    """Mark devices of several vendors as unhealthy, with every part of the physical device.

    Two vendors list a device if they name the same PCI function, part or id, or the same device node as the device's
    own.

    Args:
        found: The devices of each vendor, with the ids of the vendor.
        control_nodes: By vendor, the device nodes that all devices of the vendor use.
        host: Whether the devices are of this host, where sysfs shows the PCI function behind a node.
    """
    if sum(map(bool, found.values())) < 2:  # noqa: PLR2004 - one vendor contests nothing
        return dict(found)
    claimed: dict[tuple[str, str], set[Claim]] = {}
    vendors: dict[Claim, set[str]] = {}
    for vendor, devices in found.items():
        for family, nodes in families(devices, control_nodes.get(vendor, ())):
            claims = set(_claims(family, nodes, host=host))
            claimed |= {(vendor, device.id): claims for device in family}
            for claim in claims:
                vendors.setdefault(claim, set()).add(vendor)
    return {
        vendor: [_refuse_contested(device, claimed[vendor, device.id], vendors) for device in devices]
        for vendor, devices in found.items()
    }


def _claims(family: Sequence[Device], own_nodes: Collection[str], *, host: bool) -> Iterator[Claim]:
    for device in family:
        yield "id", device.id
        if device.parent is not None:
            yield "id", device.parent
        if device.pci_bus_id:
            yield PCI_FUNCTION, device.pci_bus_id
        elif host:
            for path in places(device, own_nodes):
                function = path.removeprefix(f"{PCI_FUNCTIONS}/")
                yield (PCI_FUNCTION, function) if function != path else ("device", path)
        yield from (("part", part) for part in device.occupies)
    yield from ((DEVICE_NODE, node) for node in own_nodes)


def _refuse_contested(device: Device, claims: Collection[Claim], vendors: Mapping[Claim, Collection[str]]) -> Device:
    """Make a device unhealthy if a further vendor has one of its claims; a PCI function is named first."""
    shared = sorted(claim for claim in claims if len(vendors[claim]) > 1)
    if not shared:
        return device
    kind, name = min(shared, key=lambda claim: claim[0] != PCI_FUNCTION)  # what lspci shows as well
    several = sorted({vendor for claim in shared for vendor in vendors[claim]})
    all_of_them = "both" if len(several) == 2 else "all"  # noqa: PLR2004 - both
    ways = " or ".join(f"{DENY_VARIABLE}={','.join(v for v in several if v != kept)}" for kept in several)
    return replace(
        device,
        health=Health.UNHEALTHY,
        health_reason=f"the plug-ins {' and '.join(several)} {all_of_them} list {kind} {name}",
        health_remedy=f"leave all but one of these plug-ins out: set {ways}, or uninstall them",
    )
