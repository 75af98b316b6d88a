"""Whether a GPU can be used: device nodes that open, and a driver that answers."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from anyaccel.plugin import Device, ProbeContext

from anyaccel_amd import kfd

PCI = "/sys/bus/pci/devices"
KFD_NODE = "/dev/kfd"
ERRORS = "umc_err_count"
"""Counts of the memory controller's ECC, below ``ras/`` of the PCI device: ``ue`` uncorrectable, ``ce`` corrected."""

DEAD = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT)


def render_node(minor: int | None) -> str | None:
    """Path of a render node. The minor is read, never computed: cards reserve minors for their partitions."""
    return f"/dev/dri/renderD{minor}" if minor else None


def access_problem(ctx: ProbeContext, path: str) -> str:
    """Why a device node cannot be opened by this user; empty when it can."""
    node = ctx.node(path)
    if node is None:
        return (
            f"{path} is not there; load the driver with 'modprobe amdgpu', or in a container add"
            f" '--device={path}' to its start"
        )
    if not (node.readable and node.writable):
        return (
            f"no permission to open {path} for reading and writing; add the user to the group that owns it"
            " ('sudo usermod -aG render $USER', then log in again; in a container '--group-add' with the host's number)"
        )
    return ""


def problem(ctx: ProbeContext, card: str, minor: int | None) -> str:
    """Why a device of a card cannot be used; empty when nothing speaks against it.

    Args:
        ctx: The machine.
        card: PCI address of the card.
        minor: Minor number of the device's render node, or None when KFD does not say.
    """
    node = render_node(minor)
    if node is None:
        return "the driver gives it no render node; see 'dmesg | grep amdgpu' and reload the driver"
    silent = silence(ctx, card)
    return silent or access_problem(ctx, KFD_NODE) or access_problem(ctx, node)


def silence(ctx: ProbeContext, card: str) -> str:
    """Why a card does not answer: the driver fails reads of a GPU that hangs, resets or fell off the bus."""
    try:
        ctx.read(f"{PCI}/{card}/mem_info_vram_used")
    except OSError as error:
        if error.errno not in DEAD:
            return ""
        return (
            f"the GPU at {card} does not answer the driver ({error.strerror}); see 'dmesg | grep amdgpu', then reset it"
            " with 'sudo amd-smi reset -G' or restart the machine"
        )
    return ""


def uncorrectable(ctx: ProbeContext, card: str) -> int | None:
    """Uncorrectable memory errors since the driver was loaded, or None when the card does not count them."""
    try:
        text = ctx.read(f"{PCI}/{card}/ras/{ERRORS}")
    except OSError:
        return None
    for line in (text or "").splitlines():
        name, _, count = line.partition(":")
        if name.strip() == "ue" and count.strip().isdecimal():
            return int(count)
    return None


def card_of(device: Device) -> str:
    """PCI address of the card that a device is, or is a part of."""
    return str(device.attributes.get("card", device.pci_bus_id or ""))


def worn_out(facts: Mapping[str, object]) -> str:
    """Why a card should be replaced, from amdsmi's counts of retired pages; empty when it need not be."""
    pages, limit = facts.get("bad_pages"), facts.get("bad_page_threshold")
    if isinstance(pages, int) and isinstance(limit, int) and 0 < limit < pages:
        return f"{pages} pages of its memory are retired and AMD's limit is {limit}; have the card replaced"
    return ""


def vanished(ctx: ProbeContext, number: int) -> bool:
    """Whether a KFD node that was there is gone, as after a failed reset."""
    return not ctx.is_dir(f"{kfd.NODES}/{number}")
