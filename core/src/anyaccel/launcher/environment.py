"""Make the environment of a worker from the edits of the vendors' plug-ins."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping

from anyaccel.errors import EnvConflictError, PluginError
from anyaccel.inventory import ALLOCATION_VARIABLE, LEASE_VARIABLE
from anyaccel.model import (
    AGREEMENT,
    Allocation,
    EnvContext,
    EnvEdits,
    Grant,
    Inventory,
    Share,
    Value,
    VendorReport,
    VendorState,
    encode,
    field,
    replace,
)
from anyaccel.probe import HOST, MACHINE_VARIABLE
from anyaccel.text import printable
from anyaccel.vendors import DENY_VARIABLE, vendor_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from anyaccel.linux import WorkerGroup

DEVICES_VARIABLE = "ANYACCEL_DEVICES"
Bind = bool | None
"""Whether workers run near their devices; None to bind only workers with whole devices of this host."""
MEMORY_VARIABLES = "ANYACCEL_MEMORY_"
"""Beginning of the names of variables about a worker's share of memory; see :mod:`anyaccel.launcher.caps`."""
_PRESENT = (VendorState.OK, VendorState.FAILED)
HIDE_SECONDS = 0.4
"""Time for the plug-in of a vendor outside the allocation to say how its devices are hidden."""


class WorkerEnvironment(Value):
    """The environment of a worker.

    Attributes:
        allocation: The devices of the worker; each share names its enforcement.
        set: Variables that differ from those of the base environment.
        unset: Variables of the base environment that the worker must not see.
        values: The whole environment, with the edits.
        regions: The kernel's name of the memory of each device with a share, and the bytes of the share, by device id:
            for :func:`anyaccel.launcher.launch.limit_memory`.
        group: The cgroup in which the worker must start; None for none.
        unlimited: The reason why no cgroup limits the ``regions``; empty if one does, or none was tried.
    """

    allocation: Allocation
    set: Mapping[str, str]
    unset: frozenset[str]
    values: Mapping[str, str]
    regions: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    group: WorkerGroup | None = None
    unlimited: str = ""

    def with_variables(self, variables: Mapping[str, str]) -> WorkerEnvironment:
        """Return this environment with more variables, or with other values; none of these is unset any more."""
        return replace(
            self,
            set={**self.set, **variables},
            unset=self.unset - variables.keys(),
            values={**self.values, **variables},
        )

    def with_allocation(self, allocation: Allocation) -> WorkerEnvironment:
        """Return this environment with another description of the allocation, also in the worker's variable."""
        return replace(self.with_variables({ALLOCATION_VARIABLE: _write_allocation(allocation)}), allocation=allocation)


def _write_allocation(allocation: Allocation) -> str:
    """Return an allocation as JSON for the worker's variable."""
    # Without links: a worker cannot use them, and they grow with the square of devices, while a variable has a limit.
    return json.dumps(encode(allocation, without=("links",)), separators=(",", ":"))


def worker_environment(
    allocation: Allocation,
    inventory: Inventory,
    *,
    environ: Mapping[str, str] | None = None,
    unallocated: Literal["hide", "inherit"] = "hide",
    mask: Literal["id", "index"] = "id",
    lease: str = "",
    cap: bool = False,
    bind: Bind = False,
) -> WorkerEnvironment:
    """Make the environment in which a worker sees exactly the devices of an allocation.

    The plug-ins of the allocation's vendors are asked, each in its process; of another vendor, only if the detection
    did not report how to hide its devices. No cgroup or binding is made. Devices that stay visible in spite of this are
    named by sentences in ``gaps`` of the result's allocation; nothing is printed.

    Args:
        allocation: The devices.
        inventory: The inventory from which the allocation was made.
        environ: The base environment; that of this process if None.
        unallocated: Whether vendors outside the allocation are hidden, or keep the variables of the base environment.
        mask: Whether masks name devices by stable id or by index, if the vendor's runtime accepts both.
        lease: Identity of the machine-wide lease of the allocation; empty for none.
        cap: Whether PyTorch and TensorFlow are also capped at the worker's share of memory, at the start of its
            interpreter, by an entry in ``PYTHONPATH``; only for a worker with a part, of known size, of a single
            device.
        bind: Whether the worker will run on the processors nearest to its devices: the allocation names them, and the
            caller binds the worker. None for whole devices of this host.

    Raises:
        EnvConflictError: If two vendors of the allocation need different values of one variable.
        PluginError: If the plug-in of a vendor of the allocation cannot make its mask.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> half = anyaccel.open_scheduler(inventory).allocate("GPU:0.5")
        >>> worker = anyaccel.worker_environment(half, inventory)
        >>> worker.set["ANYACCEL_MEMORY_LIMIT"], worker.allocation.shares[0].enforced_by
        ('42760404992', 'by agreement')
    """
    base = dict(os.environ if environ is None else environ)
    held = allocation.by_device
    edits, gaps = _edits(held, inventory, base, unallocated, mask, confined=allocation.confined)
    part_bytes, fraction = _measure_part(held)
    if not all(share.whole for share in allocation.shares):
        allocation = _name_enforcement(allocation, edits, cap=bool(cap and fraction))
    changes, unset, more = _merge(edits, {share.device.vendor for share in held.values()}, inventory)
    processors = find_processors(allocation, inventory, bind)
    if gaps or more or processors:  # most allocations stay as they are
        allocation = replace(allocation, gaps=(*allocation.gaps, *gaps, *more), processors=processors)
    changes |= _own_variables(allocation, inventory, lease)
    if part_bytes:
        from anyaccel.launcher import caps  # few workers have a part of a device

        changes[caps.LIMIT_VARIABLE] = str(part_bytes)
        if fraction:
            changes[caps.FRACTION_VARIABLE] = f"{fraction:g}"
        if fraction and cap:
            there = base.get("PYTHONPATH", "")  # an empty entry would name the working directory
            behind = [path for path in there.split(os.pathsep) if path != caps.STARTUP] if there else []
            changes["PYTHONPATH"] = os.pathsep.join([caps.STARTUP, *behind])
    # Without a variable for the machine, the worker would see the one that the base environment names.
    stale = {name for name in base if name.startswith(MEMORY_VARIABLES)} | {LEASE_VARIABLE, MACHINE_VARIABLE}
    unset = (unset | stale) - changes.keys() & base.keys()
    values = {**base, **changes}
    for name in unset:
        del values[name]
    regions = _regions(held, edits) if inventory.machine == HOST else {}
    return WorkerEnvironment(allocation=allocation, set=changes, unset=frozenset(unset), values=values, regions=regions)


_warned: set[str] = set()


def warn_once(gaps: Iterable[str]) -> None:
    """Print warnings about open devices on standard error, each text once in this process.

    Control characters are escaped; errors of the output are ignored.
    """
    for gap in gaps:
        if gap not in _warned:
            _warned.add(gap)
            print_error(printable(gap))


def print_error(text: str) -> None:
    """Print a line on standard error, after ``anyaccel:``; errors, as of a closed stream, are ignored."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no reader, closed, or None
        sys.stderr.write(f"anyaccel: {text}\n")
        sys.stderr.flush()


def _regions(held: Mapping[str, Share], edits: Mapping[str, EnvEdits]) -> dict[str, tuple[str, int]]:
    """Return the memory region and the held bytes of each device in a region to be limited, by device id.

    A region is limited if a part of a device, of known size, is held there. Then whole devices in the region count,
    too. A region in which a device has no known size is left out: its limit would be too low. A name with a space or
    control characters is ignored.
    """
    found = {}
    for device_id, share in held.items():
        region = edits.get(share.device.vendor, EnvEdits()).memory_regions.get(device_id, "")
        if region.isprintable() and region and " " not in region:  # a plug-in's text becomes a line for the kernel
            found[device_id] = (share, region)
    shared = {region for share, region in found.values() if not share.whole and share.memory_bytes}
    unknown = {region for share, region in found.values() if not share.memory_bytes}
    return {
        device_id: (region, share.memory_bytes or 0)
        for device_id, (share, region) in found.items()
        if region in shared - unknown
    }


def _edits(
    held: Mapping[str, Share],
    inventory: Inventory,
    environ: Mapping[str, str],
    unallocated: str,
    mask: Literal["id", "index"],
    *,
    confined: bool,
) -> tuple[dict[str, EnvEdits], list[str]]:
    """Return the edits of the vendors on the machine, and warnings about devices left visible.

    A vendor outside the allocation edits only to hide its devices: if ``unallocated`` is ``"hide"`` and the detection
    found the vendor or failed. The edits are those of the detection's report; without these, the plug-in is asked. If
    the plug-in cannot say how, there is a warning and no edit. For a confined worker, whose sandbox reports open
    devices, there are no other warnings, and none about a plug-in that gave no resource name.

    Raises:
        PluginError: If the plug-in of a vendor of the allocation cannot make its edits.
    """
    shares: dict[str, dict[str, Share]] = {}
    for device_id, share in held.items():
        shares.setdefault(share.device.vendor, {})[device_id] = share
    edits: dict[str, EnvEdits] = {}
    gaps = []
    for report in inventory.vendors:
        if own := shares.get(report.vendor):
            given = tuple([share.device for share in own.values()])
            ctx = EnvContext(devices=inventory.of_vendor(report.vendor), shares=own, environ=environ, mask=mask)
            edits[report.vendor] = vendor_process(report.vendor).env(given, ctx)
            if len(given) < len(ctx.devices) and not confined:
                gaps += _warn_visible(report, edits[report.vendor], "its other devices")
        elif unallocated == "hide" and report.state in _PRESENT:
            devices = inventory.of_vendor(report.vendor)
            try:
                edits[report.vendor] = report.hidden or vendor_process(report.vendor).env(
                    (), EnvContext(devices=devices, environ=environ, mask=mask), seconds=HIDE_SECONDS
                )
            except PluginError as error:  # of a vendor outside the allocation: the worker starts without its word
                if report.resource or not confined:
                    gaps.append(_warn_unknown(report.vendor, error.problem.reason))
            else:
                if not confined and (devices or report.partial or report.state is VendorState.FAILED):
                    gaps += _warn_visible(report, edits[report.vendor], "them")
    return edits, gaps


def _warn_visible(report: VendorReport, edits: EnvEdits, what: str) -> list[str]:
    """Return the warning about a vendor's devices visible under some edits; no warning if the devices are hidden.

    A variable that binds only certain software does not hide the devices.

    Args:
        report: The vendor's report.
        edits: The vendor's edits.
        what: The devices, as the object of a sentence.
    """
    hides = report.maskable and bool(edits.set or edits.unset.difference(report.cleared))
    if hides and not report.masked_software:
        return []
    why = f"its variable binds {report.masked_software} alone" if hides else f"no variable hides {what}"
    remedy = "confine the worker (--enforce, or enforce=True) to close their nodes"
    return [f"devices of {report.vendor} may be open to the worker: {why}; {remedy}"]


def _warn_unknown(vendor: str, reason: str) -> str:
    """Return the warning about a vendor whose plug-in cannot say how its devices are hidden."""
    return (
        f"devices of {vendor} may be open to the worker: {reason.rstrip('.')}; see 'anyaccel plugins {vendor}', or set"
        f" {DENY_VARIABLE}={vendor} where there are none"
    )


def _merge(
    edits: Mapping[str, EnvEdits], given: Collection[str], inventory: Inventory
) -> tuple[dict[str, str], set[str], list[str]]:
    """Merge the vendors' edits.

    An edit of a vendor of the allocation wins over an edit that hides another vendor. Among vendors that are only to be
    hidden, a value wins over the removal of the variable, and the first value over others. A removal of another
    vendor's variable is left out if a vendor on the machine obeys it: one that the detection found, or that failed.

    Args:
        edits: The edits, by vendor.
        given: The vendors of the allocation.
        inventory: The machine.

    Returns:
        Variables to set, variables to unset, and sentences about devices that stay visible: one for each value that a
        vendor needs and does not get, and none for a removal.

    Raises:
        EnvConflictError: If two vendors of the allocation need different values of one variable.
    """
    obeyed: set[str] = set()
    wishes: list[tuple[str, str, str | None]] = []
    for report in inventory.vendors:
        if report.state in _PRESENT:
            obeyed |= {*report.env_vars}.difference(report.cleared)
    for report in inventory.vendors:
        if (edit := edits.get(report.vendor)) is not None:
            wishes += [(report.vendor, *wish) for wish in edit.set.items()]
            # Sorted: sets have no order, and messages should not change from run to run.
            unset = sorted(edit.unset - obeyed.intersection(report.cleared))
            wishes += [(report.vendor, name, None) for name in unset]
    wishes.sort(key=lambda wish: (wish[0] not in given, wish[2] is None))
    decided: dict[str, tuple[str, str | None]] = {}
    gaps: list[str] = []
    for vendor, name, value in wishes:
        winner, chosen = decided.setdefault(name, (vendor, value))
        if vendor == winner or value == chosen:
            continue
        if vendor in given:
            raise EnvConflictError(_describe_conflict(name, (winner, chosen), (vendor, value)))
        if value is not None:
            needed = "unset" if chosen is None else f"to be {chosen!r}"
            hides = f"{name}={value!r} hides them, and {winner} needs it {needed}"
            gaps.append(f"devices of {vendor} may be open to the worker: {hides}")
    merged = {name: value for name, (_, value) in decided.items() if value is not None}
    return merged, decided.keys() - merged.keys(), gaps


def _describe_conflict(name: str, first: tuple[str, str | None], second: tuple[str, str | None]) -> str:
    """Describe the conflict of two vendors, each with the needed value, over a variable; the first sets it."""
    (one, its), (other, theirs) = first, second
    what = f"{one} and {other} set the variable {name} differently ({its!r} and {theirs!r})"
    if theirs is None:
        what = f"{one} sets the variable {name} (to {its!r}), which {other} unsets"
    return f"{what}, so one worker cannot hold this combination; ask for their devices in separate commands"


def _measure_part(held: Mapping[str, Share]) -> tuple[int, float]:
    """Return the bytes that a worker holds of its only device, and their fraction of the device's memory.

    The fraction is rounded down to four decimals. Either is 0 if it is unknown, and if the worker holds a whole device
    or several: frameworks have one cap for all devices that they see.
    """
    share = next(iter(held.values()), None)
    if share is None or share.whole or len(held) > 1 or not share.memory_bytes:
        return 0, 0.0
    # Rounded down: two halves of a device must not add up to more than the device.
    return share.memory_bytes, int(share.memory_bytes / (share.device.memory_bytes or math.inf) * 10_000) / 10_000


def _name_enforcement(allocation: Allocation, edits: Mapping[str, EnvEdits], *, cap: bool) -> Allocation:
    """Return the allocation with the enforcement of each part of a device, and the self-limiting frameworks.

    A part without an enforcement in the edits is held by :data:`AGREEMENT`.

    Args:
        allocation: The allocation; whole devices stay the same.
        edits: The edits, which name the enforcement, by vendor.
        cap: Whether frameworks are also capped.
    """
    from anyaccel.launcher import caps

    def named(share: Share) -> Share:
        edit = edits.get(share.device.vendor, EnvEdits())
        return replace(
            share,
            memory_by=edit.memory_by or AGREEMENT,
            compute_by=edit.compute_by or AGREEMENT,
            limited_by=(*edit.limited_by, *(caps.frameworks(edit.set) if cap else ())),
        )

    return map_shares(allocation, lambda share: share if share.whole else named(share))


def map_shares(allocation: Allocation, change: Callable[[Share], Share]) -> Allocation:
    """Return a copy of an allocation with each share replaced by the result of ``change``."""
    grants = [Grant(term=grant.term, shares=tuple(map(change, grant.shares))) for grant in allocation.grants]
    return replace(allocation, grants=tuple(grants))


def _own_variables(allocation: Allocation, inventory: Inventory, lease: str) -> dict[str, str]:
    """Return the variables for :func:`anyaccel.current`, and for programs without this library.

    These are the device ids, separated by commas, and the allocation as JSON; the lease unless empty, and the machine
    unless it is this host.
    """
    own = {
        DEVICES_VARIABLE: ",".join([share.device.id for share in allocation.shares]),
        ALLOCATION_VARIABLE: _write_allocation(allocation),
    }
    if lease:
        own[LEASE_VARIABLE] = lease
    if inventory.machine != HOST:
        own[MACHINE_VARIABLE] = inventory.machine
    return own


def find_processors(allocation: Allocation, inventory: Inventory, bind: Bind) -> tuple[int, ...]:
    """Return the processors on the NUMA nodes of an allocation's devices, in ascending order; binds nothing.

    A distant processor reaches a device, and the memory beside the device, over a shared link. Memory needs no rule of
    its own: by default, the kernel gives a process pages of the node on which it runs while there are some
    (Documentation/admin-guide/mm/numa_memory_policy.rst). A policy that the user has set stays.

    Args:
        allocation: The devices of the worker.
        inventory: The machine. With ``bind`` True, a simulated or recorded machine counts as this host.
        bind: Whether to bind the worker; None for whole devices of this host only.

    Returns:
        Numbers of processors that this thread may use; empty if the worker is not to be bound, if there is no device,
        if the node of a device is unknown, or if this thread may use no processor there.
    """
    if bind is None:
        bind = inventory.machine == HOST and all(share.whole for share in allocation.shares)
    # One device of unknown node: to bind to the nodes of the others could be the wrong half of the machine.
    nodes = {device.numa_node for device in allocation.devices} if bind else set()
    if not nodes or None in nodes:
        return ()
    from anyaccel.probe.processors import by_node  # few environments name processors

    processors = by_node()
    found = {processor for node in nodes if node is not None for processor in processors.get(node, ())}
    return tuple(sorted(found & os.sched_getaffinity(0)))
