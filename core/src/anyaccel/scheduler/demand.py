"""What those who wait want, added up for whoever can bring more machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyaccel.model import UNITS_PER_DEVICE, Value
from anyaccel.scheduler.bits import bits
from anyaccel.scheduler.placement import Layout
from anyaccel.scheduler.plan import RequestPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decimal import Decimal


class Demand(Value):
    """What those who wait want of one kind of device.

    Attributes:
        name: The resource, vendor or accelerator type that was asked for, or several that will do, joined by ``|``.
        resource: Resource under which these devices are counted; empty when no device that is here goes by the
            name, or devices of several resources do.
        units: Quantity in 1/10000 of a device, over all requests and all members of gangs.
        largest: Quantity that a single term asks for, the largest of them.
        requests: Number of requests.
        infeasible: Whether they can never be served.
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


def summarize(layouts: Sequence[Layout], plans: Iterable[RequestPlan], *, infeasible: bool) -> tuple[Demand, ...]:
    """Add up requests by the names that they ask for, in the order in which these first occur."""
    quantities: dict[str, list[int]] = {}
    largest: dict[str, int] = {}
    asking: dict[str, int] = {}
    resources: dict[str, str] = {}
    for plan in plans:
        names = set()
        for term in plan.request.terms:
            name = "|".join(layouts[0].names.spelled(each) if layouts else each for each in term.names)
            found = {layout.devices[at].resource for layout in layouts for at in bits(layout.named(term))}
            resources[name] = found.pop() if len(found) == 1 else ""
            quantities.setdefault(name, []).append(plan.hosts * term.units)
            largest[name] = max(largest.get(name, 0), term.units)
            names.add(name)
        for name in names:
            asking[name] = asking.get(name, 0) + 1
    return tuple(
        Demand(
            name=name,
            resource=resources[name],
            units=sum(units),
            largest=largest[name],
            requests=asking[name],
            infeasible=infeasible,
        )
        for name, units in quantities.items()
    )
