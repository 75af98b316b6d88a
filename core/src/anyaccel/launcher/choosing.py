"""Choose devices by the rules of the vendors' plug-ins, for this process alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from anyaccel.errors import NotFreeError
from anyaccel.model import Device, Inventory, Request, Term
from anyaccel.scheduler import Scheduler

MAX_CAPACITY = 1024
"""Limit of :func:`count_capacity`."""


def local_scheduler(inventory: Inventory, list_holders: Callable[[Mapping[str, str]], str] | None = None) -> Scheduler:
    """Make a scheduler for this process alone, which starts with all devices free, whatever is leased.

    Args:
        inventory: The machine.
        list_holders: As for :class:`~anyaccel.scheduler.Scheduler`.
    """
    return Scheduler(inventory, validate=validate, known=KnownNames(), list_holders=list_holders)


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

    First the identity of the plug-in is checked: the permitted numbers of devices, and whether a device can be divided.
    Without a hook, this decides alone. Answers of the hook are kept until the next detection; after an error, the hook
    is asked again, unless its process has died or exceeded its time twice in a row: then the last error is raised until
    the next detection. Declared devices, which no plug-in knows, can serve every term.

    Args:
        term: The term.
        devices: The devices, at least one, all of one vendor.

    Returns:
        The reason why not; None if it can.

    Raises:
        PluginError: If the plug-in is not installed, does not answer, or breaks the contract.
    """
    if devices[0].declared:  # by the user: no plug-in knows them
        return None
    from anyaccel.vendors.process import vendor_process

    return vendor_process(devices[0].vendor).validate(term, devices)


class KnownNames:
    """Names of vendors, resources and products of the installed plug-ins, aliases included.

    Each iteration asks the plug-ins; a plug-in that fails is passed over.
    """

    def __iter__(self) -> Iterator[str]:
        from anyaccel.vendors.process import known

        for each in known()[0]:
            yield from (each.info.vendor, each.info.resource)
            for product in each.products:
                yield from (product.name, *product.aliases)
