"""Memory that goes from one process to another as it is: written once, mapped on the other side."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence

ALIGNMENT = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_BLOCK = 512
_MAP_POPULATE = 0x8000
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def write(parts: Sequence[bytes | memoryview]) -> int:
    """Put parts one after the other, aligned, into memory of their own.

    Returns:
        A descriptor to pass on; its size is sealed, so that whoever maps it can rely on it.

    Raises:
        OSError: When there is no memory or no descriptor left.
    """
    descriptor = os.memfd_create("anyaccel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        for part in parts:
            view = memoryview(part)
            while view:
                written = os.pwrite(descriptor, view[: 1 << 30], offset)
                view = view[written:]
                offset += written
            offset = _aligned(offset)
        os.ftruncate(descriptor, max(offset, 1))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(descriptor: int, lengths: Sequence[int]) -> list[memoryview]:
    """Map what :func:`write` wrote, without a copy. The memory lives as long as a view of it.

    Raises:
        ValueError: When the memory is smaller than it should be, has gaps, or could shrink under us.
        OSError: When it cannot be mapped.
    """
    offsets = [0]
    for length in lengths:
        offsets.append(_aligned(offsets[-1] + length))
    size = offsets[-1]
    found = os.fstat(descriptor)
    # It must have the memory that it says: to map it would fill a gap of any size with memory of ours.
    if (
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS
        or found.st_size < size
        or found.st_blocks * _BLOCK < size
    ):
        raise ValueError(f"shared memory must be sealed and hold {size} bytes")
    whole = _map(descriptor, size) if size else memoryview(b"")
    return [whole[start : start + length] for start, length in zip(offsets, lengths, strict=False)]


def _map(descriptor: int, size: int) -> memoryview:
    # Not mmap.mmap: before Python 3.13 that keeps a descriptor for every array that lives.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED | _MAP_POPULATE, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{size} bytes of shared memory cannot be mapped: {os.strerror(code)}")
    block = (ctypes.c_char * size).from_address(address)
    weakref.finalize(block, _libc.munmap, address, size).atexit = False  # views may outlive the interpreter's end
    return memoryview(block).cast("B")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
