"""Why a GPU that is on the bus cannot be used, with the way out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from anyaccel.plugin import CommandTimeoutError, PciFunction, ProbeContext

PCI = "/sys/bus/pci/devices"
DRIVERS = ("i915", "xe")
BY_PATH = "/dev/dri/by-path"
DMESG_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that keeps a GPU from being used.

    Attributes:
        reason: What is wrong, as a clause about the GPU.
        fix: What to do about it.
        counted: Whether the runtime counts the GPU all the same.
    """

    reason: str
    fix: str
    counted: bool = False

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}"


def fault_of(function: PciFunction, nodes: Sequence[str], split: int, ctx: ProbeContext) -> Fault | None:
    """Find what keeps a GPU from being used: driver, device node, permission, division.

    Args:
        function: The PCI function.
        nodes: Device nodes that its driver made.
        split: Number of virtual functions that it is divided into.
        ctx: The machine.
    """
    if function.driver not in DRIVERS:
        bound = f"driver {function.driver!r} is bound to it" if function.driver else "no kernel driver is bound to it"
        return Fault(bound, "load xe or i915 (Battlemage cards need xe and Linux 6.12 or newer)")
    if fault := _node_fault(function, nodes, ctx):
        return fault
    if split:
        text = f"it is divided into {split} virtual functions, which are given out in its place"
        cure = f"write 0 to {PCI}/{function.address}/sriov_numvfs to use it whole"
        return Fault(text, cure, counted=True)
    return None


def _node_fault(function: PciFunction, nodes: Sequence[str], ctx: ProbeContext) -> Fault | None:
    """Find what keeps this user from opening a GPU."""
    render = next((node for node in nodes if "renderD" in node), None)
    if render is None:
        return Fault("its driver has made no render node", f"look for errors of {function.driver} in the kernel log")
    node = ctx.node(render)
    if node is None:
        return Fault(
            f"{render} is missing", f"pass it to this container with --device {render}, or run udevadm trigger"
        )
    if not (node.readable and node.writable):
        return Fault(f"{render} may not be opened by this user", f"join the group that owns it (stat -c %g {render})")
    links = ctx.glob(f"{BY_PATH}/pci-*-render")
    if links and f"{BY_PATH}/pci-{function.address}-render" not in links:
        return Fault(f"{BY_PATH} has no link to it, and the runtime looks there", f"mount the whole folder {BY_PATH}")
    return None


def wedged(ctx: ProbeContext, addresses: Sequence[str]) -> frozenset[str]:
    """Find the GPUs that the kernel gave up and did not start again since.

    sysfs lists them as if nothing had happened. Users who may not read the kernel log learn nothing here.
    """
    if not addresses:
        return frozenset()
    try:
        log = ctx.run(["dmesg"], timeout=DMESG_SECONDS)
    except (CommandTimeoutError, OSError):
        return frozenset()
    dead: set[str] = set()
    address = r"([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
    for line in (log.stdout if log and log.returncode == 0 else "").splitlines():
        if match := re.search(rf"declared device {address} as wedged", line):
            dead.add(match[1])
        elif match := re.search(rf"Initialized (?:xe|i915) .*for {address} ", line):
            dead.discard(match[1])
    return frozenset(dead.intersection(addresses))
