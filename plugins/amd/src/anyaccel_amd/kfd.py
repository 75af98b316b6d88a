"""The kernel's own list of GPUs: the KFD topology, from which ROCm numbers its devices.

One directory per node below ``/sys/class/kfd/kfd/topology/nodes``, CPUs included (kernel
``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``). A GPU whose render node the device cgroup denies refuses to be read:
ROCm's runtime skips it and numbers the rest, and so do we.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from anyaccel.plugin import ProbeContext

TOPOLOGY = "/sys/class/kfd/kfd/topology"
NODES = f"{TOPOLOGY}/nodes"
PROCESSES = "/sys/class/kfd/kfd/proc"
XGMI_LINK = 11
VIDEO_MEMORY = (1, 2)
"""Heap types of memory banks: the part of video memory that the CPU reaches, and the rest."""
ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A GPU in the topology: a card, or one partition of a card.

    Attributes:
        number: Number of its directory; CPUs count too.
        gpu_id: KFD's own id, under which it lists processes, or None.
        name: Codename of the chip; empty on old kernels.
        properties: Content of its ``properties``; empty when it could not be read.
        memory_bytes: Size of its video memory, or None.
        links: Strength of its XGMI links by node number.
        error: Why it could not be read.
    """

    number: int
    gpu_id: int | None = None
    name: str = ""
    properties: Mapping[str, int]
    memory_bytes: int | None = None
    links: Mapping[int, int]
    error: str = ""

    @property
    def card(self) -> tuple[int, int, int]:
        """PCI domain, bus and device. The domain is a line of its own, absent on old kernels."""
        location = self.properties["location_id"]
        return self.properties.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F

    @property
    def function(self) -> int:
        """PCI function. Partitions of a card appear as functions that PCI does not have."""
        return self.properties["location_id"] & 7

    @property
    def partition(self) -> int:
        """Number of the partition where newer kernels put it: the upper four bits."""
        return self.properties["location_id"] >> 28 & 0xF

    @property
    def gfx(self) -> str:
        """Name of the instruction set, such as ``gfx90a`` for 90010; empty when unknown."""
        version = self.properties.get("gfx_target_version", 0)
        return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The GPUs of the topology.

    Attributes:
        gpus: Those that may be read, in the order in which ROCm numbers them.
        denied: Number of nodes that the device cgroup hides.
    """

    gpus: tuple[Node, ...]
    denied: int


def read(ctx: ProbeContext) -> Topology:
    """Read the topology, again when it changed on the way, as it does when somebody repartitions a card.

    Raises:
        ValueError: When a file is not what the kernel writes.
        RuntimeError: When the topology does not come to rest.
    """
    for _ in range(ATTEMPTS):
        before = ctx.read(f"{TOPOLOGY}/generation_id")
        topology = _read_once(ctx)
        if ctx.read(f"{TOPOLOGY}/generation_id") == before:
            return topology
    raise RuntimeError(
        f"{TOPOLOGY}/generation_id must stay the same while the GPUs are listed (it changed {ATTEMPTS} times);"
        " wait until nobody partitions or resets a GPU and try again"
    )


def _read_once(ctx: ProbeContext) -> Topology:
    gpus: list[Node] = []
    denied = 0
    for path in ctx.glob(f"{NODES}/[0-9]*"):
        try:
            node = _node(ctx, path)
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            denied += 1
        else:
            gpus += [node] if node else []
    return Topology(gpus=tuple(gpus), denied=denied)


def _node(ctx: ProbeContext, path: str) -> Node | None:
    """Read one node; None for a CPU, and for one that is gone."""
    number = int(path.rpartition("/")[2])
    try:
        text = ctx.read(f"{path}/properties")
    except OSError as error:
        if error.errno == errno.EPERM:  # the device cgroup's answer; that of a file's mode is EACCES
            raise
        gpu_id = _gpu_id(ctx, path)
        reason = f"reading {path}/properties failed: {error.strerror}"
        return None if gpu_id == 0 else Node(number=number, gpu_id=gpu_id, properties={}, links={}, error=reason)
    if text is None:
        return None
    properties = parse(text, f"{path}/properties")
    # An APU has CPU cores and SIMDs in one node, so that the cores say nothing.
    if properties.get("simd_count", 0) == 0:
        return None
    if "location_id" not in properties:
        raise ValueError(
            f"{path}/properties must have a line 'location_id' for a GPU (got {', '.join(sorted(properties))});"
            " reload the driver with 'modprobe -r amdgpu && modprobe amdgpu', or report the kernel's version"
        )
    return Node(
        number=number,
        gpu_id=_gpu_id(ctx, path),
        name=(_text(ctx, f"{path}/name") or "").strip(),
        properties=properties,
        memory_bytes=_memory(ctx, path, properties),
        links=_links(ctx, path),
    )


def parse(text: str, path: str) -> dict[str, int]:
    """Parse ``key value`` lines with decimal values of up to 64 bits.

    Raises:
        ValueError: When a line is anything else.
    """
    values: dict[str, int] = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if key and not (value.isascii() and value.isdigit()):
            raise ValueError(
                f"{path} must hold lines of a key and a decimal number (got {line!r});"
                " check that the file is the kernel's own, and report the kernel's version"
            )
        if key:
            values[key] = int(value)
    return values


def strength(weight: int) -> int:
    """Turn KFD's weight of a link, where lower is nearer, into a strength, where higher is."""
    return max(1, 1000 - weight)


def banks(ctx: ProbeContext, number: int) -> Iterator[tuple[str, Mapping[str, int]]]:
    """The memory banks of a node that are video memory: path of the directory, and its properties."""
    for path in ctx.glob(f"{NODES}/{number}/mem_banks/[0-9]*"):
        text = _text(ctx, f"{path}/properties")
        bank = parse(text, f"{path}/properties") if text is not None else {}
        if bank.get("heap_type") in VIDEO_MEMORY:
            yield path, bank


def _memory(ctx: ProbeContext, path: str, properties: Mapping[str, int]) -> int | None:
    number = int(path.rpartition("/")[2])
    total = sum(bank.get("size_in_bytes", 0) for _, bank in banks(ctx, number))
    return total or properties.get("local_mem_size") or None


def _links(ctx: ProbeContext, path: str) -> dict[int, int]:
    """XGMI links. PCIe links go through the host and count for nothing; the weight tells hops apart."""
    found: dict[int, int] = {}
    for file in ctx.glob(f"{path}/io_links/[0-9]*/properties"):
        text = _text(ctx, file)
        link = parse(text, file) if text is not None else {}
        if link.get("type") == XGMI_LINK and "node_to" in link:
            found[link["node_to"]] = strength(link.get("weight", 0))
    return found


def _gpu_id(ctx: ProbeContext, path: str) -> int | None:
    text = _text(ctx, f"{path}/gpu_id")
    return int(text) if text is not None and re.fullmatch(r"[0-9]+\s*", text) else None


def _text(ctx: ProbeContext, path: str) -> str | None:
    """Read a file that only adds to what is known."""
    try:
        return ctx.read(path)
    except OSError:
        return None
