"""ResourceSlices and DeviceClasses of dynamic resource allocation (resource.k8s.io/v1), as pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from anyaccel.model import Device, Fractional, Inventory, Value, parts_of

from anyaccel_export.text import unique_names

API = "resource.k8s.io/v1"
DRIVER = "anyaccel.dev"
"""Name of the driver, and domain of its attributes, taints and classes."""
STANDARD = "resource.kubernetes.io"
"""Domain of attributes that all drivers share, for ``matchAttribute`` across drivers."""
MOST_DEVICES = 64
"""Most devices in a slice if one of them has a taint or consumes counters, by the API; 128 otherwise."""
MOST_COUNTER_SETS = 8
MOST_COUNTERS = 32
"""Most counters in a set, by the API."""
MOST_FACTS = 32
"""Most attributes and capacities of a device together, by the API."""
MOST_BYTES = 64
"""Longest text of an attribute, by the API."""
LABEL = 63
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
"""Names of attributes that the API takes."""
_INT64 = 1 << 63
_LEAST_SHARE = 1 << 20
"""Least memory of a share in bytes."""


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
    given = [
        device for device in inventory.devices if device.visible and (features.taints or device.id not in obstacles)
    ]
    parts = parts_of(given)
    sets = _counter_sets(parts) if features.counters else {}
    set_of = {each: whole for whole in sets for each in (whole, *parts[whole])}
    entries = []
    for device in given:
        if device.id in parts and device.id not in set_of:
            continue  # nothing would keep the scheduler from allocating the device beside its parts
        entry = _device(device, names[device.id], facts.get(device.id, {}), roots.get(device.id, ""), features)
        if obstacle := obstacles.get(device.id):
            entry["taints"] = [_taint(obstacle)]
        if whole := set_of.get(device.id):
            counters = _counters(_leaves(device.id, parts), names)
            entry["consumesCounters"] = [{"counterSet": names[whole], "counters": counters}]
        entries.append(entry)
    shared = [{"name": names[whole], "counters": _counters(leaves, names)} for whole, leaves in sets.items()]
    # An empty slice for a node without devices: "kubectl apply" of no slice would leave the former devices.
    chunks: list[dict[str, Any]] = [
        {"devices": entries[at : at + MOST_DEVICES]} for at in range(0, len(entries), MOST_DEVICES)
    ] or [{"devices": []}]
    chunks += [
        {"sharedCounters": shared[at : at + MOST_COUNTER_SETS]} for at in range(0, len(shared), MOST_COUNTER_SETS)
    ]
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


def _leaves(device_id: str, parts: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the undivided parts of a device; the device itself if it is undivided."""
    return parts[device_id] - parts.keys() if device_id in parts else frozenset((device_id,))


def _counter_sets(parts: Mapping[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """Return the counter sets by divided device that is no part: a counter for each undivided part.

    A device consumes the counters of all its undivided parts, so any two devices with a part in common exclude each
    other, at any depth. A device with more undivided parts than a set may have counters gets no set.
    """
    inner = frozenset().union(*parts.values())
    found = {whole: _leaves(whole, parts) for whole in parts if whole not in inner}
    return {whole: leaves for whole, leaves in found.items() if len(leaves) <= MOST_COUNTERS}


def _counters(leaves: frozenset[str], names: Mapping[str, str]) -> dict[str, Any]:
    return {name: {"value": "1"} for name in sorted(names[each] for each in leaves)}


def _taint(obstacle: Obstacle) -> dict[str, Any]:
    """Return the taint of a device that cannot be given out; running pods go on."""
    taint = {"key": f"{DRIVER}/{obstacle.kind}", "effect": "NoSchedule"}
    # The API takes the value of a label here: 63 characters, with a letter or digit at both ends.
    value = re.sub(r"[^A-Za-z0-9_.-]+", "-", obstacle.reason)[:LABEL].strip("-_.")
    return taint | ({"value": value} if value else {})


def _device(device: Device, name: str, facts: Mapping[str, str], root: str, features: Features) -> dict[str, Any]:
    """Return the entry of a device in a slice."""
    capacity = _capacity(device, shares=features.shares)
    attributes: dict[str, Any] = {}
    for key, value in list_facts(device, facts, root):
        if fits(value) and key not in attributes and len(attributes) + len(capacity) < MOST_FACTS:
            attributes[key] = _attribute_value(value)
    entry: dict[str, Any] = {"name": name, "attributes": attributes}
    if capacity:
        entry["capacity"] = capacity
    # The API refuses a policy of requests for a device that only one claim can have.
    if any("requestPolicy" in each for each in capacity.values()):
        entry["allowMultipleAllocations"] = True
    return entry


def list_facts(device: Device, facts: Mapping[str, str], root: str = "") -> Iterator[tuple[str, str | float | bool]]:
    """Yield the facts for selectors of claims: those of each device, of filters, then the vendor's.

    Args:
        device: The device.
        facts: Facts of filters, by name.
        root: The PCIe root complex; empty if unknown.
    """
    yield "id", device.id
    yield "vendor", device.vendor
    yield "resource", device.resource
    yield "kind", device.kind
    yield "type", _class_value(device.type)
    yield "model", device.model
    yield "index", device.index
    yield "fractional", device.fractional.value
    for key, value in (("numaNode", device.numa_node), ("pciBusID", device.pci_bus_id)):
        if value is not None:
            yield key, value
            # Also under the name of all drivers: a claim matches a GPU and a network card of one NUMA node by it.
            yield f"{STANDARD}/{key}", value
    if device.parent is not None:
        yield "parent", device.parent
    if root:
        yield f"{STANDARD}/pcieRoot", root
    further = (*facts.items(), *sorted(device.attributes.items()))
    yield from ((key, value) for key, value in further if _IDENTIFIER.fullmatch(key))


def fits(value: str | float | bool) -> bool:
    """Return whether the API takes the value of an attribute: a text must have 1 to 64 bytes."""
    return not isinstance(value, str) or 0 < len(value.encode(errors="replace")) <= MOST_BYTES


def _attribute_value(value: str | float | bool) -> dict[str, Any]:
    """Return the value of an attribute; floats and integers of more than 64 bits become texts."""
    if isinstance(value, bool):  # before int, of which bool is a subclass
        return {"bool": value}
    # The API has integers of 64 bits; a larger one would make the API server refuse the whole slice.
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return {"int": value}
    # A vendor's text may have lone surrogates, which are no UTF-8. Attributes have no type for floats.
    return {"string": str(value).encode(errors="replace").decode()}


def _capacity(device: Device, *, shares: bool) -> dict[str, Any]:
    """Return the capacities of a device. A capacity that shares consume has a policy, with the whole as default.

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


def device_classes(devices: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return DeviceClasses for claims: for any device, for each resource, and for each type.

    Classes do not depend on a machine: applying the classes of another node changes nothing. A class of a resource or
    type also serves pods that name the extended resource, such as ``limits: {anyaccel.dev/h100: 2}``.

    Args:
        devices: The resource of each type.
    """
    found = [_device_class(f"accelerator.{DRIVER}", f'device.driver == "{DRIVER}"')]
    resources = dict.fromkeys(devices.values())
    kinds = dict.fromkeys(resources, "resource") | {name: "type" for name in devices if name not in resources}
    for value, name in unique_names(kinds, allowed="a-z0-9-", most=LABEL).items():
        text = _class_value(value).replace("\\", "\\\\").replace('"', '\\"')
        selected = f'device.attributes["{DRIVER}"].{kinds[value]} == "{text}"'
        each = _device_class(f"{name}.{DRIVER}", f'device.driver == "{DRIVER}" && {selected}')
        each["spec"]["extendedResourceName"] = f"{DRIVER}/{name}"
        found.append(each)
    return found


def _class_value(text: str) -> str:
    """Cut a type to the longest attribute: no device may lack an attribute that classes select by.

    An expression that reads a missing attribute is an error, and fails the allocation of other devices, too.
    """
    return text.encode(errors="replace")[:MOST_BYTES].decode(errors="ignore")


def _device_class(name: str, expression: str) -> dict[str, Any]:
    return {
        "apiVersion": API,
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": expression}}]},
    }
