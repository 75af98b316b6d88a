"""The KFD topology: the kernel's own list of GPUs, from which ROCm numbers its devices.

One directory per node below ``/sys/class/kfd/kfd/topology/nodes``, CPUs included (kernel
``drivers/gpu/drm/amd/amdkfd/kfd_topology.c``). Reading a GPU whose render node the device cgroup denies fails: ROCm's
runtime skips the node and numbers the rest, and so does this module.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from anyaccel.kit import PCI_DEVICES, number, text, total
from anyaccel.plugin import DeviceProcess, ProbeContext

TOPOLOGY = "/sys/class/kfd/kfd/topology"
NODES = f"{TOPOLOGY}/nodes"
PROCESSES = "/sys/class/kfd/kfd/proc"
AMD = 0x1002
XGMI_LINK = 11
MOST_LINKS = 16
VIDEO_MEMORY = (1, 2)
"""Heap types of video memory: memory visible to the CPU, and the rest."""
ATTEMPTS = 3


class Node:
    """A GPU in the topology: a card or a partition of a card."""

    card = ""  # PCI address of its card
    partition = 0  # its number within the card
    divided = False  # the card is divided, also when only one partition is to be seen

    def __init__(self, number: int, gpu_id: int | None, properties: Mapping[str, int], error: str = "") -> None:
        self.number = number  # of its directory; CPUs count too
        self.gpu_id = gpu_id  # under which KFD lists processes, or None
        self.properties = properties  # empty where reading them failed with an error
        self.error = error

    @property
    def gfx(self) -> str:
        """Name of the instruction set, such as ``gfx90a`` for 90010; empty if unknown."""
        version = self.properties.get("gfx_target_version", 0)
        return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""


def read(ctx: ProbeContext, functions: Collection[str]) -> list[Node]:
    """Read the GPUs visible to this process, in the order of ROCm's numbers.

    The topology is read again if it changed during the reading, as in a repartitioning. ``functions`` are the PCI
    addresses of GPUs.

    Raises:
        ValueError: A file is malformed, or two nodes claim to be the same device.
        RuntimeError: The topology keeps changing.
    """
    for _ in range(ATTEMPTS):
        before = ctx.read(f"{TOPOLOGY}/generation_id")
        nodes = [node for path in ctx.glob(f"{NODES}/[0-9]*") if (node := _node(ctx, path)) is not None]
        # The kernel counts changes of the topology; the same number before and after means a consistent list.
        if ctx.read(f"{TOPOLOGY}/generation_id") == before:
            _number_partitions(ctx, [node for node in nodes if not node.error], functions)
            return nodes
    raise RuntimeError(
        f"{TOPOLOGY}/generation_id must stay the same while the GPUs are listed (it changed {ATTEMPTS} times);"
        " wait until no GPU is being partitioned or reset, and try again"
    )


def count_denied(ctx: ProbeContext) -> int:
    """Count the nodes hidden by the device cgroup."""
    return sum(_properties(ctx, path)[1] == errno.EPERM for path in ctx.glob(f"{NODES}/[0-9]*"))


def _properties(ctx: ProbeContext, path: str) -> tuple[str | None, int]:
    """Return the text of a node's properties, None if gone; and the errno of a failed read, else 0."""
    try:
        return ctx.read(f"{path}/properties"), 0
    except OSError as error:
        return None, error.errno or errno.EIO


def _node(ctx: ProbeContext, path: str) -> Node | None:
    """Read a node; None for a CPU, a node that is gone or denied, and another vendor's GPU.

    Software derived from ROCm has a KFD, too (Hygon's).
    """
    node_number, gpu_id = int(path.rpartition("/")[2]), number(ctx, f"{path}/gpu_id")
    told, failed = _properties(ctx, path)
    # The device cgroup answers EPERM. EACCES comes from the mode of the file, and is a fault.
    if failed and failed != errno.EPERM and gpu_id != 0:
        return Node(node_number, gpu_id, {}, f"reading {path}/properties failed: {os.strerror(failed)}")
    if told is None:
        return None
    properties = parse(told, f"{path}/properties")
    # An APU has CPU cores and SIMDs in one node, so a node with cores may be a GPU.
    if properties.get("simd_count", 0) == 0 or properties.get("vendor_id", AMD) != AMD:
        return None
    if "location_id" not in properties:
        raise ValueError(
            f"{path}/properties must have a line 'location_id' for a GPU (got {', '.join(sorted(properties))});"
            " reload the driver with 'modprobe -r amdgpu && modprobe amdgpu', or report the kernel's version"
        )
    return Node(node_number, gpu_id, properties)


def parse(content: str, path: str) -> dict[str, int]:
    """Parse lines ``key value`` with decimal values of up to 64 bits.

    Raises:
        ValueError: A line has another form.
    """
    values: dict[str, int] = {}
    for line in content.splitlines():
        key, _, value = line.strip().partition(" ")
        if key and not (value.isascii() and value.isdigit()):
            raise ValueError(
                f"{path} must hold lines of a key and a decimal number (got {line!r});"
                " check that the file is the kernel's own, and report the kernel's version"
            )
        if key:
            values[key] = int(value)
    return values


def _number_partitions(ctx: ProbeContext, nodes: list[Node], functions: Collection[str]) -> None:
    """Set the card and the partition number of each node."""
    taken: dict[str, dict[int, Node]] = {}
    for node in nodes:
        node.card, wanted = _address(node.properties, functions)
        rivals = taken.setdefault(node.card, {})
        node.partition = _next_number(node, rivals) if wanted in rivals else wanted
        rivals[node.partition] = node
    for node in nodes:
        mode = text(ctx, f"{PCI_DEVICES}/{node.card}/current_compute_partition").lower()
        # A container may see a single partition of a divided card; the card's mode then tells.
        node.divided = len(taken[node.card]) > 1 or node.partition > 0 or mode not in ("", "spx")


def _address(properties: Mapping[str, int], functions: Collection[str]) -> tuple[str, int]:
    """Return the card's PCI address and the partition number, which is coded in spare bits of the location.

    The domain is a line of its own, absent on old kernels. Newer kernels put the partition into the upper four bits of
    the location; older ones use a function number unknown to PCI.
    """
    location = properties["location_id"]
    place = f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function, partition = location & 7, location >> 28 & 0xF
    if not partition and f"{place}.{function}" not in functions:
        return f"{place}.0", function
    return f"{place}.{function}", partition


def _next_number(node: Node, rivals: Mapping[int, Node]) -> int:
    """Number a partition whose address is taken: a render node of its own proves another device."""
    minor = node.properties.get("drm_render_minor", 0)
    twin = next((rival for rival in rivals.values() if rival.properties.get("drm_render_minor", 0) == minor), None)
    if twin is not None:
        raise ValueError(
            f"{NODES}: two GPUs must not share a PCI address and a render node (got {node.card} and minor {minor} for"
            f" nodes {twin.number} and {node.number}); reload the driver, or report the kernel's version"
        )
    return max(rivals) + 1


def links(ctx: ProbeContext, node_number: object) -> dict[int, int]:
    """Return the strength of a node's XGMI links by node number. Nearer is stronger, and so are more links.

    The kernel writes a line per pair (``kfd_fill_gpu_xgmi_link_to_gpu`` in ``kfd_crat.c``): a weight that grows with
    hops; as least bandwidth the bandwidth of a link, as highest the bandwidth of every link of the pair. Both are 0 if
    the path leads over other GPUs. PCIe links pass through the host and are ignored.
    """
    found: Counter[int] = Counter()
    for file in ctx.glob(f"{NODES}/{node_number}/io_links/[0-9]*/properties"):
        link = parse(text(ctx, file), file)
        if link.get("type") == XGMI_LINK and "node_to" in link:
            count = link.get("max_bandwidth", 0) // (link.get("min_bandwidth") or 1 << 64)
            found[link["node_to"]] += max(1, 1000 - link.get("weight", 0)) * min(max(1, count), MOST_LINKS)
    return found


def _banks(ctx: ProbeContext, node_number: object) -> Iterator[tuple[str, int]]:
    """Yield the banks of a node's video memory: path of the directory, and size."""
    for path in ctx.glob(f"{NODES}/{node_number}/mem_banks/[0-9]*"):
        bank = parse(text(ctx, f"{path}/properties"), f"{path}/properties")
        if bank.get("heap_type") in VIDEO_MEMORY:
            yield path, bank.get("size_in_bytes", 0)


def memory_bytes(ctx: ProbeContext, node: Node) -> int | None:
    """Return the size of a node's video memory, or None."""
    return sum(size for _, size in _banks(ctx, node.number)) or node.properties.get("local_mem_size") or None


def used_bytes(ctx: ProbeContext, node_number: object) -> int | None:
    """Return the memory in use of a node, which newer kernels write beside the banks."""
    return total(ctx, [f"{path}/used_memory" for path, _ in _banks(ctx, node_number)])


def processes(ctx: ProbeContext) -> dict[int, tuple[DeviceProcess, ...]] | None:
    """Return processes with memory or a queue on a GPU, by ``gpu_id``; None if this kernel lists none.

    KFD also lists a process on GPUs that it merely opened; such a process is left out.
    """
    # Older kernels have no such directory.
    if not ctx.is_dir(PROCESSES):
        return None
    found: dict[int, list[DeviceProcess]] = {}
    for path in ctx.glob(f"{PROCESSES}/[0-9]*"):
        queues = {number(ctx, file) for file in ctx.glob(f"{path}/queues/*/gpuid")}
        memory = {int(file.rpartition("_")[2]): number(ctx, file) for file in ctx.glob(f"{path}/vram_[0-9]*")}
        for gpu in sorted({gpu for gpu in queues if gpu} | {gpu for gpu, used in memory.items() if used}):
            process = DeviceProcess(pid=int(path.rpartition("/")[2]), memory_bytes=memory.get(gpu))
            found.setdefault(gpu, []).append(process)
    return {gpu: tuple(users) for gpu, users in found.items()}
