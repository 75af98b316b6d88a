"""Labels that the machine's configuration or a program gives to devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.model import Device, Inventory, replace
from anyaccel.model.extent import read_row
from anyaccel.model.labels import MOST_LABELS, read_labels
from anyaccel.text import shown


def label(inventory: Inventory, labels: Mapping[str, Sequence[str]]) -> Inventory:
    """Add labels to devices. Requests choose by labels: ``GPU:2,label=team=vision``.

    Args:
        inventory: The machine.
        labels: Labels by the id of a device, or by a name of requests (``GPU``, ``H100``, ``acme/0-3``). A label is a
            key such as ``reserved``, or a key with a value such as ``team=vision``. A value replaces the former value
            of the key. A name without a device on this machine is ignored.

    Returns:
        The machine with its devices labeled.

    Raises:
        UsageError: When a label does not follow the grammar, or a device would have too many.

    Examples:
        >>> inventory = anyaccel.label(anyaccel.detect("sim:H100:4"), {"H100/0-1": ["team=vision"]})
        >>> scheduler = anyaccel.open_scheduler(inventory)
        >>> [device.index for device in scheduler.allocate("GPU:2,label=team=vision").devices]
        [0, 1]
    """
    found = {device.id: device for device in inventory.devices}
    for name, texts in labels.items():
        try:
            given = read_labels((texts,) if isinstance(texts, str) else texts)
        except (TypeError, ValueError) as error:
            raise UsageError(f"labels of {shown(name)}: {error}") from error
        for device in find_named(inventory.devices, name):
            labels = {**found[device.id].labels, **given}
            if len(labels) > MOST_LABELS:
                raise UsageError(f"labels of {shown(name)}: {device.id} must have at most {MOST_LABELS} labels")
            found[device.id] = replace(device, labels=labels)
    return replace(inventory, devices=tuple(found.values()))


def find_named(devices: Sequence[Device], name: str) -> list[Device]:
    """Return the devices with a name, in any state.

    Args:
        devices: The devices of a machine.
        name: An id, which comes before any other meaning; or a name of requests, compared without case, alone or with
            indexes: ``GPU``, ``acme/3``, ``GPU/0-3``.
    """
    if by_id := [device for device in devices if device.id == name]:
        return by_id
    called, _, row = name.rpartition("/")
    found = read_row(row) if called else None
    first, last = found or (0, 1 << 62)  # every index
    called = (called if found else name).lower()
    return [device for device in devices if first <= device.index <= last and called in map(str.lower, device.names)]
