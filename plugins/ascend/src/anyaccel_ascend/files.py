"""What the kernel shows without any tool: PCI functions, device nodes, versions."""

from __future__ import annotations

import re

from anyaccel.plugin import PciFunction, ProbeContext

from anyaccel_ascend.products import PCI_DEVICES, VENDORS, VIRTUAL_FUNCTION

CLASS = 0x1200
"""Processing accelerator."""
MANAGER = "/dev/davinci_manager"
CONTROL_NODES = (MANAGER, "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/dvpp_cmdlist")
"""Nodes that every user of an NPU opens; which of them exist depends on the generation."""
DRIVER = "/usr/local/Ascend/driver"
HOST_PATHS = (
    DRIVER,
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
    "/etc/hccl_rootinfo.json",
)
"""What Ascend's container instructions mount beside the nodes."""
FIRST_VNPU = 100
VNPUS_PER_DEVICE = 16
"""A vNPU's number is 100 + 16 times the physical number + 0 to 15."""


def functions(ctx: ProbeContext) -> list[PciFunction]:
    """The PCI functions that are NPUs. Virtual ones count only where there are no others, as in a virtual machine."""
    found = [
        function
        for function in ctx.pci(classes=(CLASS,))
        if function.vendor in VENDORS and function.device in PCI_DEVICES
    ]
    physical = [function for function in found if function.device != VIRTUAL_FUNCTION]
    return physical or found


def nodes(ctx: ProbeContext, stem: str = "davinci") -> list[int]:
    """The numbers in ``/dev/davinci<N>``, ascending as numbers; ``davinci_manager`` is none of them."""
    paths = ctx.glob(f"/dev/{stem}[0-9]*")
    return sorted(int(match[1]) for path in paths if (match := re.fullmatch(rf"/dev/{stem}(\d+)", path)))


def driver_version(ctx: ProbeContext) -> str:
    """Version of the driver package, or an empty string."""
    try:
        text = ctx.read(f"{DRIVER}/version.info") or ""
    except OSError:
        return ""
    match = re.search(r"^(?:package_version|Version)=(\S+)", text, re.MULTILINE)
    package = re.search(r"^package_version=(\S+)", text, re.MULTILINE)
    return package[1] if package else match[1] if match else ""


def driver_present(ctx: ProbeContext) -> bool:
    """Whether the kernel driver is loaded, or its package installed."""
    return ctx.exists(MANAGER) or ctx.exists(f"{DRIVER}/version.info")


def in_container(ctx: ProbeContext) -> bool:
    """Whether we run in a container, where PCI shows NPUs that belong to others."""
    names = ("container", "KUBERNETES_SERVICE_HOST")
    return ctx.exists("/.dockerenv") or ctx.exists("/run/.containerenv") or any(ctx.environ.get(name) for name in names)


def kernel_number(ctx: ProbeContext, address: str) -> int | None:
    """The number in ``/dev/davinci<N>`` of a PCI function that has a single chip; only root may read it."""
    base = f"/sys/bus/pci/devices/{address}"
    try:
        chips = ctx.read_int(f"{base}/davinci_dev_num")
        return ctx.read_int(f"{base}/dev_id") if chips == 1 else None
    except OSError:
        return None


def node_fault(ctx: ProbeContext, number: int) -> str:
    """Why this user cannot open ``/dev/davinci<N>``, with the way out; empty when it can."""
    path = f"/dev/davinci{number}"
    node = ctx.node(path)
    if node is None:
        return f"{path} is missing; mount it into this container, or restart the driver"
    if not (node.readable and node.writable):
        return f"{path} may not be opened by this user; add the user to the group HwHiAiUser and log in again"
    return ""
