"""Inventories, requests and allocations as JSON documents, for programs that store or send them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from anyaccel.model.device import MOST_SLOTS, UNITS_PER_DEVICE, Allocation, Device, Gang, Request
from anyaccel.model.inventory import Inventory
from anyaccel.model.labels import label_faults
from anyaccel.model.value import Value, decode, encode
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KINDS: dict[str, type[Value]] = {
    "anyaccel.inventory/1": Inventory,
    "anyaccel.request/1": Request,
    "anyaccel.gang/1": Gang,
    "anyaccel.allocation/1": Allocation,
}
"""Classes of documents by schema. Within a version, fields are added and never removed."""


def to_json(value: Inventory | Request | Allocation) -> dict[str, Any]:
    """Return a value as a JSON document. Fields with their default value are left out.

    Raises:
        TypeError: When the value has no kind of document.
    """
    # A gang is an allocation, too, so its kind stands before Allocation in the table.
    name = next((name for name, kind in KINDS.items() if isinstance(value, kind)), None)
    if name is None:
        raise TypeError(f"a document holds an Inventory, a Request or an Allocation (got a {type(value).__name__})")
    return {"schema": name, **encode(value)}


def from_json(document: Any) -> Inventory | Request | Allocation:
    """Return the value of a JSON document.

    Args:
        document: A result of :func:`to_json`, from any source; all fields are checked.

    Raises:
        ValueError: When the document has faults; the message names each.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> anyaccel.from_json(anyaccel.to_json(inventory)) == inventory
        True
    """
    name = document.get("schema") if isinstance(document, Mapping) else None
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"the schema of a document must be one of {', '.join(KINDS)} (got {name!r:.100})")
    found = decode(kind, {key: content for key, content in document.items() if key != "schema"})
    assert isinstance(found, Inventory | Request | Allocation)  # noqa: S101 -- KINDS has no others
    wrong = list(_faults(found))
    if wrong:
        raise ValueError("; ".join(wrong))
    return found


def _faults(found: Inventory | Request | Allocation) -> Iterator[str]:
    """Yield the faults of a value whose fields have the right types."""
    # The rest of the program trusts these numbers, for example as shifts of bit masks.
    devices = () if isinstance(found, Request) else found.devices
    yield from label_faults(devices)
    for device in devices:
        if not 0 <= device.units <= UNITS_PER_DEVICE:
            yield f"Device.units of {shown(device.id)} must be from 0 to {UNITS_PER_DEVICE} (got {device.units})"
        if not 1 <= device.slots <= MOST_SLOTS or UNITS_PER_DEVICE % device.slots:
            yield (
                f"Device.slots of {shown(device.id)} must be a divisor of {UNITS_PER_DEVICE} up to {MOST_SLOTS}"
                f" (got {device.slots})"
            )
        yield from _slot_faults(f"Device.own_slots of {shown(device.id)}", device.own_slots, device)
    if isinstance(found, Allocation):
        for share in found.shares:
            name = shown(share.device.id)
            if not 0 <= share.units <= UNITS_PER_DEVICE:
                yield f"Share.units of {name} must be from 0 to {UNITS_PER_DEVICE} (got {share.units})"
            yield from _slot_faults(f"Share.slots of {name}", share.slots, share.device)
    else:
        for name, count in Counter(device.id for device in devices).items():
            if count > 1:
                yield f"Device.id must be unique in an inventory (got {shown(name)} {count} times)"


def _slot_faults(what: str, slots: tuple[int, ...], device: Device) -> Iterator[str]:
    if any(not 0 <= slot < device.slots for slot in slots):
        yield f"{what} must be some of its {device.slots} slots (got {slots!r:.60})"
