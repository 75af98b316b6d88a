"""Open schedulers, for this process alone or with machine-wide leases; count how often a request fits a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from anyaccel._typing import overload
from anyaccel.errors import NotFreeError, UsageError
from anyaccel.model import Inventory, Request
from anyaccel.scheduler import Fleet, Scheduler
from anyaccel.text import shown
from anyaccel.vendors import KnownNames, validate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.policy import Policy

MAX_CAPACITY = 1024
"""Limit of :func:`count_capacity`."""


@overload
def open_scheduler(
    inventory: Inventory,
    *,
    shared: bool = False,
    environ: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> Scheduler: ...


@overload
def open_scheduler(inventory: Mapping[str, Inventory], *, policy: Policy | None = None) -> Fleet: ...


def open_scheduler(
    inventory: Inventory | Mapping[str, Inventory],
    *,
    shared: bool = False,
    environ: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> Scheduler | Fleet:
    """Make a scheduler with the rules of the vendors' plug-ins.

    Args:
        inventory: The machine; or several machines by name, whose allocations then name the machine.
        shared: Whether allocations are leases that all processes of the machine see. Then all other leases of the
            machine, and drained and reserved devices, count as taken. An allocation ends when it is released, or when
            this process has exited with all processes that it started since the first allocation. A request waits in
            the machine's queue, and only the machine's configuration decides which requests may pass. Calls raise
            :class:`~anyaccel.errors.NeverFitsError` if the configuration does not grant the user so much, and
            :class:`~anyaccel.errors.LedgerError` if leases cannot be kept. If False, the scheduler counts its own
            allocations alone, and ignores leases and other schedulers.
        environ: Environment whose ``ANYACCEL_STATE_DIR`` names the directory of leases, and which names the lease
            around this process, if any; that of this process if None. Only a shared scheduler reads it.
        policy: Order of service, limits of users, and backfill: an :class:`anyaccel.policy.Policy`. If None, priority
            and arrival alone decide, and no request has a known end.

    Raises:
        StateDirectoryError: If leases are to be shared, and no directory for them can be trusted. A missing directory
            is no error: the first request makes it.
        UsageError: If ``inventory`` is no inventory; if a mapping is to be shared, even of one machine, since leases
            are those of one machine; or if a shared scheduler is given a policy, which the machine's configuration
            defines.

    Examples:
        >>> scheduler = anyaccel.open_scheduler(anyaccel.detect("sim:H100:2"))
        >>> half = scheduler.allocate("GPU:0.5")
        >>> scheduler.why("GPU:2").fits_now
        False
        >>> scheduler.release(half)
        >>> len(scheduler.allocate("GPU:2").devices)
        2
    """
    if not isinstance(inventory, Inventory):
        given: object = inventory  # what callers without a type checker may pass
        if not isinstance(given, Mapping) or not all(isinstance(each, Inventory) for each in given.values()):
            raise UsageError(
                f"inventory must be what anyaccel.detect() returns, or a mapping of such by name (got {shown(given)})"
            )
        if shared:
            raise UsageError("a scheduler of several machines cannot be shared: leases are those of one machine")
        return Fleet(inventory, validate, KnownNames(), policy=policy)
    if not shared:
        return Scheduler(inventory, validate, KnownNames(), policy=policy)
    if policy is not None:
        from anyaccel.configuration import MACHINE_FILE

        raise UsageError(
            "policy cannot be given for shared leases: the machine's configuration is the policy of all programs",
            hint=f"set it in {MACHINE_FILE}",
        )
    from anyaccel.launcher.shared import SharedScheduler

    return SharedScheduler(inventory, environ)


def count_capacity(inventory: Inventory, request: Request, most: int = MAX_CAPACITY) -> int:
    """Count how many copies of a request fit an idle machine at once, whatever is leased now.

    A plug-in that fails to judge a set of devices counts as refusing the set.

    Args:
        inventory: The machine.
        request: The request.
        most: The count ends here, at :data:`MAX_CAPACITY` at the latest; less than 1 counts as 1.

    Returns:
        At least 1. For a request that falls back to the CPU, the number of processors of this process, up to ``most``.

    Raises:
        UnknownNameError: If neither a device of the machine nor an installed plug-in has any of the names of a term.
        NeverFitsError: If the request does not fit at all, and does not permit the CPU; also if an installed plug-in
            knows the name, but the machine has no such device.
    """
    # By allocation, not by division: parts, links and vendors' rules decide what fits side by side.
    scheduler = Scheduler(inventory, validate, KnownNames())
    most = max(1, min(most, MAX_CAPACITY))
    for count in range(most):
        try:
            if scheduler.allocate(request).cpu:
                return min(most, len(os.sched_getaffinity(0)))
        except NotFreeError:
            return count
    return most
