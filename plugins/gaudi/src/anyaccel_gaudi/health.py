"""What the devices do now, and what is wrong with this vendor on a machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from anyaccel.plugin import (
    Device,
    DeviceProcess,
    Finding,
    Health,
    PciFunction,
    ProbeContext,
    QueryError,
    Severity,
    Stats,
)

from anyaccel_gaudi import environment, smi, sysfs
from anyaccel_gaudi.detection import detect, look
from anyaccel_gaudi.modules import module_id

_MIB = 1 << 20
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h
_BOARD_SIZES = (1, 2, 4, 8)
_INSIDE_CONTAINER = ("/.dockerenv", "/run/.containerenv")


def stats(devices: Sequence[Device], ctx: ProbeContext) -> dict[str, Stats]:
    """Observe the devices: health from sysfs, load from hl-smi, holders from ``/proc``.

    An idle device still uses 512 to 768 MiB, which its firmware and the driver hold.

    Raises:
        RuntimeError: When hl-smi hangs or fails.
        ValueError: When hl-smi answers nonsense.
    """
    rows = smi.query(ctx, smi.STATE) or {}
    processes = _holders(ctx)
    functions = {function.address: function for function in sysfs.functions(ctx)}
    observed = {}
    for device in devices:
        row = rows.get(device.pci_bus_id or "")
        memory = smi.number(row, "memory.used") if row else None
        busy = smi.number(row, "utilization.aip") if row else None
        health, reason = _health(ctx, device, functions.get(device.pci_bus_id or ""))
        observed[device.id] = Stats(
            memory_used_bytes=None if memory is None else int(memory * _MIB),
            utilization=None if busy is None else busy / 100,
            temperature_celsius=smi.number(row, "temperature.aip") if row else None,
            power_watts=smi.number(row, "power.draw") if row else None,
            health=health,
            health_reason=reason,
            processes=_processes(processes, device),
        )
    return observed


def scan_holders(proc: str = "/proc") -> dict[str, object]:
    """Find the processes that have an accelerator's compute node open.

    Opening the node would tell too, and take the device; and hl-smi lists processes to root alone.

    Returns:
        ``holders``: process ids by path of the node. ``complete``: whether every process of the machine was seen.
    """
    holders: dict[str, list[int]] = {}
    complete = os.readlink(f"{proc}/self/ns/pid") == _FIRST_PID_NAMESPACE
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdecimal()):
        try:
            targets = {os.readlink(f"{proc}/{pid}/fd/{number}") for number in os.listdir(f"{proc}/{pid}/fd")}
        except PermissionError:
            complete = False
            continue
        except OSError:  # it ended, or closed the file, while we looked
            continue
        for target in targets:
            if target.startswith(("/dev/accel/accel", "/dev/hl")):
                holders.setdefault(target, []).append(pid)
    return {"holders": holders, "complete": complete}


def diagnose(ctx: ProbeContext) -> list[Finding]:
    """Look for what keeps this vendor's devices from being used, one way out for each."""
    detected = detect(ctx)
    if detected is None:
        return []
    tool = _tool(ctx, detected.devices) if detected.devices else ()
    found = [*_devices(detected.devices), *tool, *_variables(ctx, detected.devices)]
    if not found:
        models = ", ".join(sorted({device.model for device in detected.devices})) or "no device"
        driver = detected.driver_version or "of unknown version"
        found.append(
            Finding(
                severity=Severity.OK, message=f"{len(detected.devices)} HPUs ({models}), habanalabs driver {driver}"
            )
        )
    return found


def _health(ctx: ProbeContext, device: Device, function: PciFunction | None) -> tuple[Health, str]:
    """Look at a device again, by its PCI address: its node's number may have changed since it was detected."""
    if function is None:
        return Health.UNHEALTHY, "it is gone from the PCI bus; look for habanalabs in 'dmesg', then restart the machine"
    reading = look(ctx, function)
    if not reading.reason and module_id(device) is None:
        return Health.UNHEALTHY, device.health_reason
    return reading.health, reading.reason


def _processes(answer: object, device: Device) -> tuple[DeviceProcess, ...] | None:
    """Holders of one device; None, not nobody, when some processes could not be seen."""
    if not isinstance(answer, dict) or not device.nodes:
        return None
    pids = answer["holders"].get(device.nodes[0], [])
    return tuple(DeviceProcess(pid=pid) for pid in pids) if pids or answer["complete"] else None


def _holders(ctx: ProbeContext) -> object:
    try:
        return ctx.query("proc/holders", scan_holders)
    except QueryError:
        return None


def _devices(devices: Sequence[Device]) -> Iterator[Finding]:
    if not devices:
        yield Finding(
            severity=Severity.WARN,
            message="the habanalabs driver is loaded and no Gaudi device is on the PCI bus",
            fix="check 'lspci -d 1da3:' and the seating of the boards",
        )
    for device in devices:
        if device.health is Health.UNHEALTHY:
            what, _, way_out = device.health_reason.rpartition("; ")
            severity = Severity.WARN if way_out == sysfs.SOON else Severity.FAIL
            yield Finding(severity=severity, message=f"{device.id}: {what}", fix=way_out)
    if len(devices) > 1 and len(devices) not in _BOARD_SIZES:
        yield Finding(
            severity=Severity.WARN,
            message=f"{len(devices)} devices are on the PCI bus, and boards have 1, 2, 4 or 8",
            fix="look for a device that fell off the bus in 'dmesg'",
        )


def _tool(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    try:
        rows = smi.query(ctx, smi.STATE)
    except (RuntimeError, ValueError) as error:
        what, _, way_out = str(error).rpartition("; ")
        yield Finding(severity=Severity.FAIL, message=what, fix=way_out)
        return
    if rows is None:
        yield Finding(
            severity=Severity.WARN,
            message="hl-smi is not on the PATH, so memory in use, load, temperature and power are unknown",
            fix="install the habanalabs tools (package habanalabs-firmware-tools)",
        )
        return
    missing = [device.id for device in devices if device.pci_bus_id not in rows]
    if missing:
        yield Finding(
            severity=Severity.FAIL,
            message=f"hl-smi shows {len(rows)} devices and PCI {len(devices)}; it does not show {', '.join(missing)}",
            fix="match the versions of driver and tools, then look for habanalabs in 'dmesg'",
        )


def _variables(ctx: ProbeContext, devices: Sequence[Device]) -> Iterator[Finding]:
    environ = ctx.environ
    try:
        seen = environment.visible(environ, devices)
    except ValueError as error:
        what, _, way_out = str(error).rpartition("; ")
        yield Finding(severity=Severity.FAIL, message=what, fix=way_out)
    else:
        if seen == [] and devices:
            yield Finding(
                severity=Severity.WARN,
                message=f"{environment.VISIBLE_MODULES} and {environment.MODULE_ID} name no device of this machine",
                fix="unset both, or list module ids as 'hl-smi -Q index,module_id -f csv' shows them",
            )
    if environment.CONTAINER_DEVICES in environ and not any(ctx.exists(path) for path in _INSIDE_CONTAINER):
        yield Finding(
            severity=Severity.WARN,
            message=f"{environment.CONTAINER_DEVICES} is set, and outside a container nothing reads it",
            fix=f"use {environment.VISIBLE_MODULES} with module ids, not node numbers",
        )
    if environ.get("HABANA_RUNTIME_ERROR"):
        yield Finding(
            severity=Severity.FAIL,
            message=f"the habana container runtime reports: {environ['HABANA_RUNTIME_ERROR']}",
            fix="start the container again with device numbers that are free and that the host has",
        )
