"""Where the habanalabs driver shows a device in sysfs and in ``/dev``: the layout changed twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from anyaccel.plugin import Health, PciFunction, ProbeContext

VENDOR_ID = 0x1DA3
PROCESSING_ACCELERATOR = 0x1200
DRIVER = "habanalabs"
MODULE = "/sys/module/habanalabs"

_PCI = "/sys/bus/pci/devices"
_NODE = re.compile(r"(accel|hl)(\d+)")

SOON = "it comes back by itself within seconds: look again"
STATUS = {
    "operational": "",
    "in reset": SOON,
    "in reset after device release": SOON,
    "in device creation": SOON,
    "disabled": "look for habanalabs in 'dmesg', then reload the driver or restart the machine",
    "needs reset": "reload the habanalabs driver when the machine's devices are free",
}
"""Every state of the driver and what to do about it (Linux, Documentation/ABI/testing/sysfs-driver-habanalabs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The number under which the driver registered a device: its label in ``/dev``, new after every driver load.

    Attributes:
        kind: ``accel`` under the kernel's accel subsystem, ``hl`` with drivers older than that.
        minor: The number.
    """

    kind: str
    minor: int

    @property
    def name(self) -> str:
        """Name of the compute node: ``accel3`` or ``hl3``."""
        return f"{self.kind}{self.minor}"

    @property
    def compute(self) -> str:
        """Path of the node that one process at a time can open."""
        return f"/dev/accel/{self.name}" if self.kind == "accel" else f"/dev/{self.name}"

    @property
    def control(self) -> str:
        """Path of the node that monitors open, as many as like."""
        folder = "/dev/accel" if self.kind == "accel" else "/dev"
        return f"{folder}/{self.kind}_controlD{self.minor}"


def functions(ctx: ProbeContext) -> list[PciFunction]:
    """List the vendor's accelerators on the PCI bus, whether or not a driver is bound to them."""
    return ctx.pci(vendor=VENDOR_ID, classes=(PROCESSING_ACCELERATOR,))


def node_of(ctx: ProbeContext, address: str) -> Node | None:
    """Find the number of a device by its PCI address; None when the driver has not registered it.

    The PCI device's own folder is asked first. ``/dev/accel`` and ``/sys/class/accel`` also hold other vendors'
    devices (ray-project/ray#45302), so a number found there counts only with a matching ``pci_addr``.
    """
    for path in ctx.glob(f"{_PCI}/{address}/accel/accel*"):
        if found := _parse(path):
            return found
    for pattern in ("/sys/class/accel/accel*", "/sys/devices/virtual/accel/accel*", "/sys/class/habanalabs/hl*"):
        for path in ctx.glob(pattern):
            found = _parse(path)
            if found and (_text(ctx, [f"{path}/device", path], "pci_addr") or "").lower() == address:
                return found
    return None


def attribute(ctx: ProbeContext, address: str, node: Node | None, name: str) -> str | None:
    """Read an attribute of the driver, wherever this version of it has it; None when it has none.

    Raises:
        OSError: When the attribute is there and cannot be read, as with a device that fell off the bus.
    """
    folders = [f"{_PCI}/{address}"]
    if node and node.kind == "accel":
        folders += [f"/sys/class/accel/{node.name}/device", f"/sys/devices/virtual/accel/{node.name}/device"]
    elif node:
        folders += [f"/sys/class/habanalabs/{node.name}", f"/sys/class/habanalabs/{node.name}/device"]
    return _text(ctx, folders, name)


def health(status: str | None) -> tuple[Health, str]:
    """Translate the driver's status into health and, where a device cannot be used, the reason with a way out."""
    if status is None:
        return Health.UNKNOWN, ""
    state = status.lower()  # sysfs writes lower case, hl-smi capitalizes
    if state == "operational":
        return Health.HEALTHY, ""
    way_out = STATUS.get(state, "this is no state that the driver's documentation knows: look in 'dmesg'")
    return Health.UNHEALTHY, f"the driver reports {status!r}; {way_out}"


def unreadable(error: OSError) -> str:
    """Say that a device's files cannot be read."""
    return f"its sysfs files cannot be read ({error.strerror or error}); look for habanalabs in 'dmesg'"


def driver_version(ctx: ProbeContext) -> str:
    """Version of the loaded driver, such as ``1.22.1-97ec1a4``; the driver in the kernel tree states none."""
    return (ctx.read(f"{MODULE}/version") or "").strip()


def uverbs(ctx: ProbeContext, address: str) -> list[str]:
    """Nodes of the device's scale-out network ports; none when the network drivers are not loaded."""
    found = ctx.glob(f"{_PCI}/{address}/infiniband_verbs/uverbs*")
    return [f"/dev/infiniband/{path.rpartition('/')[2]}" for path in found]


def _parse(path: str) -> Node | None:
    # The whole name must match: accel_controlD3 is the control node, and numbers may have several digits.
    match = _NODE.fullmatch(path.rpartition("/")[2])
    return Node(kind=match[1], minor=int(match[2])) if match else None


def _text(ctx: ProbeContext, folders: Sequence[str], name: str) -> str | None:
    for folder in folders:
        text = ctx.read(f"{folder}/{name}")
        if text is not None and text.strip():
            return text.strip()
    return None
