"""ResourceSlices of a node (resource.k8s.io/v1) as a pure function of its inventory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anyaccel.model import Device, Fractional, Inventory, Value
from anyaccel_export.kubernetes import (
    API,
    IDENTIFIER,
    MOST_CHARACTERS,
    MOST_FACTS,
    attribute_value,
    own_facts,
    vendor_facts,
)
from anyaccel_export.text import unique_names

DRIVER = "anyaccel.dev"
"""Name of the driver, and domain of its attributes and taints."""
STANDARD = "resource.kubernetes.io"
"""Domain of attributes that all drivers share, for ``matchAttribute`` across drivers."""
MOST_DEVICES = 64
"""Most devices in a slice if one of them has a taint or consumes counters, by the API; 128 otherwise."""
MOST_COUNTER_SETS = 8
LABEL = 63
_LEAST_SHARE = 1 << 20
"""Least memory of a share in bytes."""
_PARTS = "parts"
"""Name of the counter of a divided device: the whole consumes all of it, a part one unit."""


class Obstacle(Value):
    """Why a device cannot be given out now.

    Attributes:
        kind: ``unhealthy``, ``held``, ``drained`` or ``reserved``.
        reason: The reason, for people.
    """

    kind: str
    reason: str = ""


class Features(Value):
    """Optional features of the cluster; an API server drops the fields of missing features.

    Attributes:
        taints: Device taints. Without them, devices that cannot be given out are left out.
        counters: Shared counters of divided devices. Without them, a device with listed parts is left out.
        shares: Consumable capacity.
    """

    taints: bool = True
    counters: bool = True
    shares: bool = False


def device_names(inventory: Inventory) -> dict[str, str]:
    """Return the name of each device in the cluster, by id: a DNS label."""
    return dict(unique_names((device.id for device in inventory.devices), allowed="a-z0-9-", most=LABEL))


def make_slices(
    inventory: Inventory,
    node: str,
    *,
    generation: int = 1,
    obstacles: Mapping[str, Obstacle] | None = None,
    facts: Mapping[str, Mapping[str, str]] | None = None,
    roots: Mapping[str, str] | None = None,
    features: Features | None = None,
) -> list[dict[str, Any]]:
    """Return the ResourceSlices of a node's pool.

    Args:
        inventory: The machine.
        node: Name of the node, which is also the name of the pool.
        generation: Generation of the pool.
        obstacles: Devices that cannot be given out now, by id.
        facts: Facts of filters, by name, by device id.
        roots: PCIe root complexes, such as ``pci0000:00``, by device id.
        features: Optional features of the cluster.

    Returns:
        The slices: first those with devices, then those with counters, since a slice may not have both.
    """
    features = features or Features()
    obstacles, facts, roots = obstacles or {}, facts or {}, roots or {}
    # Of all devices, hidden ones too: a name must not depend on which devices are shown.
    names = device_names(inventory)
    parents = _parents(inventory)
    entries = []
    for device in inventory.devices:
        obstacle = obstacles.get(device.id)
        if not device.visible or (obstacle and not features.taints):
            continue
        if device.id in parents and not features.counters:
            continue
        entry = _device(device, names[device.id], facts.get(device.id, {}), roots.get(device.id, ""), features)
        if obstacle:
            entry["taints"] = [_taint(obstacle)]
        if consumed := _consumed(device, names, parents) if features.counters else []:
            entry["consumesCounters"] = consumed
        entries.append(entry)
    sets = [
        {"name": names[whole], "counters": {_PARTS: {"value": str(len(parts))}}}
        for whole, parts in (parents.items() if features.counters else ())
    ]
    chunks: list[dict[str, Any]] = [
        {"devices": entries[at : at + MOST_DEVICES]} for at in range(0, len(entries), MOST_DEVICES)
    ] or [{"devices": []}]
    chunks += [{"sharedCounters": sets[at : at + MOST_COUNTER_SETS]} for at in range(0, len(sets), MOST_COUNTER_SETS)]
    return [
        {
            "apiVersion": API,
            "kind": "ResourceSlice",
            "metadata": {"name": f"{node}-{DRIVER}-{number}"},
            "spec": {
                "driver": DRIVER,
                "nodeName": node,
                "pool": {"name": node, "generation": generation, "resourceSliceCount": len(chunks)},
                **chunk,
            },
        }
        for number, chunk in enumerate(chunks)
    ]


def _parents(inventory: Inventory) -> dict[str, list[str]]:
    """Return the ids of the visible parts of each divided device."""
    listed = {device.id for device in inventory.devices if device.visible}
    found: dict[str, list[str]] = {}
    for device in inventory.devices:
        if device.visible and device.parent in listed:
            found.setdefault(str(device.parent), []).append(device.id)
    return found


def _consumed(device: Device, names: Mapping[str, str], parents: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return the consumed counters: the whole counter set of a divided device, one unit of the parent for a part."""
    found = []
    if device.id in parents:
        found.append((device.id, len(parents[device.id])))
    if device.parent in parents:
        found.append((str(device.parent), 1))
    return [{"counterSet": names[whole], "counters": {_PARTS: {"value": str(count)}}} for whole, count in found]


def _taint(obstacle: Obstacle) -> dict[str, Any]:
    """Return the taint of a device that cannot be given out; running pods go on."""
    taint = {"key": f"{DRIVER}/{obstacle.kind}", "effect": "NoSchedule"}
    value = re.sub(r"[^A-Za-z0-9_.-]+", "-", obstacle.reason)[:LABEL].strip("-_.")
    return taint | ({"value": value} if value else {})


def _device(device: Device, name: str, facts: Mapping[str, str], root: str, features: Features) -> dict[str, Any]:
    """Return the entry of a device in a slice."""
    capacity = _capacity(device, shares=features.shares)
    attributes: dict[str, Any] = {}
    for key, value in _facts(device, facts, root):
        if _fits(value) and key not in attributes and len(attributes) + len(capacity) < MOST_FACTS:
            attributes[key] = attribute_value(value)
    entry: dict[str, Any] = {"name": name, "attributes": attributes}
    if capacity:
        entry["capacity"] = capacity
    if any("requestPolicy" in each for each in capacity.values()):
        entry["allowMultipleAllocations"] = True
    return entry


def _fits(value: str | float | bool) -> bool:
    """Return whether the API takes a value: texts of 1 to 64 bytes of UTF-8."""
    try:
        return not isinstance(value, str) or 0 < len(value.encode()) <= MOST_CHARACTERS
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _capacity(device: Device, *, shares: bool) -> dict[str, Any]:
    """Return the capacities of a device; those that a share consumes have a policy, and the whole as default.

    A share of a device with slots consumes slots, of another one memory.
    """
    memory, slots = device.memory_bytes, device.slots
    found: dict[str, Any] = {} if memory is None else {"memory": {"value": str(memory)}}
    if not shares or device.fractional is Fractional.NO:
        return found
    if slots > 1:
        found["slots"] = {"value": str(slots), "requestPolicy": _policy(str(slots), "1", step="1")}
        if memory is not None:  # never the limit: else the default, all of it, would allow no second share
            found["memory"]["requestPolicy"] = _policy("0", "0")
    elif memory:
        found["memory"]["requestPolicy"] = _policy(str(memory), str(min(memory, _LEAST_SHARE)))
    return found


def _policy(default: str, least: str, step: str = "") -> dict[str, Any]:
    """Return a request policy of a capacity, with the amount of a request without one."""
    return {"default": default, "validRange": {"min": least} | ({"step": step} if step else {})}


def _facts(device: Device, facts: Mapping[str, str], root: str) -> Iterator[tuple[str, str | float | bool]]:
    """Yield the attributes for selectors of claims: those of each device, of filters, then the vendor's."""
    for key, value in own_facts(device):
        yield key, value
        if key in {"numaNode", "pciBusID"}:
            yield f"{STANDARD}/{key}", value
    if root:
        yield f"{STANDARD}/pcieRoot", root
    yield from ((key, value) for key, value in facts.items() if IDENTIFIER.fullmatch(key))
    yield from vendor_facts(device)
