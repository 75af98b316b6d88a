"""The questions to NVML. Each runs inside ``ProbeContext.query`` and answers in plain JSON data.

The answers keep NVML's units (bytes, milliwatts, numbers of enumerations), so a recording shows the driver's own words;
other modules interpret them. A fact not offered by this GPU or driver is None.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

Facts = dict[str, Any]

NOT_FOUND = 6
NO_PERMISSION = 4
UNSUPPORTED = {3, 13, 21, 22, 25}
"""NotSupported, FunctionNotFound, NoData, VgpuEccNotSupported, ArgumentVersionMismatch: the fact is not offered."""

_RECOVERY_ACTION = 230
"""``NVML_FI_DEV_GET_GPU_RECOVERY_ACTION``, which bindings before 12.570 do not name."""
_FABRIC_VERSION = 2 << 24 | 36
_FABRIC_COMPLETED = 3
_NVLINK_TO_SWITCH = 2
_CLOCKS = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_MPS_SERVER = "nvidia-cuda-mps"
"""The kernel's name, of 15 characters, of an MPS daemon's server, which NVML lists for as long as the daemon runs."""
_ECC = (0, 0), (1, 0)  # NVML_MEMORY_ERROR_TYPE_CORRECTED and _UNCORRECTED, both NVML_VOLATILE_ECC

_initialized_in: set[int] = set()


def library() -> Any:
    """Return the binding, initialized once per process.

    A pair of init and shutdown per question would initialize idle GPUs again and again, one to three seconds each
    (NVIDIA Driver Persistence documentation). A fork copies the initialized state, which is invalid in the child: hence
    the process id.
    """
    import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if os.getpid() not in _initialized_in:
        # NO_GPUS: a machine without GPUs is an answer, not an error.
        pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        _initialized_in.add(os.getpid())
    return pynvml


def system() -> Facts:
    """Query driver version, CUDA version (12040 is 12.4) and number of GPUs, including GPUs without permission."""
    nvml = library()
    return {
        "driver": _text(optional(nvml, "nvmlSystemGetDriverVersion")),
        "cuda": optional(nvml, "nvmlSystemGetCudaDriverVersion_v2"),
        "count": nvml.nvmlDeviceGetCount(),
    }


def binding() -> Facts:
    """Query which distributions supply the module ``pynvml``."""
    from importlib.metadata import packages_distributions, version

    return {name: version(name) for name in packages_distributions().get("pynvml", ())}


def device(index: int) -> Facts:
    """Query a GPU and its MIG devices. Memory in bytes, compute capability as [major, minor]."""
    nvml = library()
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    pci = optional(nvml, "nvmlDeviceGetPciInfo", handle)
    mig = optional(nvml, "nvmlDeviceGetMigMode", handle)
    memory = _memory(nvml, handle)
    return {
        "index": index,
        "uuid": _text(optional(nvml, "nvmlDeviceGetUUID", handle)),
        "name": _text(optional(nvml, "nvmlDeviceGetName", handle)),
        "bus_id": _text(pci.busId) if pci is not None else None,
        "pci_device": f"0x{pci.pciDeviceId:08x}" if pci is not None else None,
        "minor": optional(nvml, "nvmlDeviceGetMinorNumber", handle),
        "memory": memory["total"] if memory else None,
        "compute_mode": optional(nvml, "nvmlDeviceGetComputeMode", handle),
        "compute_capability": _list(optional(nvml, "nvmlDeviceGetCudaComputeCapability", handle)),
        "persistence": optional(nvml, "nvmlDeviceGetPersistenceMode", handle),
        "fabric": _fabric(nvml, handle),
        "mig": _list(mig),
        "mig_devices": list(_mig_devices(nvml, handle)) if mig and mig[0] else [],
        **_health(nvml, handle),
    }


def topology(indexes: list[int]) -> Facts:
    """Query how GPUs are connected.

    Returns:
        ``nvlink``: by index, the number of active links by what is at their other end (a PCI bus id, or ``switch``);
        ``ancestors``: triples of two indexes and the level of the closest common PCI ancestor.
    """
    nvml = library()
    handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indexes}
    ancestors = [
        [one, other, level]
        for one in indexes
        for other in indexes
        if one < other
        and (level := optional(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[one], handles[other])) is not None
    ]
    return {"nvlink": {str(index): _nvlinks(nvml, handles[index]) for index in indexes}, "ancestors": ancestors}


def stats(device_id: str, index: int) -> Facts:
    """Query the current state of a GPU or MIG device, in percent, degrees Celsius, milliwatts, bytes and megahertz.

    A MIG device has no utilization, temperature, power and clocks of its own (NVIDIA MIG User Guide); temperature and
    clocks (of multiprocessors and memory) are those of its GPU. Memory errors are counted since the driver was loaded:
    corrected errors, then uncorrected errors.

    Args:
        device_id: UUID of the GPU or MIG device, or another id where it has none.
        index: NVML's index, used where the id is no UUID.
    """
    nvml = library()
    is_mig = device_id.startswith("MIG-")
    if is_mig or device_id.startswith("GPU-"):
        handle = nvml.nvmlDeviceGetHandleByUUID(device_id)
    else:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    # Sensors and health exist once per card, whatever its partitions.
    card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_mig else handle
    utilization = optional(nvml, "nvmlDeviceGetUtilizationRates", handle)
    memory = _memory(nvml, handle)
    return {
        "memory_used": memory["used"] if memory else None,
        "utilization": utilization.gpu if utilization is not None else None,
        "temperature": optional(nvml, "nvmlDeviceGetTemperature", card, nvml.NVML_TEMPERATURE_GPU),
        "power": None if is_mig else optional(nvml, "nvmlDeviceGetPowerUsage", card),
        "clocks": [optional(nvml, "nvmlDeviceGetClockInfo", card, kind) for kind in _CLOCKS],
        "ecc_errors": [None if is_mig else optional(nvml, "nvmlDeviceGetTotalEccErrors", card, *kind) for kind in _ECC],
        "processes": _processes(nvml, handle),
        "compute_mode": optional(nvml, "nvmlDeviceGetComputeMode", card),
        **_health(nvml, card),
    }


def optional(nvml: Any, name: str, *args: Any) -> Any:
    """Call a function of the binding; None if this GPU, driver or binding does not offer the fact.

    Each question is wrapped separately: bindings call versions of functions that older drivers lack.
    """
    function = getattr(nvml, name, None)
    if function is None:
        return None
    try:
        return function(*args)
    except nvml.NVMLError as error:
        if error.value in UNSUPPORTED:
            return None
        raise


def _memory(nvml: Any, handle: Any) -> dict[str, int] | None:
    """Query total and used memory. Version 2 excludes memory reserved by the driver; version 1 counts it as used."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = optional(nvml, "nvmlDeviceGetMemoryInfo", handle, version) if version else None
    memory = memory or optional(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return {"total": memory.total, "used": memory.used} if memory is not None else None


def _health(nvml: Any, handle: Any) -> Facts:
    return {
        "remapped_rows": _list(optional(nvml, "nvmlDeviceGetRemappedRows", handle)),
        "retired_pages_pending": optional(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle),
        "recovery_action": _field(nvml, handle, _RECOVERY_ACTION),
    }


def _field(nvml: Any, handle: Any, number: int) -> int | None:
    values = optional(nvml, "nvmlDeviceGetFieldValues", handle, [number])
    # A field that the driver does not know succeeds as a call and fails in its own status.
    if not values or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.uiVal)


def _fabric(nvml: Any, handle: Any) -> Facts | None:
    """Query the NVLink domain across machines, such as a GB200 NVL72 rack; None without such a domain.

    The words of ``nvmlGpuFabricInfo_v2_t`` are version, cluster (four), status, clique, state and health. Bindings
    before 13.580 declare the cluster as text, and fail to decode it.
    """
    info = (ctypes.c_uint32 * 9)(_FABRIC_VERSION)
    if optional(nvml, "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is None:
        return None
    cluster, clique, state = bytes(info)[4:20], info[6], info[7]
    return {"cluster": cluster.hex(), "clique": clique} if state == _FABRIC_COMPLETED and any(cluster) else None


def _mig_devices(nvml: Any, handle: Any) -> Iterator[Facts]:
    """Yield the MIG devices of a GPU. Slots are sparse, and slots of other containers may not be read."""
    for slot in range(optional(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError as error:
            if error.value in {NOT_FOUND, NO_PERMISSION, *UNSUPPORTED}:
                continue
            raise
        memory = _memory(nvml, mig)
        yield {
            "uuid": _text(nvml.nvmlDeviceGetUUID(mig)),
            "name": _text(nvml.nvmlDeviceGetName(mig)),
            "gpu_instance": optional(nvml, "nvmlDeviceGetGpuInstanceId", mig),
            "compute_instance": optional(nvml, "nvmlDeviceGetComputeInstanceId", mig),
            "memory": memory["total"] if memory else None,
        }


def _nvlinks(nvml: Any, handle: Any) -> dict[str, int]:
    ends: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        # A GPU with fewer links calls the next one an invalid argument or not supported.
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
            if optional(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _NVLINK_TO_SWITCH:
                end = "switch"
            else:
                end = _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId) or "unknown"
        except nvml.NVMLError:
            break
        ends[end] = ends.get(end, 0) + 1
    return ends


def _processes(nvml: Any, handle: Any) -> list[list[int | None]] | None:
    """Query pairs of process id and memory; None if NVML offers no list. The ids are process ids of the host.

    The server of an MPS daemon is left out: its clients, which are listed, use the device.
    """
    found: dict[int, int | None] | None = None
    for kind in ("Compute", "Graphics", "MPSCompute"):
        # Older drivers lack version 3.
        for version in ("_v3", "_v2"):
            listed = optional(nvml, f"nvmlDeviceGet{kind}RunningProcesses{version}", handle)
            if listed is not None:
                found = (found or {}) | {process.pid: process.usedGpuMemory for process in listed}
                break
    if found is None:
        return None
    return [[pid, memory] for pid, memory in sorted(found.items()) if _process_name(pid) != _MPS_SERVER]


def _process_name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().decode(errors="replace").strip()
    except OSError:  # it has ended, or is a process of the host that this container does not show
        return ""


def _text(value: Any) -> str | None:
    """Decode text; old bindings answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _list(value: Any) -> list[int] | None:
    return list(value) if value is not None else None
