"""The variables: what a worker must be told, and what an environment leaves visible."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from anyaccel.plugin import Device, EnvEdits

MASK = "ASCEND_RT_VISIBLE_DEVICES"
"""Logic ids, read once by the CANN runtime when a process first uses it; empty hides every NPU."""
CONTAINER = "ASCEND_VISIBLE_DEVICES"
"""Physical ids, or vNPU ids, that Ascend Docker Runtime mounts into a container; no process reads it."""
CONTAINER_OPTIONS = "ASCEND_RUNTIME_OPTIONS"
"""``VIRTUAL`` makes the ids in ``ASCEND_VISIBLE_DEVICES`` those of vNPUs."""
SINGLE = "ASCEND_DEVICE_ID"
"""Older rival of the mask: a global number that a framework would take for one behind the mask."""
VARIABLES = (MASK, CONTAINER, CONTAINER_OPTIONS, SINGLE)

RANGE_LIMIT = 128


def vnpu_id(device: Device) -> int | None:
    """The number of a vNPU that this host can only give to a container; None for whatever a process can use."""
    value = device.attributes.get("vnpu_id")
    return value if isinstance(value, int) else None


def addressable(device: Device) -> bool:
    """Whether the runtime has a number for the device, which then equals the device's index."""
    return device.attributes.get("addressable") is not False


def edits(devices: Sequence[Device], everything: Sequence[Device]) -> EnvEdits:
    """Make a worker see exactly these devices.

    The runtime wants its numbers in ascending order and takes any other order for no device at all, so the order of
    the list is always the runtime's.

    Args:
        devices: The devices of the worker.
        everything: All NPUs of the machine.

    Raises:
        ValueError: For a device to which the runtime gives no number.
    """
    for device in devices:
        if vnpu_id(device) is None and not addressable(device):
            raise ValueError(
                f"a worker can only be given NPUs to which the runtime gives a number (got {device.id!r}):"
                f" {device.health_reason or 'it is not in use'}"
            )
    numbers = sorted(device.index for device in devices if vnpu_id(device) is None)
    wanted = {MASK: ",".join(map(str, numbers))}
    unwanted = {SINGLE}
    if any(vnpu_id(device) is not None for device in everything):
        partitions = sorted(number for device in devices if (number := vnpu_id(device)) is not None)
        if partitions:
            wanted |= {CONTAINER: ",".join(map(str, partitions)), CONTAINER_OPTIONS: "VIRTUAL"}
        else:
            unwanted |= {CONTAINER, CONTAINER_OPTIONS}
    return EnvEdits(set=wanted, unset=frozenset(unwanted))


def visible(environ: Mapping[str, str], devices: Sequence[Device]) -> list[str] | None:
    """Say which devices an environment leaves visible, in the runtime's order.

    Raises:
        ValueError: When the list of vNPUs is one at which Ascend Docker Runtime would refuse to start a container.
    """
    mask = environ.get(MASK)
    partitions = {number: device.id for device in devices if (number := vnpu_id(device)) is not None}
    virtual = "VIRTUAL" in re.split(r"\s*,\s*", environ.get(CONTAINER_OPTIONS, "").strip())
    if mask is None and not (partitions and virtual):
        return None
    known = {device.index: device.id for device in devices if vnpu_id(device) is None and addressable(device)}
    count = max(known, default=-1) + 1
    numbers = sorted(known) if mask is None else parse_mask(mask, count)
    seen = [known[number] for number in numbers if number in known]
    if partitions and virtual:
        seen += [partitions[number] for number in container_ids(environ.get(CONTAINER, "")) if number in partitions]
    return seen


def parse_mask(value: str, count: int) -> list[int]:
    """Read a mask as the runtime does, after torch_npu's ``_parse_visible_devices`` and ``_device_count_ascend_hal``.

    Only digits and commas are read: whatever else ends the list, as does an empty item. A number that is not greater
    than the one before it leaves no device at all; one that is too large ends the list.

    Args:
        value: Value of ``ASCEND_RT_VISIBLE_DEVICES``.
        count: Number of NPUs that the process could see without it.

    Returns:
        Logic ids; their positions are the numbers that the worker uses.
    """
    numbers: list[int] = []
    for item in re.split("[^0-9,]", value, maxsplit=1, flags=re.ASCII)[0].split(","):
        if not item:
            break
        number = int(item)
        if numbers and number <= numbers[-1]:
            return []
        if number >= count:
            break
        numbers.append(number)
    return numbers


def mask_fault(value: str, count: int) -> str | None:
    """Say what is wrong with a mask that does not give what it seems to ask for, or None."""
    items = [item.strip() for item in value.split(",") if item.strip()]
    seen = parse_mask(value, count)
    if len(seen) == len(items):
        return None
    numbers = [int(item) for item in items if item.isascii() and item.isdigit()]
    if len(numbers) < len(items) or re.search(r"[^0-9,]", value) or ",," in value or value.startswith(","):
        rule = "it may hold digits and commas only, without blanks, ranges or empty items"
    elif numbers != sorted(set(numbers)):
        rule = "its ids must be in ascending order, each of them once"
    else:
        rule = f"its ids must be below {count}, the number of NPUs here; inside a container they begin at 0"
    return f"{MASK}={value!r} shows {len(seen)} NPUs to the runtime instead of {len(items)}: {rule}."


def container_ids(value: str) -> list[int]:
    """Read the ids in ``ASCEND_VISIBLE_DEVICES``: numbers, ranges such as ``0-3``, or names such as ``Ascend910-1``.

    Raises:
        ValueError: For what Ascend Docker Runtime refuses.
    """
    text = value.strip()
    if text in ("", "void"):
        return []
    numbers: set[int] = set()
    for item in text.split(","):
        match = re.fullmatch(r"\s*(?:[A-Za-z][A-Za-z0-9]*-(\d+)|(\d+)(?:-(\d+))?)\s*", item, re.ASCII)
        if match is None:
            raise ValueError(
                f"{CONTAINER} must hold numbers, ranges such as 0-3 or names such as Ascend910-1, with commas between"
                f" them (got {value!r})"
            )
        first = int(match[1] or match[2])
        last = int(match[3]) if match[3] else first
        if not 0 <= last - first < RANGE_LIMIT:
            raise ValueError(
                f"a range in {CONTAINER} must ascend over at most {RANGE_LIMIT} ids (got {item.strip()!r})"
            )
        numbers.update(range(first, last + 1))
    return sorted(numbers)
