"""Compute units of a GPU as slots of a share, and the mask that keeps a program's queues to some of them.

``HSA_CU_MASK`` of ROCm's runtime: sets ``GPUs:units`` between semicolons, such as ``0:0-37``, numbers as the runtime
counts after ``ROCR_VISIBLE_DEVICES`` (rocm.docs.amd.com, "Setting the number of compute units"). A syntax error drops a
set silently, GPUs that are not named are free, and a program may unset it: it limits queues, and isolates nothing. The
driver spreads neighbors over the shader engines, and may round to one unit of each; which chips it does that for is
not written down.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from anyaccel.plugin import Device, Share, VisiblePart

MASK = "HSA_CU_MASK"
WISH = "ANYACCEL_AMD_CU_MASKS"
"""Set by people to anything but ``0``, for all who share the GPUs: then shares of them are sets of compute units."""
HELD = "CU mask"
_SIZES = (8, 5, 4, 2)


def slots(units: object, environ: Mapping[str, str]) -> int:
    """Number of equal parts into which compute units can be divided, in pairs, as RDNA masks them; 1 where unwanted."""
    if environ.get(WISH, "0") in ("", "0") or not isinstance(units, int):
        return 1
    return next((size for size in _SIZES if units and units % (2 * size) == 0), 1)


def mask(devices: Iterable[Device], shares: Mapping[str, Share], *, relative: bool) -> str:
    """Write the mask of a worker; empty where it has no slots of any device.

    Args:
        devices: What it holds, in the order of its other masks.
        shares: Its shares, by device id.
        relative: Whether ``ROCR_VISIBLE_DEVICES`` leaves these alone.
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
    """Say which slots a mask of ours leaves of devices that are visible; one that was written by others counts as none.

    Args:
        ids: The devices, in the order in which the runtime counts where ``ROCR_VISIBLE_DEVICES`` is set.
        environ: The environment.
        devices: All of them.
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
        whole = not own or len(own) != len(ends) or max(own) >= device.slots
        found.append(each if whole else VisiblePart(id=each, slots=own))
    return found


def _units(device: Device) -> int:
    return int(device.attributes.get("compute_units") or 0)
