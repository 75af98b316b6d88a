"""Demand: the quantities of waiting requests, for programs that add machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyaccel.model import UNITS_PER_DEVICE, Term, Value, bits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decimal import Decimal

    from anyaccel.scheduler.books import RequestPlan
    from anyaccel.scheduler.placement import Layout, NameRegistry


class Demand(Value):
    """Demand of waiting requests for one kind of device.

    Attributes:
        name: The requested resource, vendor or accelerator type, or alternatives joined by ``|``.
        resource: Resource of these devices; empty for a name without devices here, or with devices of several
            resources.
        units: Quantity in 1/10000 of a device, over requests and members of gangs.
        largest: The largest quantity of a single term.
        requests: Number of requests.
        infeasible: Whether these requests can never be served.
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


def summarize(names: NameRegistry, layouts: Sequence[Layout], plans: Iterable[RequestPlan]) -> tuple[Demand, ...]:
    """Sum the quantities of requests by requested name, in order of the first occurrence.

    Requests that can never be served are summed apart, after the others.

    Args:
        names: The known names.
        layouts: The machines.
        plans: The requests.
    """
    asking: dict[tuple[bool, str], list[tuple[int, int, Term]]] = {}
    for number, plan in enumerate(plans):
        for term in plan.request.terms:
            name = names.label(term)
            asking.setdefault((not plan.ever_fits, name), []).append((number, plan.hosts, term))
    return tuple(
        Demand(
            name=name,
            resource=_resource(layouts, found[0][2]),
            units=sum(hosts * _units(layouts, term) for _, hosts, term in found),
            largest=max(_units(layouts, term) for _, _, term in found),
            requests=len({number for number, _, _ in found}),
            infeasible=infeasible,
        )
        for (infeasible, name), found in sorted(asking.items(), key=lambda each: each[0][0])
    )


def _units(layouts: Sequence[Layout], term: Term) -> int:
    """Return the quantity of a term in units; of a share by memory the most that a device would need for it.

    A whole device if no device could serve the share.
    """
    if not term.memory_bytes:
        return term.units
    devices = (layout.devices[at] for layout in layouts for at in bits(layout.serving(term)))
    return max(map(term.units_on, devices), default=UNITS_PER_DEVICE)


def _resource(layouts: Sequence[Layout], term: Term) -> str:
    """Return the common resource of the devices of a term; empty for none or several."""
    found = {layout.devices[at].resource for layout in layouts for at in bits(layout.named(term))}
    return found.pop() if len(found) == 1 else ""
