"""Shares of a GPU: who may have one, and what holds a worker to it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from anyaccel.kit import Fault
from anyaccel.plugin import Device, EnvEdits, Share

MPS = "CUDA MPS"
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
JAX_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
JAX_MEMORY_RIVAL = "XLA_CLIENT_MEM_FRACTION"
TENSORFLOW_MEMORY = "TF_FORCE_GPU_ALLOW_GROWTH"
VARIABLES = (MPS_PIPE, MPS_THREADS, MPS_MEMORY, JAX_MEMORY, JAX_MEMORY_RIVAL, TENSORFLOW_MEMORY)


def exclusive(device: Device) -> Fault | None:
    """Why a GPU admits one process at most, by its compute mode; None when it admits several.

    An MPS server counts as the one process of an exclusive mode.
    """
    mode = str(device.attributes.get("compute_mode", ""))
    where = f"{device.id} is in the compute mode {mode.upper()}"
    if mode == "prohibited":
        return Fault(f"{where}, which admits no process", "'nvidia-smi -c DEFAULT'")
    if mode and "mps_pipe" not in device.attributes:
        return Fault(
            f"{where} and no MPS daemon runs, so it admits one process",
            "ask for whole GPUs, start 'nvidia-cuda-mps-control -d', or end its processes and allow sharing with"
            " 'nvidia-smi -c DEFAULT'",
        )
    return None


def edits(device: Device, share: Share, environ: Mapping[str, str], mask: Mapping[str, str]) -> EnvEdits:
    """Hold a worker to its share of a GPU, the only one that its mask shows.

    Frameworks that take nearly all memory at start get a cap: JAX a fraction, TensorFlow growth. JAX refuses to start
    when the new name of its variable is set beside the one that all versions know. Where an MPS daemon listens, it
    holds the worker to its part of threads and memory. A tighter value of the user's stays.
    """
    total = device.memory_bytes
    part = share.memory_bytes / total if share.memory_bytes and total else share.units / 10_000
    for name in (JAX_MEMORY, JAX_MEMORY_RIVAL):
        part = min(part, _number(environ.get(name), 1) or part)
    values = {**mask, JAX_MEMORY: f"{math.floor(part * 10_000) / 10_000:g}", TENSORFLOW_MEMORY: "true"}
    pipe = device.attributes.get("mps_pipe")
    if pipe:
        threads = _number(environ.get(MPS_THREADS), 100) or 100  # a part of what we were given ourselves
        values |= {MPS_PIPE: str(pipe), MPS_THREADS: str(max(1, int(threads * share.units // 10_000)))}
        if share.memory_bytes:
            values[MPS_MEMORY] = f"0={share.memory_bytes >> 20}M"  # 0: the only GPU that the worker sees
    return EnvEdits(set=values, unset=frozenset({JAX_MEMORY_RIVAL}), enforced_by=MPS if pipe else "")


def _number(text: str | None, most: float) -> float | None:
    """A number above 0; None where the variable holds none that counts."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if 0 < value <= most else None
