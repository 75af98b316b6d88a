"""What a program or the machine's configuration says of devices: how many there are, and their labels.

Devices that are declared by number, whatever is found, are logical resources as in other schedulers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from anyaccel.errors import UsageError
from anyaccel.model import MOST_LABELS, Device, Fractional, Inventory, read_labels, read_row, replace
from anyaccel.text import shown

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
MOST = 65_536
"""Most devices of one resource; more would make a scheduler slow, and no machine has more."""
VENDOR = "declared"
"""Vendor of devices that no plug-in found."""


def parse_declaration(text: str) -> tuple[str, int]:
    """Parse ``GPU=8``; return the resource name and the number of devices.

    Raises:
        UsageError: When the text has another form.
    """
    match = re.fullmatch(rf"({NAME.pattern})=([0-9]{{1,{len(str(MOST))}}})", text)
    if match is None:
        raise UsageError(
            f"a declaration must be NAME=NUMBER with a whole number up to {MOST}, such as GPU=8 (got {text!r:.60})"
        )
    return _checked(match[1], int(match[2]))


def declare(inventory: Inventory, devices: Mapping[str, int]) -> Inventory:
    """Give a machine exactly so many usable devices of some resources.

    Args:
        inventory: The machine.
        devices: Number of devices by resource name. Missing devices are made up: they can be shared and have no vendor.
            Surplus devices are hidden, from the last one on.

    Raises:
        UsageError: When a name or a number cannot be declared.

    Examples:
        >>> inventory = anyaccel.declare(anyaccel.detect("sim:H100:1"), {"FPGA": 2})
        >>> anyaccel.open_scheduler(inventory).allocate("FPGA:2").devices[1].index
        1
    """
    given: object = devices  # callers without a type checker may pass any value
    if not isinstance(given, Mapping):
        raise UsageError(f"devices are declared as a mapping such as {{'GPU': 8}} (got {shown(given)})")
    known = list(inventory.devices)
    for name, number in devices.items():
        resource, wanted = _checked(str(name), number)
        here = [device for device in known if device.resource.lower() == resource.lower()]
        if here:
            resource = here[0].resource  # in the vendor's spelling: requests compare without case
        usable = [device.id for device in here if device.usable]
        surplus = set(usable[wanted:])  # hidden, not removed: their nodes must still be closed to workers
        known = [replace(device, visible=False) if device.id in surplus else device for device in known]
        taken = {device.id for device in known}
        for index in range(wanted - len(usable)):
            known.append(_made_up(resource, index, taken))
    return replace(inventory, devices=tuple(known))


def _made_up(resource: str, index: int, taken: set[str]) -> Device:
    device_id = next(
        candidate
        for number in range(index, MOST + len(taken))
        if (candidate := f"{VENDOR}-{resource}-{number}") not in taken
    )
    taken.add(device_id)
    return Device(
        id=device_id,
        index=index,
        order=index,
        model=f"declared {resource}",
        vendor=VENDOR,
        resource=resource,
        kind=resource.lower(),
        fractional=Fractional.SHARED,
        declared=True,
    )


def _checked(name: str, number: object) -> tuple[str, int]:
    if not NAME.fullmatch(name):
        raise UsageError(f"a declared resource must be a name such as GPU (got {name!r:.60})")
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MOST:
        raise UsageError(f"{name} must be declared as a whole number from 0 to {MOST} (got {number!r:.60})")
    return name, number


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
    mapping: object = labels  # callers without a type checker may pass any value
    if not isinstance(mapping, Mapping):
        raise UsageError(f"labels are a mapping such as {{'H100/0-1': ['team=vision']}} (got {shown(mapping)})")
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
