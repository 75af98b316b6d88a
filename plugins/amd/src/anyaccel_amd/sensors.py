"""Sensors of the devices, from sysfs, and from ``amdsmi`` for facts missing in sysfs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyaccel.kit import PCI_DEVICES, Fault, Measures, number, pairs, text
from anyaccel.plugin import Device, ProbeContext, QueryError

from anyaccel_amd import kfd, smi

BAD_PAGES = "ras/gpu_vram_bad_pages"
ERRORS = "ras/umc_err_count"
"""Counts of the memory controller's ECC: ``ue`` uncorrectable, ``ce`` corrected."""

Facts = Mapping[str, Any]


def folder(device: Device) -> str:
    """Return the sysfs directory of a device's card."""
    return f"{PCI_DEVICES}/{device.attributes.get('card', device.pci_bus_id)}"


def ask_library(ctx: ProbeContext, devices: Iterable[Device]) -> Mapping[str, Facts]:
    """Ask amdsmi about whole cards if sysfs lacks something; amdsmi may take seconds.

    Returns:
        Its answers by PCI address, without answers about partitions, whose meaning differs between chips.
    """
    lacking = (
        text(ctx, f"{folder(device)}/{BAD_PAGES}")  # only the library knows the limit of retired pages
        or (device.parent is None and number(ctx, f"{folder(device)}/gpu_busy_percent") is None)
        for device in devices
    )
    try:
        answer = smi.ask(ctx, "metrics") if any(lacking) else []
    except QueryError:  # 'anyaccel doctor' reports failures of the library
        answer = []
    return {entry["bdf"]: entry for entry in answer if not entry["partition"]}


def measure(ctx: ProbeContext, device: Device, library: Facts) -> Measures:
    """Measure a device. A partition gets no utilization and power: sysfs knows those of the card only."""
    where, whole = folder(device), device.parent is None
    facts = library if whole else {}

    def first(value: float | None, name: str) -> Any:
        return facts.get(name) if value is None else value

    node = device.attributes.get("kfd_node")
    used = number(ctx, f"{where}/mem_info_vram_used") if whole else kfd.used_bytes(ctx, node)
    busy = first(number(ctx, f"{where}/gpu_busy_percent") if whole else None, "busy_percent")
    return {
        "memory_used_bytes": first(used, "memory_used_bytes"),
        "utilization": busy / 100 if busy is not None and 0 <= busy <= 100 else None,  # noqa: PLR2004 - percent
        "temperature_celsius": first(_temperature(ctx, where), "temperature_celsius"),
        "power_watts": first(_power(ctx, where) if whole else None, "power_watts"),
    }


def _temperature(ctx: ProbeContext, where: str) -> float | None:
    """Return the junction's temperature, else the edge's, else the first: chips have different sensors."""
    found: dict[str, int] = {}
    for path in ctx.glob(f"{where}/hwmon/hwmon*/temp*_input"):
        value = number(ctx, path)
        if value is not None:
            found.setdefault(text(ctx, path.removesuffix("input") + "label"), value)
    # Any sensor is better than none on chips without labels.
    chosen = next((found[label] for label in ("junction", "edge", *found) if label in found), None)
    return None if chosen is None else chosen / 1000


def _power(ctx: ProbeContext, where: str) -> float | None:
    names = ("power1_average", "power1_input")
    read = (number(ctx, path) for name in names for path in ctx.glob(f"{where}/hwmon/hwmon*/{name}"))
    return next((value / 1_000_000 for value in read if value is not None), None)


def worn_out(library: Facts) -> Fault | None:
    """Return a fault if the card should be replaced, by amdsmi's count of retired pages; else None."""
    pages, limit = library.get("bad_pages"), library.get("bad_page_threshold")
    if isinstance(pages, int) and isinstance(limit, int) and 0 < limit < pages:
        return Fault(f"{pages} pages of its memory are retired and AMD's limit is {limit}", "have the card replaced")
    return None


def uncorrectable(ctx: ProbeContext, devices: Sequence[Device]) -> Mapping[str, int]:
    """Return uncorrectable memory errors since the driver was loaded, by card, without zeros."""
    found: dict[str, int] = {}
    for device in devices:
        count = pairs(text(ctx, f"{folder(device)}/{ERRORS}")).get("ue") or ""
        if count.isdecimal() and int(count):
            found[folder(device).rpartition("/")[2]] = int(count)
    return found
