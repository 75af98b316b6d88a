"""The environment of a worker: what the vendors' plug-ins say it must hold, merged, never applied to ourselves."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal

from anyaccel.errors import EnvConflictError, PluginError
from anyaccel.inventory.current import ALLOCATION_VARIABLE, LEASE_VARIABLE
from anyaccel.launcher import caps
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
    field,
    replace,
)
from anyaccel.model.wire import plain
from anyaccel.probe import HOST, MACHINE_VARIABLE
from anyaccel.text import printable
from anyaccel.vendors.discovery import DENY_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.launcher.bind import Bind
    from anyaccel.vendors.process import VendorProcess

DEVICES_VARIABLE = "ANYACCEL_DEVICES"
# Without links, which a worker cannot use, and which grow with the square of the devices: variables have a limit.
_ENCODER = json.JSONEncoder(default=partial(plain, without=("links",)), separators=(",", ":"))
HIDE_SECONDS = 0.4
"""Time for a vendor whose devices nobody asked for to say how they are hidden."""


class WorkerGroup(Value):
    """A cgroup that was made for a worker.

    Attributes:
        path: Its directory.
        before: A program, with its arguments, that brings a process to where it may enter; empty where it may already.
    """

    path: str
    before: tuple[str, ...] = ()


class WorkerEnvironment(Value):
    """The environment of one worker.

    Attributes:
        allocation: What the worker holds, each share with what enforces it.
        set: Variables that differ from the environment it starts from.
        unset: Variables of that environment that it must not see.
        values: The whole environment, edits applied.
        regions: What the kernel calls the memory of devices on which there are shares, and how much of it is held, by
            device id: for :func:`anyaccel.launcher.limits.limited`.
        group: The cgroup in which the worker must be started; None where none was made for it.
        unlimited: Why no cgroup limits the ``regions``; empty where one does, or nobody has tried.
    """

    allocation: Allocation
    set: Mapping[str, str]
    unset: frozenset[str]
    values: Mapping[str, str]
    regions: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    group: WorkerGroup | None = None
    unlimited: str = ""

    def with_variables(self, variables: Mapping[str, str]) -> WorkerEnvironment:
        """The same with some more variables."""
        return replace(
            self,
            set={**self.set, **variables},
            unset=self.unset - variables.keys(),
            values={**self.values, **variables},
        )


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
        cap: Whether PyTorch and TensorFlow are capped at the worker's share of memory as well, by what its interpreter
            does when it starts.
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
    held = allocation.by_device
    edits, gaps = _edits(held, inventory, base, unallocated, mask, confined=allocation.confined)
    only = _only_share(held)
    fraction = _fraction(only)
    if not all(share.whole for share in allocation.shares):
        allocation = _name_enforcement(allocation, edits, cap=bool(cap and fraction))
    changes, unset, more = _merge(_courteous(edits, inventory), {share.device.vendor for share in held.values()})
    processors: tuple[int, ...] = ()
    if bind is not False:
        from anyaccel.launcher.bind import near

        processors = near(allocation, inventory, bind)
    if gaps or more or processors:
        allocation = replace(allocation, gaps=(*allocation.gaps, *gaps, *more), processors=processors)
    changes |= _own_variables(allocation, inventory, lease)
    if only is not None and only.memory_bytes:
        changes[caps.LIMIT_VARIABLE] = str(only.memory_bytes)
    if fraction:
        changes[caps.FRACTION_VARIABLE] = f"{fraction:g}"
        if cap:
            there = base.get("PYTHONPATH", "")  # an empty part of it is the working directory
            behind = [path for path in there.split(os.pathsep) if path != caps.STARTUP] if there else []
            changes["PYTHONPATH"] = os.pathsep.join([caps.STARTUP, *behind])
    unset = (unset | {caps.LIMIT_VARIABLE, caps.FRACTION_VARIABLE, LEASE_VARIABLE}) - changes.keys() & base.keys()
    values = {**base, **changes}
    for name in unset:
        del values[name]
    regions = _regions(held, edits) if inventory.machine == HOST else {}
    return WorkerEnvironment(allocation=allocation, set=changes, unset=frozenset(unset), values=values, regions=regions)


_told: set[str] = set()


def tell_once(gaps: Iterable[str]) -> None:
    """Say on standard error what workers are not kept from, each sentence once in this process."""
    for gap in gaps:
        if gap not in _told:
            _told.add(gap)
            tell(printable(gap))


def tell(text: str) -> None:
    """Write a line to standard error, if this program has one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, without a reader, or none
        sys.stderr.write(f"anyaccel: {text}\n")
        sys.stderr.flush()


def amended(made: WorkerEnvironment, allocation: Allocation) -> WorkerEnvironment:
    """The same environment for a worker of whose allocation more is known."""
    return replace(made.with_variables({ALLOCATION_VARIABLE: written_down(allocation)}), allocation=allocation)


def _regions(held: Mapping[str, Share], edits: Mapping[str, EnvEdits]) -> dict[str, tuple[str, int]]:
    """Regions of memory in which something holds a share, and what is held there of each device, by its id."""
    found = {}
    for device_id, share in held.items():
        region = edits.get(share.device.vendor, EnvEdits()).memory_regions.get(device_id, "")
        if region.isprintable() and region and " " not in region:
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
    """The edits of every vendor that may be on the machine, and which of them cannot be hidden.

    The process of a vendor is asked only where it has to say something that it has not said when it detected. The
    devices that no variable hides are named unless the worker is confined: then the sandbox says what stays open.
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
            edits[report.vendor] = _vendor(report.vendor).env(given, ctx)
            if len(given) < len(ctx.devices) and not confined:
                gaps += _unhidden(report, edits[report.vendor], "its other devices")
        elif unallocated == "hide" and report.state in {VendorState.OK, VendorState.FAILED}:
            try:
                edits[report.vendor] = report.hidden or _ask_to_hide(report, inventory, environ, mask)
            except PluginError as error:
                if report.resource or not confined:
                    gaps.append(_not_asked_to_hide(report.vendor, error.problem.reason))
            else:
                here = report.state is VendorState.FAILED or report.partial or inventory.of_vendor(report.vendor)
                if here and not confined:
                    gaps += _unhidden(report, edits[report.vendor], "them")
    return edits, gaps


def _unhidden(report: VendorReport, edits: EnvEdits, what: str) -> list[str]:
    """Return the gap of a worker with these edits that may see devices of a vendor: a sentence, or none."""
    hides = report.maskable and bool(edits.set or edits.unset.difference(report.cleared))
    if hides and not report.masked_software:
        return []
    why = f"its variable binds {report.masked_software} alone" if hides else f"no variable hides {what}"
    remedy = "confine the worker (--enforce, or enforce=True) to close their nodes"
    return [f"devices of {report.vendor} may be open to the worker: {why}; {remedy}"]


def _not_asked_to_hide(vendor: str, reason: str) -> str:
    return (
        f"devices of {vendor} may be open to the worker: {reason.rstrip('.')}; see 'anyaccel plugins {vendor}', or set"
        f" {DENY_VARIABLE}={vendor} where there are none"
    )


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
    obeyed: set[str] = set()
    for report in here:
        obeyed |= {*report.env_vars}.difference(report.cleared)
    found = dict(edits)
    for report in here:
        left = obeyed.intersection(report.cleared)
        if left and report.vendor in edits:
            found[report.vendor] = replace(edits[report.vendor], unset=edits[report.vendor].unset - left)
    return found


def _merge(edits: Mapping[str, EnvEdits], given: Collection[str]) -> tuple[dict[str, str], set[str], list[str]]:
    """Put the vendors' edits together.

    What a vendor needs whose devices were given wins over what hides another's. Among vendors of the same kind, a value
    wins over the wish to have none where both only hide.

    Returns:
        Variables to set, variables to unset, and what the rule left open.

    Raises:
        EnvConflictError: When two vendors whose devices were given want one variable differently.
    """
    merged: dict[str, str] = {}
    unset: set[str] = set()
    gaps: list[str] = []
    for name, wanted in _wishes(edits).items():
        own = {vendor: wish for vendor, wish in wanted.items() if vendor in given}
        if len(set(own.values())) > 1:
            raise EnvConflictError(_conflict(name, own))
        value = next((wish for wish in (own or wanted).values() if wish is not None), None)
        if value is None:
            unset.add(name)
        else:
            merged[name] = value
        if len(wanted) > 1:
            gaps += _gaps(name, value, wanted)
    return merged, unset, gaps


def _wishes(edits: Mapping[str, EnvEdits]) -> dict[str, dict[str, str | None]]:
    """What each vendor wants of each variable: a value, or None for none."""
    wishes: dict[str, dict[str, str | None]] = {}
    for vendor, edit in edits.items():
        for name in sorted(edit.unset):
            wishes.setdefault(name, {})[vendor] = None
        for name, content in edit.set.items():
            wishes.setdefault(name, {})[vendor] = content
    return wishes


def _gaps(name: str, value: str | None, wanted: Mapping[str, str | None]) -> Iterator[str]:
    """Say whose devices stay open since a variable has another value than hides them."""
    for vendor, wish in wanted.items():
        if wish is not None and wish != value:
            winner = next(other for other, theirs in wanted.items() if theirs == value)
            needed = "unset" if value is None else f"to be {value!r}"
            hides = f"{name}={wish!r} hides them, and {winner} needs it {needed}"
            yield f"devices of {vendor} may be open to the worker: {hides}"


def _conflict(name: str, wanted: Mapping[str, str | None]) -> str:
    (first, one), (second, two) = list(wanted.items())[:2]
    if one is None or two is None:
        setter, other = (second, first) if one is None else (first, second)
        what = f"{setter} sets the variable {name} (to {wanted[setter]!r}), which {other} unsets"
    else:
        what = f"{first} and {second} set the variable {name} differently ({one!r} and {two!r})"
    return f"{what}, so one worker cannot hold this combination; ask for their devices in separate commands"


def _fraction(share: Share | None) -> float | None:
    """Part of its only device's memory that a worker holds, rounded down; None where that is all, or unknown."""
    if share is None or not share.memory_bytes or not share.device.memory_bytes:
        return None
    return int(share.memory_bytes / share.device.memory_bytes * 10_000) / 10_000 or None


def _only_share(held: Mapping[str, Share]) -> Share | None:
    """What a worker holds of its only device, if that is a part: a cap counts for all devices that it sees alike."""
    share = next(iter(held.values()), None)
    return None if share is None or share.whole or len(held) > 1 else share


def _name_enforcement(allocation: Allocation, edits: Mapping[str, EnvEdits], *, cap: bool) -> Allocation:
    """Say of every share what keeps its holder to it, and which frameworks limit themselves."""

    def named(share: Share) -> Share:
        edit = edits.get(share.device.vendor, EnvEdits())
        return replace(
            share,
            memory_by=edit.memory_by or AGREEMENT,
            compute_by=edit.compute_by or AGREEMENT,
            limited_by=(*edit.limited_by, *(caps.frameworks(edit.set) if cap else ())),
        )

    return with_shares(allocation, lambda share: share if share.whole else named(share))


def with_shares(allocation: Allocation, change: Callable[[Share], Share]) -> Allocation:
    """Return the allocation with each of its shares as a function changes it."""
    grants = [Grant(term=grant.term, shares=tuple(map(change, grant.shares))) for grant in allocation.grants]
    return replace(allocation, grants=tuple(grants))


def _own_variables(allocation: Allocation, inventory: Inventory, lease: str) -> dict[str, str]:
    """What ``anyaccel.current()`` and anybody without our library can read inside the worker."""
    own = {
        DEVICES_VARIABLE: ",".join([share.device.id for share in allocation.shares]),
        ALLOCATION_VARIABLE: written_down(allocation),
    }
    if lease:
        own[LEASE_VARIABLE] = lease
    if inventory.machine != HOST:
        own[MACHINE_VARIABLE] = inventory.machine
    return own


def written_down(allocation: Allocation) -> str:
    """What :func:`anyaccel.current` reads in the worker."""
    return _ENCODER.encode(allocation)
