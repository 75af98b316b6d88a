"""Module ids: the positions on the baseboard by which the runtime names devices, and which of them work together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyaccel.plugin import Device, Term

COUNTS = (1, 2, 4, 8)
"""Numbers of devices that one job may use (docs.habana.ai, "Multiple Workloads on a Single Docker")."""

UNKNOWN = "module_unknown"
"""Attribute of a device whose module id nobody could tell; its index is then a mere label."""


def module_id(device: Device) -> int | None:
    """The module id of a device; None when nobody could tell.

    A device's index is its module id: that is the number which ``HABANA_VISIBLE_MODULES`` takes, the order in which
    the runtime looks for a free device, and what stays the same over restarts. The number of the device node
    (``accelN``, the index that hl-smi prints) is another permutation and is kept as the attribute ``accel``.
    """
    return None if device.attributes.get(UNKNOWN) else device.index


def links(modules: Iterable[int]) -> dict[int, dict[int, int]]:
    """Rank the connections among the modules of one baseboard.

    All eight are joined all to all by the ports on the chip. The ranks make placement prefer the groups that the
    vendor recommends for jobs which share a board: 0,1 / 2,3 / 4,5 / 6,7 and 0-3 / 4-7.

    Returns:
        Rank by module and other module: 3 within a pair, 2 within a group of four, else 1.
    """
    known = sorted(modules)
    return {
        one: {
            other: 3 if one // 2 == other // 2 else 2 if one // 4 == other // 4 else 1
            for other in known
            if other != one
        }
        for one in known
    }


def refuse(term: Term, devices: Sequence[Device]) -> str | None:
    """Say why one job cannot use exactly these devices, or return None when it can."""
    if term.fraction:
        return (
            "a fraction of an HPU cannot be given: the habanalabs driver admits one process per device (a second one"
            " gets EBUSY) and Gaudi has no partitions; ask for a whole number of devices: 1, 2, 4 or 8"
        )
    if devices and len(devices) not in COUNTS:
        return f"one job can use 1, 2, 4 or 8 HPUs of a machine (got {len(devices)}); ask for one of these numbers"
    for device in devices:
        if module_id(device) is None:
            return (
                f"{device.id} cannot be given because its module id is unknown, so no process can be confined to it;"
                " install the hl-smi tool, or a kernel (6.8 or later) or driver that shows module_id in sysfs"
            )
    return None
