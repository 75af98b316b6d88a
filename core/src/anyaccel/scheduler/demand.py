"""What those who wait want, added up for whoever can bring more machines."""

from __future__ import annotations

from collections.abc import Iterable

from anyaccel.model import UNITS_PER_DEVICE, Request, Value
from anyaccel.scheduler.cells import bits
from anyaccel.scheduler.placement import Layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decimal import Decimal


class Demand(Value):
    """What those who wait want of one kind of device.

    Attributes:
        name: The resource, vendor or accelerator type that was asked for, or several that will do, joined by ``|``.
        resource: Resource under which these devices are counted; empty when no device of this machine goes by the
            name, or devices of several resources do.
        units: Quantity in 1/10000 of a device, over all requests.
        largest: Quantity that a single term asks for, the largest of them.
        requests: Number of requests.
        infeasible: Whether this machine can never serve them.
    """

    name: str
    resource: str
    units: int
    largest: int
    requests: int
    infeasible: bool

    @property
    def devices(self) -> Decimal:
        """The quantity in devices."""
        from decimal import Decimal

        return Decimal(self.units) / UNITS_PER_DEVICE


def summarize(layout: Layout, requests: Iterable[Request], *, infeasible: bool) -> tuple[Demand, ...]:
    """Add up requests by the names that they ask for, in the order in which these first occur."""
    quantities: dict[str, list[int]] = {}
    asking: dict[str, int] = {}
    resources: dict[str, str] = {}
    for request in requests:
        names = set()
        for term in request.terms:
            name = "|".join(layout.names.spelled(each) for each in term.names)
            found = {layout.devices[position].resource for position in bits(layout.named(term))}
            resources[name] = found.pop() if len(found) == 1 else ""
            quantities.setdefault(name, []).append(term.units)
            names.add(name)
        for name in names:
            asking[name] = asking.get(name, 0) + 1
    return tuple(
        Demand(
            name=name,
            resource=resources[name],
            units=sum(units),
            largest=max(units),
            requests=asking[name],
            infeasible=infeasible,
        )
        for name, units in quantities.items()
    )
