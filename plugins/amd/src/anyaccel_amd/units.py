"""Compute units of a GPU as slots of a share, and the mask that limits a program's queues to slots.

``HSA_CU_MASK`` of ROCm's runtime: sets ``GPUs:units`` between semicolons, such as ``0:0-37``, numbers as the runtime
counts after ``ROCR_VISIBLE_DEVICES`` (rocm.docs.amd.com, "Setting the number of compute units"). A syntax error drops a
set silently, GPUs without a set are free, and a program may unset it: it limits queues, and isolates nothing. The
driver spreads neighbors over the shader engines, and may round to one unit of each; the chips concerned are not
documented.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from anyaccel.plugin import Device, Share, VisiblePart

MASK = "HSA_CU_MASK"
WISH = "ANYACCEL_AMD_CU_MASKS"
"""Set by the administrator to anything but ``0``, for every user: shares of GPUs are then sets of compute units."""
HELD = "CU mask"
_SIZES = (8, 5, 4, 2)


def slots(units: object, environ: Mapping[str, str]) -> int:
    """Return the number of equal parts of a GPU's compute units, in pairs, as RDNA masks them; 1 if unwanted."""
    if environ.get(WISH, "0") in ("", "0") or not isinstance(units, int):
        return 1
    return next((size for size in _SIZES if units and units % (2 * size) == 0), 1)


def mask(devices: Iterable[Device], shares: Mapping[str, Share], *, relative: bool) -> str:
    """Return the mask of a worker; empty if the worker has no slots of any device.

    Args:
        devices: The worker's devices, in the order of its other masks.
        shares: The worker's shares, by device id.
        relative: Whether ``ROCR_VISIBLE_DEVICES`` shows exactly these devices.
    """
    sets = []
    for position, device in enumerate(devices):
        own = shares[device.id].slots if device.id in shares else ()
        if own and not shares[device.id].whole:
            size = _units(device) // device.slots
            ranges = ",".join(f"{slot * size}-{(slot + 1) * size - 1}" for slot in own)
            sets.append(f"{position if relative else device.index}:{ranges}")
    return ";".join(sets)


def visible(ids: Iterable[str], environ: Mapping[str, str], devices: Iterable[Device]) -> list[str | VisiblePart]:
    """Return visible devices, or their slots in a mask written by anyaccel; any other mask is ignored.

    Args:
        ids: The visible devices, in the order of the runtime if ``ROCR_VISIBLE_DEVICES`` is set.
        environ: The environment.
        devices: Every device.
    """
    order = list(ids)
    known = {device.id: device for device in devices}
    sets = dict(part.split(":", 1) for part in environ.get(MASK, "").split(";") if part.count(":") == 1)
    found: list[str | VisiblePart] = []
    for position, each in enumerate(order):
        device = known[each]
        text = sets.get(str(position if "ROCR_VISIBLE_DEVICES" in environ else device.index), "")
        ends = [(int(first), int(last)) for first, last in re.findall(r"(?:^|,)([0-9]{1,4})-([0-9]{1,4})(?=,|$)", text)]
        size = _units(device) // device.slots if device.slots > 1 else 0
        own = tuple(first // size for first, last in ends if size and first % size == 0 and last == first + size - 1)
        # Only a mask of complete slots is ours; the units of any other mask say nothing about shares.
        whole = not own or len(own) != len(ends) or max(own) >= device.slots
        found.append(each if whole else VisiblePart(id=each, slots=own))
    return found


def _units(device: Device) -> int:
    return int(device.attributes.get("compute_units") or 0)
