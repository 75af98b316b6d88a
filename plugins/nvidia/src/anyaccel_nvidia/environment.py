"""What a worker's environment must say so that it sees exactly its GPUs, and holds to its share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from anyaccel.plugin import Device, EnvContext, EnvEdits, Fractional, Share, Term

from .tags import is_mig
from .visibility import MASK, ORDER, PCI_ORDER, in_cuda, nvml_index

MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
JAX_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_MEMORY_RIVAL = "XLA_CLIENT_MEM_FRACTION"
TENSORFLOW_MEMORY = "TF_FORCE_GPU_ALLOW_GROWTH"
VARIABLES = (MASK, ORDER, MPS_PIPE, MPS_THREADS, MPS_MEMORY, JAX_MEMORY, JAX_MEMORY_RIVAL, TENSORFLOW_MEMORY)

MPS = "CUDA MPS"
UNITS_PER_PERCENT = 100
_MIB = 1 << 20


def edits(devices: Sequence[Device], ctx: EnvContext) -> EnvEdits:
    """Show exactly ``devices``, in this order; an empty list hides all, where an inherited one would show all.

    Raises:
        ValueError: When no mask can express the set.
    """
    reason = _unmaskable(devices)
    if reason:
        raise ValueError(reason)
    if not devices:
        return EnvEdits(set={MASK: ""})
    values = {MASK: ",".join(_names(devices, ctx)), ORDER: PCI_ORDER}
    share = ctx.shares.get(devices[0].id)
    if share is None or share.whole:
        return EnvEdits(set=values)
    values |= _framework_caps(share, ctx.environ)
    mps = _mps_caps(devices[0], share, ctx.environ)
    return EnvEdits(set=values | mps, unset=frozenset({JAX_MEMORY_RIVAL}), enforced_by=MPS if mps else "")


def _names(devices: Sequence[Device], ctx: EnvContext) -> list[str]:
    """Names of the devices in a mask: all UUIDs or all indexes, since CUDA takes no mixture.

    Under MPS the daemon's own mask may have renumbered the GPUs, so there UUIDs are the only safe names.
    """
    have_uuids = all(device.id.startswith(("GPU-", "MIG-")) for device in devices)
    need_uuids = any(is_mig(device) or "mps_pipe" in device.attributes for device in devices)
    if have_uuids and (ctx.mask == "id" or need_uuids):
        return [device.id for device in devices]
    return [str(nvml_index(device)) for device in devices]


def _framework_caps(share: Share, environ: Mapping[str, str]) -> dict[str, str]:
    """Keep frameworks that take nearly all memory at start to the share: JAX by fraction, TensorFlow by growing.

    JAX refuses to start when the new name of its variable is set beside the one that all versions know.
    """
    total = share.device.memory_bytes
    part = share.memory_bytes / total if share.memory_bytes and total else share.units / 10_000
    for name in (JAX_MEMORY, JAX_MEMORY_RIVAL):
        part = min(part, _number(environ.get(name), 0, 1) or part)
    return {JAX_MEMORY: f"{math.floor(part * 10_000) / 10_000:g}", TENSORFLOW_MEMORY: "true"}


def _mps_caps(device: Device, share: Share, environ: Mapping[str, str]) -> dict[str, str]:
    """Where an MPS daemon listens, let it hold the worker to its part of threads and memory."""
    pipe = device.attributes.get("mps_pipe")
    if not pipe:
        return {}
    threads = _number(environ.get(MPS_THREADS), 0, 100) or 100  # a part of what we were given ourselves
    caps = {MPS_PIPE: str(pipe), MPS_THREADS: str(max(1, int(threads * share.units // 10_000)))}
    if share.memory_bytes:
        caps[MPS_MEMORY] = f"0={share.memory_bytes // _MIB}M"  # 0: the only GPU that the worker sees
    return caps


def _number(text: str | None, above: float, most: float) -> float | None:
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if above < value <= most else None


def fractional(device: Device) -> Fractional:
    """Whether several may share a device. Shares are by agreement, unless an MPS daemon enforces them."""
    return Fractional.SHARED if in_cuda(device) and not _exclusive(device) else Fractional.NO


def validate(term: Term, devices: Sequence[Device]) -> str | None:
    """Say why CUDA cannot serve a term with exactly these devices."""
    if term.fraction:
        for device in devices:
            reason = _exclusive(device)
            if reason:
                return reason
            if "mps_pipe" in device.attributes and term.units < UNITS_PER_PERCENT:
                return "an MPS share is at least 1 percent of a GPU: ask for 0.01 or more"
    return _unmaskable(devices)


def _exclusive(device: Device) -> str | None:
    mode = device.attributes.get("compute_mode")
    if mode == "prohibited":
        return f"{device.id} is in the compute mode PROHIBITED, which admits no process: 'nvidia-smi -c DEFAULT'"
    if mode in ("exclusive_process", "exclusive_thread") and "mps_pipe" not in device.attributes:
        return (
            f"{device.id} is in the compute mode {str(mode).upper()}, which admits one process: ask for whole GPUs,"
            " start an MPS daemon, or allow sharing with 'nvidia-smi -c DEFAULT'"
        )
    return None


def _unmaskable(devices: Sequence[Device]) -> str | None:
    for device in devices:
        if not in_cuda(device):
            return f"{device.id} is not NVIDIA's driver's ({device.health_reason or 'another driver has it'})"
    if len(devices) > 1 and any(is_mig(device) for device in devices):
        return (
            "one process sees one MIG device, and MIG devices have no path to each other: ask for 1 MIG device per"
            " worker, or for whole GPUs"
        )
    return None
