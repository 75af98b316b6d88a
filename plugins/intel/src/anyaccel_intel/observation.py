"""What Intel GPUs are doing now: memory and temperature from sysfs, rates and processes from the live kernel."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyaccel.kit import Measures
from anyaccel.plugin import Device, DeviceProcess, ProbeContext, QueryError

PCI = "/sys/bus/pci/devices"
DRIVERS = ("i915", "xe")
INTERVAL_SECONDS = 0.1
RESIDENT = ("drm-resident-vram0", "drm-resident-local0", "drm-resident-vram1", "drm-resident-local1")
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}


def measure(ctx: ProbeContext, devices: Sequence[Device]) -> dict[str, Measures]:
    """Measure devices. Tiles of one card share its temperature and power."""
    addresses = sorted({device.pci_bus_id for device in devices if device.pci_bus_id})
    rates = _asked(ctx, "sysfs/rates", lambda: sample(addresses))
    return {
        device.id: {
            "memory_used_bytes": _memory_used(device, ctx),
            "utilization": rates.get(device.pci_bus_id or "", {}).get("utilization"),
            "temperature_celsius": temperature(ctx, device.pci_bus_id or ""),
            "power_watts": rates.get(device.pci_bus_id or "", {}).get("power_watts"),
        }
        for device in devices
    }


def processes(ctx: ProbeContext, devices: Sequence[Device]) -> dict[str, tuple[DeviceProcess, ...]]:
    """Say who holds devices, with the memory that each takes; a device of which that is unknown is left out."""
    addresses = sorted({device.pci_bus_id for device in devices if device.pci_bus_id})
    found = _asked(ctx, "proc/fdinfo", lambda: holders(addresses))
    return {
        device.id: tuple(DeviceProcess(pid=int(pid), memory_bytes=size) for pid, size in sorted(holding.items()))
        for device in devices
        if (holding := found.get(device.pci_bus_id or "")) is not None
    }


def temperature(ctx: ProbeContext, address: str) -> float | None:
    """Highest temperature that any sensor of a card reports, in degrees Celsius; integrated GPUs have none."""
    found = [ctx.read_int(path) for path in ctx.glob(f"{PCI}/{address}/hwmon/hwmon*/temp*_input")]
    return max((value / 1000 for value in found if value is not None and value > 0), default=None)


def _memory_used(device: Device, ctx: ProbeContext) -> int | None:
    """Memory in use, which the xe driver of new kernels tells per tile and i915 does not tell."""
    tile = device.attributes.get("tile", "*")
    paths = ctx.glob(f"{PCI}/{device.pci_bus_id}/tile{tile}/vram0/used_bytes")
    used = [ctx.read_int(path) for path in paths]
    return sum(size for size in used if size is not None) if used and None not in used else None


def _asked(ctx: ProbeContext, name: str, fn: Callable[[], Any]) -> Mapping[str, Any]:
    """Answer of a question about the running kernel; nothing on a machine that is not this one."""
    try:
        answer: Mapping[str, Any] = ctx.query(name, fn)
    except QueryError:
        return {}
    return answer


def sample(
    addresses: Sequence[str], root: str = PCI, interval: float = INTERVAL_SECONDS
) -> dict[str, dict[str, float]]:
    """Measure rates of all cards over one interval: power from energy, utilization from the time spent idle.

    Args:
        addresses: PCI addresses.
        root: Folder of the PCI devices.
        interval: Seconds between the two looks.

    Returns:
        ``power_watts`` and ``utilization`` by address; what a driver does not count is left out.
    """
    before, start = {address: _counters(f"{root}/{address}") for address in addresses}, time.monotonic()
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
    """Energy in microjoules, and the time that the first graphics unit was idle in milliseconds."""
    found: dict[str, int] = {}
    hwmon = f"{path}/hwmon"
    monitors = sorted(os.listdir(hwmon)) if os.path.isdir(hwmon) else []
    sources = [("energy", f"{hwmon}/{name}/energy1_input") for name in monitors]
    for name, source in (*sources, ("idle", f"{path}/tile0/gt0/gtidle/idle_residency_ms")):
        try:
            with open(source, encoding="ascii") as file:
                found[name] = int(file.read())
        except (OSError, ValueError):
            continue
    return found


def holders(addresses: Sequence[str], proc: str = "/proc") -> dict[str, dict[str, int | None]]:
    """Find the processes that hold GPUs open, and the memory of each, from the kernel's ``fdinfo``.

    Args:
        addresses: PCI addresses.
        proc: Folder of the processes.

    Returns:
        Bytes by process id, by address. An address is left out when nothing was found and other users' processes
        could not be looked at.
    """
    clients: dict[tuple[str, str, str], int | None] = {}
    complete = True
    for pid in filter(str.isdigit, os.listdir(proc)):
        try:
            descriptors = os.listdir(f"{proc}/{pid}/fd")
        except PermissionError:
            complete = False
            continue
        except OSError:
            continue  # it has ended
        for descriptor in descriptors:
            facts = _client(f"{proc}/{pid}", descriptor)
            if facts.get("drm-driver") in DRIVERS and facts.get("drm-pdev") in addresses:
                # Descriptors that were duplicated show the same client; it counts once.
                clients[facts["drm-pdev"], pid, facts.get("drm-client-id", descriptor)] = _resident(facts)
    found: dict[str, dict[str, int | None]] = {address: {} for address in addresses} if complete else {}
    for (address, pid, _), size in clients.items():
        sizes = found.setdefault(address, {})
        known = sizes.get(pid)
        sizes[pid] = size if known is None else known + (size or 0)
    return found


def _client(process: str, descriptor: str) -> dict[str, str]:
    try:
        if not os.readlink(f"{process}/fd/{descriptor}").startswith("/dev/dri/"):
            return {}
        with open(f"{process}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as file:
            return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


def _resident(facts: Mapping[str, str]) -> int | None:
    """Device memory of a client in bytes; the kernel writes ``1024 KiB``, ``3 MiB`` or bare bytes."""
    found = []
    for key in RESIDENT:
        number, _, unit = facts.get(key, "").partition(" ")
        if number.isdigit() and unit in UNITS:
            found.append(int(number) * UNITS[unit])
    return sum(found) if found else None
