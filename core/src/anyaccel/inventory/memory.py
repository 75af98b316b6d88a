"""The memory of devices within the limits of this process's cgroups.

The controller ``dmem`` counts the memory of devices by region (the kernel's Documentation/admin-guide/cgroup-v2.rst,
DMEM). Drivers call a region ``<driver>/<PCI address>/<name>``, such as ``drm/0000:03:00.0/vram0``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from anyaccel.linux import cgroup
from anyaccel.model import PCI_ADDRESS, Device, replace
from anyaccel.probe import Facts

_REGION = re.compile(rf"[^/\s]+/0{{0,4}}({PCI_ADDRESS})/\S+", re.IGNORECASE)
_BYTES = re.compile(r"[0-9]{1,18}")


def limited(devices: Sequence[Device], facts: Facts) -> list[Device]:
    """Reduce each device's memory to the limit of this process's cgroups.

    A file that cannot be read sets no limit here; the kernel applies its limit all the same.

    Args:
        devices: Devices with their full memory.
        facts: The machine.
    """
    if all(device.pci_bus_id is None for device in devices):  # regions are known by PCI address alone
        return list(devices)
    most = _limits(facts)
    found = []
    for device in devices:
        limit = most.get(device.pci_bus_id or "")
        if limit is not None and (device.memory_bytes is None or limit < device.memory_bytes):
            device = replace(device, memory_bytes=max(limit, 1))  # noqa: PLW2901 - 0 would break the contract
        found.append(device)
    return found


def _limits(facts: Facts) -> dict[str, int]:
    """Return the lowest limit of our cgroups in bytes, by PCI address; no entry without a limit."""
    found: dict[str, int] = {}
    for text in _files(facts):
        regions: dict[str, list[int | None]] = {}
        for line in text.splitlines():
            name, _, value = line.strip().rpartition(" ")
            if region := _REGION.fullmatch(name):
                regions.setdefault(region[1].lower(), []).append(int(value) if _BYTES.fullmatch(value) else None)
        for address, limits in regions.items():
            known = [limit for limit in limits if limit is not None]
            if len(known) == len(limits):  # one region without a limit leaves the device unlimited
                found[address] = min(sum(known), found.get(address, sum(known)))
    return found


def _files(facts: Facts) -> Iterator[str]:
    """Yield the limits of our cgroup and its ancestors, except for the cgroup of our own share."""
    try:
        lines = (facts.read(cgroup.OWN) or "").splitlines()
    except OSError:
        return
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::/")), None)
    names = [] if own is None else [cgroup.ROOT, *filter(None, own.split("/"))]
    while names:
        if not cgroup.MADE.fullmatch(names[-1]):
            try:
                text = facts.read("/".join([*names, "dmem.max"]))
            except OSError:
                text = None
            yield text or ""
        names.pop()
