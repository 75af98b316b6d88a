"""Choose devices by the rules of the vendors' plug-ins, among what one process knows of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from anyaccel.model import Device, Inventory, Request, Term
from anyaccel.scheduler import Choice, Scheduler

T = TypeVar("T")


def local_scheduler(inventory: Inventory) -> Scheduler:
    """Make a scheduler for this process alone that keeps the rules of the vendors' plug-ins."""
    return Scheduler(inventory, validate=validate, known=KnownNames())


def validate(term: Term, devices: Sequence[Device]) -> str | None:
    """Ask the devices' vendor whether its hardware can serve a term with exactly these devices."""
    if devices[0].declared:
        return None
    from anyaccel.vendors.process import vendor_process

    return vendor_process(devices[0].vendor).validate(term, devices)


def choice_of(inventory: Inventory, request: Request) -> Choice:
    """What chooses devices for a request by the rules of the vendors' plug-ins; see :func:`remembered`.

    Raises:
        UnknownNameError: When nothing goes by one of the names.
    """
    return remembered(inventory, request, lambda: Choice(inventory, request, validate, KnownNames()))


def remembered(inventory: Inventory, key: object, make: Callable[[], T]) -> T:
    """What was made of an inventory and does not change: who takes devices mostly takes more of the same machine's.

    Args:
        inventory: The machine; that which was asked about last is remembered.
        key: What it is.
        make: Makes it.
    """
    global _last  # noqa: PLW0603 - there is no lock: what is lost is made again
    if _last[0] is not inventory:
        _last = inventory, {}
    known = _last[1]
    found: T | None = known.get(key)
    if found is None:
        found = make()
        if len(known) >= _MOST_REMEMBERED:
            known.clear()
        known[key] = found
    return found


_MOST_REMEMBERED = 64
_last: tuple[Inventory | None, dict[object, Any]] = (None, {})


class KnownNames:
    """Names that installed plug-ins know beside those of the machine; asked for only once they are iterated over."""

    def __iter__(self) -> Iterator[str]:
        from anyaccel.vendors.process import known

        for each in known()[0]:
            yield from (each.info.vendor, each.info.resource)
            for product in each.products:
                yield from (product.name, *product.aliases)
