"""The environment of a worker: what the vendors' plug-ins say it must hold, merged, never applied to ourselves."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from typing import Any, Literal

from anyaccel.errors import EnvConflictError, PluginError
from anyaccel.inventory.current import ALLOCATION_VARIABLE, LEASE_VARIABLE
from anyaccel.launcher import caps
from anyaccel.launcher.bind import Bind, near
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
    replace,
)
from anyaccel.model.wire import encode
from anyaccel.probe import HOST, MACHINE_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.vendors.process import VendorProcess

DEVICES_VARIABLE = "ANYACCEL_DEVICES"
MEMORY_VARIABLE = "ANYACCEL_MEMORY_LIMIT"
HIDE_SECONDS = 0.4
"""Time for a vendor whose devices nobody asked for to say how they are hidden."""


class WorkerEnvironment(Value):
    """The environment of one worker.

    Attributes:
        allocation: What the worker holds, each share with what enforces it.
        set: Variables that differ from the environment it starts from.
        unset: Variables of that environment that it must not see.
        values: The whole environment, edits applied.
    """

    allocation: Allocation
    set: Mapping[str, str]
    unset: frozenset[str]
    values: Mapping[str, str]


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
    """Make the environment in which a worker sees exactly what it was given.

    Args:
        allocation: What it was given.
        inventory: The machine's inventory that the allocation was made from.
        environ: The environment to start from; that of this process when None. It is not changed.
        unallocated: Whether vendors of which nothing was given are hidden, or left as the environment has them.
        mask: Whether masks name devices by stable id or by index, where the vendor's runtime takes both.
        lease: Identity of the machine-wide lease behind the allocation; empty when there is none.
        cap: Whether PyTorch is capped at the worker's share of memory as well, by what its interpreter does when it
            starts.
        bind: Whether the worker will run on the processors that are nearest to its devices: the allocation says which,
            and whoever starts the worker binds it. None for whole devices of this host.

    Raises:
        EnvConflictError: When two vendors whose devices were given want one variable differently.
        PluginError: When the plug-in of a vendor whose devices were given cannot say what its mask must be.

    Examples:
        >>> inventory = anyaccel.detect("sim:H100:2")
        >>> half = anyaccel.open_scheduler(inventory).allocate("GPU:0.5")
        >>> worker = anyaccel.worker_environment(half, inventory)
        >>> worker.set["ANYACCEL_MEMORY_LIMIT"], worker.allocation.shares[0].enforced_by
        ('42760404992', 'by agreement')
    """
    base = dict(os.environ if environ is None else environ)
    edits, gaps = _edits(allocation, inventory, base, unallocated, mask)
    fraction = _fraction(allocation)
    allocation = _name_enforcement(allocation, edits, (caps.FRAMEWORK,) if cap and fraction else ())
    changes, unset, more = _merge(_courteous(edits, inventory), {device.vendor for device in allocation.devices})
    processors = near(allocation, inventory, bind)
    if gaps or more or processors:
        allocation = replace(allocation, gaps=(*allocation.gaps, *gaps, *more), processors=processors)
    changes |= _own_variables(allocation, inventory, lease)
    if fraction:
        changes[caps.FRACTION_VARIABLE] = f"{fraction:g}"
        if cap:
            behind = [path for path in base.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", caps.STARTUP)]
            changes["PYTHONPATH"] = os.pathsep.join([caps.STARTUP, *behind])
    unset = (unset | {MEMORY_VARIABLE, caps.FRACTION_VARIABLE, LEASE_VARIABLE}) - changes.keys() & base.keys()
    values = {name: value for name, value in base.items() if name not in unset} | changes
    return WorkerEnvironment(allocation=allocation, set=changes, unset=frozenset(unset), values=values)


def _edits(
    allocation: Allocation,
    inventory: Inventory,
    environ: Mapping[str, str],
    unallocated: str,
    mask: Literal["id", "index"],
) -> tuple[dict[str, EnvEdits], list[str]]:
    """The edits of every vendor that may be on the machine, and which of them cannot be hidden.

    The process of a vendor is asked only where it has to say something that it has not said when it detected.
    """
    shares: dict[str, dict[str, Share]] = {}
    for device_id, share in allocation.by_device.items():
        shares.setdefault(share.device.vendor, {})[device_id] = share
    edits: dict[str, EnvEdits] = {}
    gaps = []
    for report in inventory.vendors:
        if own := shares.get(report.vendor):
            given = tuple(share.device for share in own.values())
            ctx = EnvContext(devices=inventory.of_vendor(report.vendor), shares=own, environ=environ, mask=mask)
            edits[report.vendor] = _vendor(report.vendor).env(given, ctx)
        elif unallocated == "hide" and report.state in {VendorState.OK, VendorState.FAILED}:
            try:
                edits[report.vendor] = report.hidden or _ask_to_hide(report, inventory, environ, mask)
            except PluginError as error:
                if report.resource or report.state is VendorState.OK:  # else nothing is known about any device
                    gaps.append(f"devices of {report.vendor} may be open to the worker: {error.problem.reason}")
    return edits, gaps


def _ask_to_hide(
    report: VendorReport, inventory: Inventory, environ: Mapping[str, str], mask: Literal["id", "index"]
) -> EnvEdits:
    ctx = EnvContext(devices=inventory.of_vendor(report.vendor), environ=environ, mask=mask)
    return _vendor(report.vendor).env((), ctx, seconds=HIDE_SECONDS)


def _vendor(name: str) -> VendorProcess:
    """A vendor's process; imported when the first one is asked, since a machine may have none."""
    from anyaccel.vendors.process import vendor_process

    return vendor_process(name)


def _courteous(edits: Mapping[str, EnvEdits], inventory: Inventory) -> dict[str, EnvEdits]:
    """Leave a variable that a vendor only clears to a vendor that may be here and obeys it."""
    here = [report for report in inventory.vendors if report.state in {VendorState.OK, VendorState.FAILED}]
    obeyed = {name for report in here for name in report.env_vars if name not in report.cleared}
    left = {report.vendor: obeyed.intersection(report.cleared) for report in here}
    return {
        vendor: replace(edit, unset=edit.unset - left[vendor]) if left.get(vendor) else edit
        for vendor, edit in edits.items()
    }


def _merge(edits: Mapping[str, EnvEdits], given: Collection[str]) -> tuple[dict[str, str], set[str], list[str]]:
    """Put the vendors' edits together.

    What a vendor needs whose devices were given wins over what hides another's. Among vendors of the same kind, a value
    wins over the wish to have none where both only hide.

    Returns:
        Variables to set, variables to unset, and what the rule left open.

    Raises:
        EnvConflictError: When two vendors whose devices were given want one variable differently.
    """
    wishes: dict[str, dict[str, str | None]] = {}
    for vendor, edit in edits.items():
        for name in sorted(edit.unset):
            wishes.setdefault(name, {})[vendor] = None
        for name, content in edit.set.items():
            wishes.setdefault(name, {})[vendor] = content
    merged: dict[str, str] = {}
    unset: set[str] = set()
    gaps = []
    for name, wanted in wishes.items():
        own = {vendor: value for vendor, value in wanted.items() if vendor in given}
        if len(set(own.values())) > 1:
            raise EnvConflictError(_conflict(name, own))
        value: str | None = next((each for each in (own or wanted).values() if each is not None), None)
        if value is None:
            unset.add(name)
        else:
            merged[name] = value
        for vendor, wish in wanted.items():
            if wish is not None and wish != value:
                winner = next(other for other, theirs in wanted.items() if theirs == value)
                needed = f"to be {value!r}" if name in merged else "unset"
                gaps.append(
                    f"devices of {vendor} may be open to the worker: {name}={wish!r} hides them, and {winner} needs it"
                    f" {needed}"
                )
    return merged, unset, gaps


def _conflict(name: str, wanted: Mapping[str, str | None]) -> str:
    (first, one), (second, two) = list(wanted.items())[:2]
    if one is None or two is None:
        setter, other = (second, first) if one is None else (first, second)
        what = f"{setter} sets the variable {name} (to {wanted[setter]!r}), which {other} unsets"
    else:
        what = f"{first} and {second} set the variable {name} differently ({one!r} and {two!r})"
    return f"{what}, so one worker cannot hold this combination; ask for their devices in separate commands"


def _fraction(allocation: Allocation) -> float | None:
    """Part of its only device's memory that a worker holds, rounded down; None where that is all, or unknown.

    A framework's cap counts for all devices that it sees alike, so it fits one device only.
    """
    shares = tuple(allocation.by_device.values())
    if len(shares) != 1 or shares[0].whole or not shares[0].memory_bytes or not shares[0].device.memory_bytes:
        return None
    return int(shares[0].memory_bytes / shares[0].device.memory_bytes * 10_000) / 10_000 or None


def _name_enforcement(allocation: Allocation, edits: Mapping[str, EnvEdits], capped: tuple[str, ...]) -> Allocation:
    """Say of every share what keeps its holder to it, and which frameworks limit themselves."""

    def named(share: Share) -> Share:
        edit = edits.get(share.device.vendor, EnvEdits())
        return replace(
            share,
            memory_by=edit.memory_by or AGREEMENT,
            compute_by=edit.compute_by or AGREEMENT,
            limited_by=(*edit.limited_by, *capped),
        )

    grants = tuple(
        Grant(
            term=grant.term,
            shares=tuple(share if share.whole else named(share) for share in grant.shares),
        )
        for grant in allocation.grants
    )
    return replace(allocation, grants=grants)


def _own_variables(allocation: Allocation, inventory: Inventory, lease: str) -> dict[str, str]:
    """What ``anyaccel.current()`` and anybody without our library can read inside the worker."""
    own = {
        DEVICES_VARIABLE: ",".join(device.id for device in allocation.devices),
        ALLOCATION_VARIABLE: written_down(allocation),
    }
    if lease:
        own[LEASE_VARIABLE] = lease
    if inventory.machine != HOST:
        own[MACHINE_VARIABLE] = inventory.machine
    limits = [share.memory_bytes for share in allocation.shares if not share.whole and share.memory_bytes is not None]
    if len(limits) == 1:
        own[MEMORY_VARIABLE] = str(limits[0])
    return own


def written_down(allocation: Allocation) -> str:
    """What :func:`anyaccel.current` reads in the worker."""
    return json.dumps(_without_links(encode(allocation)), separators=(",", ":"))


def _without_links(allocation: Any) -> Any:
    """Leave out what a worker cannot use and what grows with the square of the devices: variables have a limit."""
    for grant in allocation["grants"]:
        for share in grant["shares"]:
            share["device"].pop("links", None)
    return allocation
