"""Shares of a GPU: which GPUs can be shared, and how a worker is limited to its share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from anyaccel.kit import Cap, Fault
from anyaccel.plugin import Device, EnvEdits, Share, replace

from .masks import VARIABLE, nvml_index

MPS = "CUDA MPS"
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_THREADS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
CAPS = (
    Cap(
        "JAX",
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "fraction",
        rival="XLA_CLIENT_MEM_FRACTION",  # the newer name: JAX refuses to start with both
        void=("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "cuda_async", "vmm"),
    ),
    Cap("CuPy", "CUPY_GPU_MEMORY_LIMIT", "bytes"),
    Cap("PaddlePaddle", "FLAGS_gpu_memory_limit_mb", "MiB"),
)
VARIABLES = (MPS_PIPE, MPS_THREADS, MPS_MEMORY)


def exclusive(device: Device) -> Fault | None:
    """Return the fault of a GPU whose compute mode admits one process at most, or None.

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


def enforce(edits: EnvEdits, device: Device, share: Share, environ: Mapping[str, str]) -> EnvEdits:
    """Ask the MPS daemon of a GPU, if any, to limit threads and memory of a worker to its share.

    ``memory_by`` and ``compute_by`` claim a limit only if the daemon has answered. A tighter value of the user stays.
    """
    pipe, protocol = (device.attributes.get(name) for name in ("mps_pipe", "mps_protocol"))
    if not pipe:
        return edits
    # The share is a part of our own percentage, if this process was limited itself.
    threads = _number(environ.get(MPS_THREADS), 100) or 100
    values = {MPS_PIPE: str(pipe), MPS_THREADS: str(max(1, int(threads * share.units // 10_000)))}
    if share.memory_bytes:
        most = min([share.memory_bytes, *_pinned(device, environ)])
        values[MPS_MEMORY] = f"0={most >> 20}M"  # 0: the only GPU that the worker sees
    held = {"memory_by": MPS if protocol and MPS_MEMORY in values else ""}
    # With protocol 3, a percentage of the namespace overrides the worker's, so threads may not be limited as asked.
    return replace(edits, set={**edits.set, **values}, **held, compute_by=MPS if protocol == 2 else "")  # noqa: PLR2004


def _pinned(device: Device, environ: Mapping[str, str]) -> Iterator[int]:
    """Yield the limits of the user's own variable for a GPU, in bytes."""
    # The limit counts devices as the user's own mask numbers them: with a single entry, as 0.
    alone = re.fullmatch(r"[^,]+", environ.get(VARIABLE, ""))
    names = (device.id, "0" if alone else str(nvml_index(device)))
    for entry in environ.get(MPS_MEMORY, "").split(","):
        match = re.fullmatch(r"\s*(\S+)=([0-9]{1,9})([GM])B?\s*", entry, re.IGNORECASE)
        if match and match[1] in names and int(match[2]):
            yield int(match[2]) << (30 if match[3] in "gG" else 20)


def _number(text: str | None, most: float) -> float | None:
    """Parse a number between 0 and ``most``; None for any other text."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if 0 < value <= most else None
