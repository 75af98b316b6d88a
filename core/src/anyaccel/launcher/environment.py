"""The environment of a worker: what the vendors' plug-ins say it must hold, merged, never applied to ourselves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from anyaccel.errors import EnvConflictError
from anyaccel.inventory.current import ALLOCATION_VARIABLE, LEASE_VARIABLE
from anyaccel.inventory.machine import HOST
from anyaccel.inventory.machine import VARIABLE as MACHINE_VARIABLE
from anyaccel.model import (
    AGREEMENT,
    Allocation,
    Device,
    EnvContext,
    EnvEdits,
    Grant,
    Inventory,
    VendorReport,
    VendorState,
)
from anyaccel.model.wire import encode
from anyaccel.plugins.registry import plugin

DEVICES_VARIABLE = "ANYACCEL_DEVICES"
MEMORY_VARIABLE = "ANYACCEL_MEMORY_LIMIT"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
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
) -> WorkerEnvironment:
    """Make the environment in which a worker sees exactly what it was given.

    Args:
        allocation: What it was given.
        inventory: The machine's inventory that the allocation was made from.
        environ: The environment to start from; that of this process when None. It is not changed.
        unallocated: Whether vendors of which nothing was given are hidden, or left as the environment has them.
        mask: Whether masks name devices by stable id or by index, where the vendor's runtime takes both.
        lease: Identity of the machine-wide lease behind the allocation; empty when there is none.

    Raises:
        EnvConflictError: When two vendors set one variable to different values.
        PluginError: When a plug-in cannot say what its mask must be.
    """
    base = dict(os.environ if environ is None else environ)
    edits = dict(_edits(allocation, inventory, base, unallocated, mask))
    allocation = _name_enforcement(allocation, edits)
    changes = _merge(edits)
    changes |= _own_variables(allocation, inventory, lease)
    unset = {name for edit in edits.values() for name in edit.unset} | {MEMORY_VARIABLE, LEASE_VARIABLE}
    unset = (unset - changes.keys()) & base.keys()
    values = {name: value for name, value in base.items() if name not in unset} | changes
    return WorkerEnvironment(allocation=allocation, set=changes, unset=frozenset(unset), values=values)


def _edits(
    allocation: Allocation,
    inventory: Inventory,
    environ: Mapping[str, str],
    unallocated: str,
    mask: Literal["id", "index"],
) -> Iterator[tuple[str, EnvEdits]]:
    """Ask every vendor that is on the machine for its edits."""
    shares = {share.device.id: share for share in allocation.shares}
    for report in inventory.vendors:
        given = tuple(device for device in allocation.devices if device.vendor == report.vendor)
        if given or (unallocated == "hide" and _may_be_here(report)):
            everything = inventory.of_vendor(report.vendor)
            own = {device.id: shares[device.id] for device in given}
            ctx = EnvContext(devices=everything, shares=own, environ=environ, mask=mask)
            yield report.vendor, plugin(report.vendor).env(given, ctx)


def _may_be_here(report: VendorReport) -> bool:
    """Whether a vendor's runtime might show devices: also when detection failed, once the plug-in itself has loaded."""
    return report.state is VendorState.OK or (report.state is VendorState.FAILED and bool(report.resource))


def _merge(edits: Mapping[str, EnvEdits]) -> dict[str, str]:
    """Put the vendors' variables together. A value that one vendor sets wins over another's wish to have none."""
    merged: dict[str, str] = {}
    owner: dict[str, str] = {}
    for vendor, edit in edits.items():
        for name, value in edit.set.items():
            if merged.setdefault(name, value) != value:
                raise EnvConflictError(
                    f"{owner[name]} and {vendor} set the variable {name} differently ({merged[name]!r} and {value!r}),"
                    " so one worker cannot hold this combination; ask for their devices in separate commands"
                )
            owner.setdefault(name, vendor)
    return merged


def _name_enforcement(allocation: Allocation, edits: Mapping[str, EnvEdits]) -> Allocation:
    """Say of every share what keeps its holder to it."""
    grants = tuple(
        Grant(
            term=grant.term,
            shares=tuple(
                share if share.whole else replace(share, enforced_by=_enforced_by(share.device, edits) or AGREEMENT)
                for share in grant.shares
            ),
        )
        for grant in allocation.grants
    )
    return replace(allocation, grants=grants)


def _enforced_by(device: Device, edits: Mapping[str, EnvEdits]) -> str:
    return edits[device.vendor].enforced_by if device.vendor in edits else ""


def _own_variables(allocation: Allocation, inventory: Inventory, lease: str) -> dict[str, str]:
    """What ``anyaccel.current()`` and anybody without our library can read inside the worker."""
    own = {
        DEVICES_VARIABLE: ",".join(device.id for device in allocation.devices),
        ALLOCATION_VARIABLE: json.dumps(encode(_without_links(allocation)), separators=(",", ":")),
    }
    if lease:
        own[LEASE_VARIABLE] = lease
    if inventory.machine != HOST:
        own[MACHINE_VARIABLE] = inventory.machine
    limits = [share.memory_bytes for share in allocation.shares if not share.whole and share.memory_bytes is not None]
    if len(limits) == 1:
        own[MEMORY_VARIABLE] = str(limits[0])
    return own


def _without_links(allocation: Allocation) -> Allocation:
    """Leave out what a worker cannot use and what grows with the square of the devices: variables have a limit."""
    grants = tuple(
        Grant(
            term=grant.term,
            shares=tuple(replace(share, device=replace(share.device, links={})) for share in grant.shares),
        )
        for grant in allocation.grants
    )
    return replace(allocation, grants=grants)
