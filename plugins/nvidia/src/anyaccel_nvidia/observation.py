"""The state of the devices at one moment, and what a container needs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from anyaccel.plugin import ContainerEdits, Device, DeviceProcess, Health, Mount, ProbeContext, QueryError, Stats

from . import files, health, nvml
from .detection import host_memory
from .visibility import in_cuda, nvml_index

_DRIVER_FAILS = {4, 9, 12, 13, 18}
"""NVML errors that say something about the driver and nothing about one GPU."""
_SHARED_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_WSL_LIBRARIES = "/usr/lib/wsl"


def stats(devices: Sequence[Device], ctx: ProbeContext) -> dict[str, Stats]:
    """Observe each device by itself. Those of which NVML does not know are left out."""
    found: dict[str, Stats] = {}
    for device in devices:
        if not in_cuda(device):
            continue
        try:
            facts = ctx.query(f"nvml/stats/{device.id}", partial(nvml.stats, device.id, nvml_index(device)))
        except QueryError as error:
            if error.value is not None and error.value not in _DRIVER_FAILS:
                found[device.id] = Stats(health=Health.UNHEALTHY, health_reason=health.device_reason(error))
            continue
        found[device.id] = _stats(device, facts, ctx)
    return found


def _stats(device: Device, facts: Mapping[str, Any], ctx: ProbeContext) -> Stats:
    state, reason = health.judge(facts)
    used, busy, milliwatts, processes = (facts[key] for key in ("memory_used", "utilization", "power", "processes"))
    if used is None and device.attributes.get("unified_memory"):
        total, available = host_memory(ctx, "MemTotal"), host_memory(ctx, "MemAvailable")
        used = total - available if total is not None and available is not None else None
    return Stats(
        memory_used_bytes=used,
        utilization=busy / 100 if busy is not None else None,
        temperature_celsius=facts["temperature"],
        power_watts=milliwatts / 1000 if milliwatts is not None else None,
        health=state,
        health_reason=reason,
        processes=tuple(DeviceProcess(pid=pid, memory_bytes=memory) for pid, memory in processes)
        if processes is not None
        else None,
    )


def container(devices: Sequence[Device]) -> ContainerEdits:
    """Nodes of the devices and those that all of them share, and what NVIDIA's container runtime is told.

    The runtime brings the libraries of the host's driver, which only it can find; it reads NVIDIA_VISIBLE_DEVICES,
    CUDA does not. ``void`` keeps it from adding devices that the image asks for.
    """
    if not devices:
        return ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": "void"})
    own = list(dict.fromkeys(node for device in devices for node in device.nodes))
    pipes = sorted({str(device.attributes["mps_pipe"]) for device in devices if "mps_pipe" in device.attributes})
    mounts = [Mount(source=pipe, target=pipe, read_only=False) for pipe in pipes]
    if files.WSL_NODE in own:
        mounts.append(Mount(source=_WSL_LIBRARIES, target=_WSL_LIBRARIES))
        shared: tuple[str, ...] = ()
    else:
        shared = _SHARED_NODES
    has_uuids = all(device.id.startswith(("GPU-", "MIG-")) for device in devices)
    names = [device.id if has_uuids else str(nvml_index(device)) for device in devices]
    return ContainerEdits(
        nodes=(*shared, *own),
        mounts=tuple(mounts),
        env={"NVIDIA_VISIBLE_DEVICES": ",".join(names), "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
    )
