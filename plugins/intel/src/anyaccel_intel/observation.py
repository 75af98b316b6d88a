"""Measurements of Intel GPUs: memory and temperature from sysfs, rates and processes from the live kernel."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from glob import glob

from anyaccel.kit import PCI_DEVICES, Measures, number, total, try_query
from anyaccel.plugin import Device, DeviceProcess, ProbeContext

DRIVERS = ("i915", "xe")
INTERVAL_SECONDS = 0.1
RESIDENT = ("drm-resident-vram0", "drm-resident-local0", "drm-resident-vram1", "drm-resident-local1")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def measure(ctx: ProbeContext, devices: Sequence[Device]) -> dict[str, Measures]:
    """Measure devices. Tiles of a card share its temperature and power."""
    addresses = sorted({device.pci_bus_id for device in devices if device.pci_bus_id})
    rates = try_query(ctx, "sysfs/rates", lambda: sample(addresses)) or {}
    return {
        device.id: {
            "memory_used_bytes": _memory_used(device, ctx),
            "utilization": rates.get(device.pci_bus_id, {}).get("utilization"),
            "temperature_celsius": temperature(ctx, device.pci_bus_id or ""),
            "power_watts": rates.get(device.pci_bus_id, {}).get("power_watts"),
        }
        for device in devices
    }


def processes(
    ctx: ProbeContext, devices: Sequence[Device], holding: Mapping[str, tuple[DeviceProcess, ...] | None]
) -> dict[str, tuple[DeviceProcess, ...] | None]:
    """Add memory to the holders of devices, if the kernel accounts for it."""
    pids = sorted({process.pid for each in holding.values() for process in each or ()})
    sizes = (try_query(ctx, "proc/fdinfo", lambda: resident(pids)) if pids else None) or {}
    found = dict(holding)
    for device in devices:
        own, held = sizes.get(device.pci_bus_id, {}), holding.get(device.id)
        if held is not None:
            found[device.id] = tuple(DeviceProcess(pid=one.pid, memory_bytes=own.get(str(one.pid))) for one in held)
    return found


def temperature(ctx: ProbeContext, address: str) -> float | None:
    """Return the highest temperature of a card's sensors, in degrees Celsius; integrated GPUs have no sensor."""
    found = [number(ctx, path) for path in ctx.glob(f"{PCI_DEVICES}/{address}/hwmon/hwmon*/temp*_input")]
    return max((value / 1000 for value in found if value is not None and value > 0), default=None)


def _memory_used(device: Device, ctx: ProbeContext) -> int | None:
    """Return memory in use, which new versions of xe count per tile, and i915 never."""
    tile = device.attributes.get("tile", "*")
    return total(ctx, ctx.glob(f"{PCI_DEVICES}/{device.pci_bus_id}/tile{tile}/vram0/used_bytes"))


def sample(
    addresses: Sequence[str], root: str = PCI_DEVICES, interval: float = INTERVAL_SECONDS
) -> dict[str, dict[str, float]]:
    """Measure rates of every card over an interval in seconds.

    Power is the change of an energy counter; utilization the time not spent idle.

    Returns:
        ``power_watts`` and ``utilization`` by PCI address, without rates that a driver does not count.
    """
    before, start = {address: _counters(f"{root}/{address}") for address in addresses}, time.monotonic()
    # Without counters, waiting for an interval would only slow the command down.
    if not any(before.values()):
        return {}
    time.sleep(interval)
    after, seconds = {address: _counters(f"{root}/{address}") for address in addresses}, time.monotonic() - start
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for address in addresses:
        for name in before[address].keys() & after[address].keys():
            change = after[address][name] - before[address][name]
            if name == "energy" and change > 0:  # a counter that stands still or wraps tells nothing
                rates[address]["power_watts"] = change / 1e6 / seconds
            elif name == "idle" and change >= 0:
                rates[address]["utilization"] = min(1.0, max(0.0, 1 - change / 1e3 / seconds))
    return dict(rates)


def _counters(path: str) -> dict[str, int]:
    """Read energy in microjoules, and idle time of the first graphics unit in milliseconds."""
    found: dict[str, int] = {}
    for name, pattern in (("energy", "hwmon/*/energy1_input"), ("idle", "tile0/gt0/gtidle/idle_residency_ms")):
        for source in sorted(glob(f"{path}/{pattern}")):
            text = _read(source).strip()
            found |= {name: int(text)} if text.isdecimal() else {}
    return found


def _read(path: str) -> str:
    """Read a file of the running kernel; empty if it is gone or belongs to another user."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def resident(pids: Sequence[int], proc: str = "/proc") -> dict[str, dict[str, int]]:
    """Add up the device memory of processes from the kernel's ``fdinfo``: bytes by process id, by PCI address."""
    clients: dict[tuple[str, int, str], int] = {}
    for pid in pids:
        for path in glob(f"{proc}/{pid}/fdinfo/*"):
            facts = dict(line.split(":", 1) for line in _read(path).replace("\t", "").splitlines() if ":" in line)
            size = _resident(facts)
            if facts.get("drm-driver") in DRIVERS and size is not None:
                # Duplicated descriptors show the same client, which counts once.
                clients[facts.get("drm-pdev", ""), pid, facts.get("drm-client-id", path)] = size
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (address, pid, _), size in clients.items():
        found[address][str(pid)] += size
    return found


def _resident(facts: Mapping[str, str]) -> int | None:
    """Return the device memory of a client in bytes; the kernel writes ``1024 KiB``, ``3 MiB`` or bare bytes."""
    found = []
    for key in RESIDENT:
        number, _, unit = facts.get(key, "").partition(" ")
        if number.isdigit() and unit in UNITS:
            found.append(int(number) * UNITS[unit])
    return sum(found) if found else None
