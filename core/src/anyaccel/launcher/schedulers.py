"""Make schedulers and choices with the rules of the vendors' plug-ins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from anyaccel.errors import NotFreeError, UsageError
from anyaccel.model import Device, Inventory, Request, Term
from anyaccel.scheduler import Choice, Scheduler
from anyaccel.text import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from anyaccel.policy import Policy
    from anyaccel.scheduler import Fleet

T = TypeVar("T")

MAX_CAPACITY = 1024
"""Limit of :func:`count_capacity`."""
_CACHE_SIZE = 64


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
        shared: Whether allocations are leases that all processes of the machine see. Then leases of other processes
            count as taken. An allocation ends when it is released, or when this process has exited with all processes
            that it started since the first allocation. A request waits in the machine's queue, and only the machine's
            configuration decides which requests may pass. Calls raise :class:`~anyaccel.errors.NeverFitsError` if the
            configuration does not grant the user so much, and :class:`~anyaccel.errors.LedgerError` if leases cannot be
            kept. If False, the scheduler is private to this process.
        environ: Environment whose ``ANYACCEL_STATE_DIR`` names the directory of leases; that of this process if None.
        policy: Order of service, limits of users, and backfill: an :class:`anyaccel.policy.Policy`. If None, priority
            and arrival alone decide, and no request has a known end.

    Raises:
        StateDirectoryError: If leases are to be shared, and no trustworthy directory for them exists.
        UsageError: If ``inventory`` is no inventory; if several machines are to be shared, since leases are those of
            one machine; or if a shared scheduler is given a policy, which the machine's configuration defines.

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
        from anyaccel.scheduler import Fleet

        return Fleet(inventory, validate=validate, known=KnownNames(), policy=policy)
    if not shared:
        return Scheduler(inventory, validate=validate, known=KnownNames(), policy=policy)
    if policy is not None:
        from anyaccel.configuration import MACHINE_FILE

        raise UsageError(
            "policy cannot be given for shared leases: the machine's configuration is the policy of all programs",
            hint=f"set it in {MACHINE_FILE}",
        )
    from anyaccel.launcher.shared import SharedScheduler

    return SharedScheduler(inventory, environ)


def local_scheduler(inventory: Inventory) -> Scheduler:
    """Make a scheduler for this process alone."""
    return Scheduler(inventory, validate=validate, known=KnownNames())


def count_capacity(inventory: Inventory, request: Request, most: int = MAX_CAPACITY) -> int:
    """Count how many copies of a request fit an idle machine at once.

    Args:
        inventory: The machine.
        request: The request.
        most: The count ends here, at :data:`MAX_CAPACITY` at the latest.

    Returns:
        At least 1. For a request that falls back to the CPU, the number of processors of this process.

    Raises:
        UnknownNameError, NeverFitsError: If the request does not fit at all.
    """
    # By allocation, not by division: parts, links and vendors' rules decide what fits side by side.
    scheduler = local_scheduler(inventory)
    most = max(1, min(most, MAX_CAPACITY))
    for count in range(most):
        try:
            if scheduler.allocate(request).cpu:
                return min(most, len(os.sched_getaffinity(0)))
        except NotFreeError:
            return count
    return most


def validate(term: Term, devices: Sequence[Device]) -> str | None:
    """Ask the vendor's plug-in whether the hardware can serve a term with exactly the given devices.

    Returns:
        The reason why not; None if it can.
    """
    if devices[0].declared:  # by the user: no plug-in knows them
        return None
    from anyaccel.vendors.process import vendor_process

    return vendor_process(devices[0].vendor).validate(term, devices)


def make_choice(inventory: Inventory, request: Request) -> Choice:
    """Return the choice of devices for a request; see :func:`cached`.

    Raises:
        UnknownNameError: If no device has one of the names.
    """
    return cached(inventory, request, lambda: Choice(inventory, request, validate, KnownNames()))


def cached(inventory: Inventory, key: object, make: Callable[[], T]) -> T:
    """Return an object made from an inventory alone, and cache the object for the next call.

    A program that acquires devices in a loop uses one inventory. Measured with 8 devices: acquire and release take
    0.95 ms, without the cache 1.32 ms. Only the inventory of the last call is remembered.

    Args:
        inventory: The machine.
        key: Identity of the object.
        make: Makes the object.
    """
    global _cache  # noqa: PLW0603 - without a lock: an entry that another thread drops is made again
    if _cache[0] is not inventory:
        _cache = inventory, {}
    known = _cache[1]
    found: T | None = known.get(key)
    if found is None:
        found = make()
        if len(known) >= _CACHE_SIZE:
            known.clear()
        known[key] = found
    return found


_cache: tuple[Inventory | None, dict[object, Any]] = (None, {})


class KnownNames:
    """Names of vendors, resources and products of the installed plug-ins; iteration asks the plug-ins."""

    def __iter__(self) -> Iterator[str]:
        from anyaccel.vendors.process import known

        for each in known()[0]:
            yield from (each.info.vendor, each.info.resource)
            for product in each.products:
                yield from (product.name, *product.aliases)
