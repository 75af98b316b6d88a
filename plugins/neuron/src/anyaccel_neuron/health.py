"""Whether chips can be used, and what their cores are doing.

Sources: "Neuron Sysfs User Guide" for the counters, the Neuron problem detector for those that mean a replacement,
"Neuron Monitor User Guide" for the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anyaccel.plugin import Device, DeviceProcess, Health, ProbeContext, QueryError, Stats

from anyaccel_neuron import sysfs
from anyaccel_neuron.products import chip_index, cores_per_chip

if TYPE_CHECKING:
    import subprocess

REPLACE = "stop and start the instance to move to other hardware"
MONITOR = "/opt/aws/neuron/bin/neuron-monitor"
MONITOR_SECONDS = 3.0
LINE_LIMIT = 8 << 20

COUNTERS = {
    "sram_ecc_uncorrected": f"uncorrected errors of the on-chip memory: {REPLACE}",
    "mem_ecc_uncorrected": f"uncorrected errors of the device memory: {REPLACE}",
    "mem_ecc_repairable_uncorrected": "repairable errors of the device memory: reload the driver with"
    " 'sudo rmmod neuron && sudo modprobe neuron'",
}
"""Counters under ``stats/hardware`` that make a chip unfit as soon as they are not 0."""

RESET_STATES = {0: "it is being reset: try again in a minute", 2: f"its state is invalid after a reset: {REPLACE}"}


def verdict(ctx: ProbeContext, entry: sysfs.Entry | None) -> tuple[Health, str]:
    """Say whether a chip can be used, and why not. Unknown where the driver shows nothing of its state."""
    if entry is None:
        return Health.UNKNOWN, ""
    ready = sysfs.number(ctx, f"{entry.path}/reset")
    if ready in RESET_STATES:
        return Health.UNHEALTHY, RESET_STATES[ready]
    seen = ready is not None
    for counter, meaning in COUNTERS.items():
        errors = sysfs.number(ctx, f"{entry.path}/stats/hardware/{counter}")
        if errors:
            return Health.UNHEALTHY, f"{counter} is {errors}, {meaning}"
        seen = seen or errors is not None
    broken = sysfs.text(ctx, f"{entry.path}/stats/hardware/health_status/unhealthy_components")
    if broken.lower() not in ("", "0", "none"):
        return Health.UNHEALTHY, f"the driver calls {', '.join(broken.split())[:200]} unhealthy: {REPLACE}"
    return (Health.HEALTHY, "") if seen else (Health.UNKNOWN, "")


def stats(devices: Sequence[Device], ctx: ProbeContext) -> dict[str, Stats]:
    """Observe cores. There is no temperature, and of power only the share of a maximum that is not published."""
    nodes = {node.path: (node, index) for index, node in sysfs.nodes(ctx).items()}
    entries = sysfs.entries(ctx)
    runtimes = _runtimes(ctx)
    observed = {}
    for device in devices:
        node = next((nodes[path] for path in device.nodes if path in nodes), None)
        entry = sysfs.entry_of(*node, entries) if node else None
        health, reason = verdict(ctx, entry)
        if node is None:
            health, reason = Health.UNHEALTHY, device.health_reason or "its device node is gone: reload the driver"
        observed[device.id] = Stats(
            memory_used_bytes=_memory(ctx, entry, device),
            utilization=_utilization(runtimes, device.index),
            health=health,
            health_reason=reason,
            processes=_processes(runtimes, device.index),
        )
    return observed


def _memory(ctx: ProbeContext, entry: sysfs.Entry | None, device: Device) -> int | None:
    """Add up what the physical cores of a logical core hold: core L of size 2 is the physical cores 2L and 2L+1.

    ``present`` is read: on idle hardware ``total`` was seen to be 0 whatever is held (lablup/all-smi#417).
    """
    if entry is None or "lnc" not in device.attributes:
        return None
    size = int(device.attributes["lnc"])
    core = int(device.attributes.get("core", device.index - chip_index(device) * cores_per_chip(device)))
    used = [
        sysfs.number(ctx, f"{entry.path}/neuron_core{physical}/stats/memory_usage/device_mem/present")
        for physical in range(core * size, core * size + size)
    ]
    return None if None in used else sum(value for value in used if value is not None)


def _runtimes(ctx: ProbeContext) -> list[Mapping[str, Any]] | None:
    """What the monitor says of each process that runs on the machine; None when it says nothing."""
    path, left = ctx.environ.get("PATH", os.defpath), ctx.remaining()
    try:
        record = json.loads(
            ctx.query("neuron-monitor/record", lambda: _first_line(path, min(MONITOR_SECONDS, left / 2)))
        )
    except (QueryError, ValueError, TypeError, RecursionError):
        return None
    runtimes = record.get("neuron_runtime_data") if isinstance(record, dict) else None
    if not isinstance(runtimes, list):
        return None
    return [runtime for runtime in runtimes if isinstance(runtime, dict) and not runtime.get("error")]


def _first_line(path: str, seconds: float) -> str:
    """Run the monitor until its first record, which comes at once, and end it: it has no form that prints one only."""
    import shutil  # loaded for the monitor only: most detections run none
    import subprocess

    program = shutil.which(MONITOR) or shutil.which("neuron-monitor", path=path)
    if program is None:
        raise FileNotFoundError("neuron-monitor is not installed")
    process = subprocess.Popen(
        [program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return _read_line(process, seconds)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        if process.stdout:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that is stuck in the kernel ignores even SIGKILL
            process.wait(timeout=1)


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> str:
    import selectors

    stream = process.stdout
    if stream is None:
        raise OSError("neuron-monitor has no output")
    os.set_blocking(stream.fileno(), False)
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while b"\n" not in data and len(data) < LINE_LIMIT:
            if not selector.select(seconds):
                raise TimeoutError(f"neuron-monitor printed no record within {seconds:.1f} s")
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                break
            data += chunk
    return data.partition(b"\n")[0].decode(errors="replace")


def _cores_in_use(runtime: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = runtime
    for key in ("report", "neuroncore_counters", "neuroncores_in_use"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _utilization(runtimes: list[Mapping[str, Any]] | None, core: int) -> float | None:
    """Share of time that a core was busy; None when no process of the monitor's record uses it."""
    for runtime in runtimes or ():
        counters = _cores_in_use(runtime).get(str(core))
        percent = counters.get("neuroncore_utilization") if isinstance(counters, dict) else None
        if isinstance(percent, int | float) and not isinstance(percent, bool) and 0 <= percent <= 100:  # noqa: PLR2004
            return percent / 100
    return None


def _processes(runtimes: list[Mapping[str, Any]] | None, core: int) -> tuple[DeviceProcess, ...] | None:
    """The processes on a core. ``neuron-ls`` would list those of the whole chip, which says nothing of one core."""
    if runtimes is None:
        return None
    return tuple(
        DeviceProcess(pid=runtime["pid"])
        for runtime in runtimes
        if str(core) in _cores_in_use(runtime) and isinstance(runtime.get("pid"), int)
    )
