"""What those who wait want, added up for whoever can bring more machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyaccel.model import UNITS_PER_DEVICE, Term, Value
from anyaccel.model.extent import bits
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
    asking: dict[str, list[tuple[int, int, Term]]] = {}
    for number, plan in enumerate(plans):
        for term in plan.request.terms:
            name = "|".join(layouts[0].names.spelled(each) if layouts else each for each in term.names)
            asking.setdefault(name, []).append((number, plan.hosts, term))
    return tuple(
        Demand(
            name=name,
            resource=_resource(layouts, found[0][2]),
            units=sum(hosts * term.units for _, hosts, term in found),
            largest=max(term.units for _, _, term in found),
            requests=len({number for number, _, _ in found}),
            infeasible=infeasible,
        )
        for name, found in asking.items()
    )


def _resource(layouts: Sequence[Layout], term: Term) -> str:
    """The one resource of the devices that a term names; empty where there is none, or several."""
    found = {layout.devices[at].resource for layout in layouts for at in bits(layout.named(term))}
    return found.pop() if len(found) == 1 else ""
