"""Plans: the resources and labels with which Ray places a call on a suitable node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from anyaccel.model import (
    UNITS_PER_DEVICE,
    Device,
    Fractional,
    Inventory,
    Product,
    Request,
    Term,
    Value,
    field,
    replace,
)
from anyaccel.scheduler import asked, goes_by, rules, serves, with_units
from anyaccel_cluster import Fitting, Plan, describe_nodes, find_fitting
from anyaccel_export.ray import (
    MIXED,
    TYPE_PREFIX,
    by_resource,
    label_name,
    label_value,
)

TYPE_SHARE = 0.001
"""Quantity of ``accelerator_type:TYPE`` in a plan, of the 1 that a node has; the same as in Ray itself."""
Products = Callable[[], Mapping[str, Sequence[Product]]]
"""Returns the products that the installed plug-ins know, by resource."""


class NodeKind(Value):
    """Nodes of a cluster with the same resources, labels and devices.

    Attributes:
        names: Names of the nodes.
        resources: Quantities of Ray's resources on each node.
        labels: Our labels of each node.
        inventory: The inventory of each node.
    """

    names: tuple[str, ...]
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    inventory: Inventory


class RayPlan(Plan):
    """The plan of a request on Ray.

    Attributes:
        resources: Quantities of Ray's resources.
        selector: Values that labels of the node must have.
    """

    resources: Mapping[str, float] = field(default_factory=dict)
    selector: Mapping[str, str] = field(default_factory=dict)


def find_plan(
    request: Request, kinds: Sequence[NodeKind], products: Products, *, grows: bool
) -> tuple[RayPlan | None, Fitting[tuple[tuple[str, ...], Request]]]:
    """Make the plan of a request.

    Args:
        request: The request.
        kinds: The kinds of nodes in the cluster.
        products: Returns known products; called only if a request names a type that no node has.
        grows: Whether an autoscaler may add nodes.

    Returns:
        The plan, or None; and the result of the search for nodes.
    """
    named = [(describe_nodes(kind.names), kind.inventory) for kind in kinds]
    found = find_fitting(request, named, lambda number: _resources_of(request, kinds[number]))
    if not found.served:  # an autoscaler reads the resources of waiting calls, and starts nodes for these
        return _plan_ahead(request, products) if grows else None, found
    served = [(own, kinds[number]) for number, own in found.served.items()]
    (terms, asked_for), _ = min(served, key=lambda each: _preference(request, each[0][0], each[1]))
    chosen = [kind for own, kind in served if own == (terms, asked_for)]
    return _plan(asked_for, terms, chosen, kinds, products), found


def _resources_of(request: Request, kind: NodeKind) -> tuple[tuple[tuple[str, ...], Request] | None, str]:
    """Return the resource of each term and the request in units; or None, and why Ray cannot assign the devices.

    Ray counts devices, so a share by memory becomes a share in units: the largest that a device of the node needs.
    """
    terms: list[str] = []
    plain: list[Term] = []
    why = ""
    for term in request.terms:
        for resource, devices in _by_preference(term, kind.inventory):
            own = with_units(term, max(devices, key=term.units_on))
            why = _obstacle(own, resource, devices, kind) or _shared_obstacle(request, terms, own, resource)
            if not why:
                terms.append(resource)
                plain.append(own)
                break
        else:
            return None, why or f"nothing serves {term}"
    asked_for = replace(request, terms=tuple(plain))
    wanted = _quantities(asked_for, tuple(terms))
    for resource, quantity in wanted.items():
        if quantity > kind.resources.get(resource, 0):
            return None, f"it was started with {kind.resources.get(resource, 0):g} {resource}"
    return (tuple(terms), asked_for), ""


def _by_preference(term: Term, inventory: Inventory) -> list[tuple[str, list[Device]]]:
    """Return the devices of each resource that has a device with a name of the term, in the order of the names."""
    devices = by_resource(inventory.usable)
    found: dict[str, list[Device]] = {}
    for name in term.names:
        for resource, own in devices.items():
            if any(goes_by(device, (name,)) for device in own):
                found.setdefault(resource, own)
    return list(found.items())


def _obstacle(term: Term, resource: str, devices: Sequence[Device], kind: NodeKind) -> str:
    """Return why a plan cannot use a resource for a term, or an empty text: Ray assigns any device of a resource."""
    typed = not _by_resource(term, resource)
    if not all(goes_by(device, term.names) for device in devices) or (
        typed and kind.labels.get(label_name(resource)) == MIXED
    ):
        return f"its {resource} are of several types, of which Ray cannot give one"
    if typed and label_name(resource) not in kind.labels:
        return f"Ray does not know the type of its {resource}; start it with 'anyaccel ray start'"
    unfit = _unfit(term, resource, devices, kind)
    if unfit:
        return unfit
    if term.count > 1 and not term.mixed and len({device.type for device in devices}) > 1:
        return f"its {resource} are of several types, which Ray mixes; ask for {term},mixed"
    if term.linked and not all(other.id in device.links for device in devices for other in devices if other != device):
        return f"not all of its {resource} are linked, and Ray does not look at that"
    return ""


def _unfit(term: Term, resource: str, devices: Sequence[Device], kind: NodeKind) -> str:
    """Return which devices do not serve a term, or which of its filters no label expresses; else empty."""
    filters = [each.filter for each in asked(term)]
    for each in filters:
        if not each.portable:
            return f"Ray cannot be asked for {each.form}, which is of one machine; run it there, without Ray"
    for rule in rules(term, kind.inventory):
        failing = [device for device in devices if not rule.passes(device)]
        if failing:
            return f"Ray gives any of its {resource}, and some will not do ({rule.explain_failure(failing)})"
    for each in filters:
        if not each.typed and label_name(resource, each.name) not in kind.labels:
            return f"no label says {each.name!r} of all its {resource}; start it with 'anyaccel ray start'"
    return ""


def _shared_obstacle(request: Request, terms: Sequence[str], term: Term, resource: str) -> str:
    """Return why a share cannot stand beside another term of its resource, or an empty text."""
    # Ray takes one quantity of each resource, so the two would be added up.
    others = [other for other, taken in zip(request.terms, terms, strict=False) if taken == resource]
    if others and (term.fraction or any(other.fraction for other in others)):
        return f"Ray gives a share of {resource} only where no other term needs {resource}"
    return ""


def _plan(
    request: Request, terms: tuple[str, ...], chosen: Sequence[NodeKind], kinds: Sequence[NodeKind], products: Products
) -> RayPlan:
    wanted: dict[str, float] = _quantities(request, terms)
    selector: dict[str, str] = {}
    for resource in tuple(wanted):
        own = [term for term, taken in zip(request.terms, terms, strict=True) if taken == resource]
        name = label_name(resource)
        types = {kind.labels[name]: None for kind in chosen if name in kind.labels}
        selector |= _filter_labels(own, resource, chosen, typed=False)
        if not all(_by_resource(term, resource) for term in own):
            types |= dict.fromkeys(_types_ahead(own, resource, types, products))
            types = {each: None for each in types if each != MIXED}
            wanted |= _type_share(types, chosen)
            selector[name] = among(types)
        elif _lets_in_others(kinds, chosen, wanted, selector):
            selector[name] = among(types) if types else f"!{MIXED}"
        if _lets_in_others(kinds, chosen, wanted, selector):
            selector |= _filter_labels(own, resource, chosen, typed=True)
    return RayPlan(request=request, terms=terms, resources=wanted, selector=selector)


def _lets_in_others(
    kinds: Iterable[NodeKind], chosen: Sequence[NodeKind], wanted: Mapping[str, float], selector: Mapping[str, str]
) -> bool:
    """Return whether Ray might place the call on an unsuitable node."""
    fit = (kind for kind in kinds if has(kind.resources, wanted) and satisfies(kind.labels, selector))
    return any(kind not in chosen for kind in fit)


def _filter_labels(terms: Iterable[Term], resource: str, chosen: Sequence[NodeKind], *, typed: bool) -> dict[str, str]:
    """Return the selector for the filters of terms: the values that the labels of the chosen nodes have."""
    filters = {each.filter for term in terms for each in asked(term)}
    names = [label_name(resource, each.name) for each in filters if each.typed == typed]
    values = {name: {kind.labels[name]: None for kind in chosen if name in kind.labels} for name in names}
    return {name: among(found) for name, found in values.items() if found}


def _plan_ahead(request: Request, products: Products) -> RayPlan | None:
    """Make a plan for nodes that an autoscaler may add; None if no known product serves the request."""
    terms, selector = [], {}
    share: dict[str, float] = {}
    if any(not each.filter.typed for term in request.terms for each in asked(term)):
        return None
    if any(term.memory_bytes for term in request.terms):  # how much of a device it is depends on the node
        return None
    for term in request.terms:
        for resource, own in products().items():
            types = list(_types_ahead([term], resource, {}, products))
            if _by_resource(term, resource) or types:
                terms.append(resource)
                if types and not _by_resource(term, resource):
                    selector[label_name(resource)] = among(types)
                    share |= {
                        f"{TYPE_PREFIX}{each.name}": TYPE_SHARE for each in own if [label_value(each.name)] == types
                    }
                break
        else:
            return None
    found = tuple(terms)
    return RayPlan(request=request, terms=found, resources=_quantities(request, found) | share, selector=selector)


def _types_ahead(terms: Iterable[Term], resource: str, known: Iterable[str], products: Products) -> Iterable[str]:
    """Yield the label values of types that terms name and no node has yet."""
    there = {each.lower() for each in known}
    for term in terms:
        for name in term.names:
            if label_value(name).lower() in there:
                continue
            for product in products().get(resource, ()):
                if serves(_imagined(product), replace(term, names=(name,)), Inventory(machine="", devices=())):
                    yield label_value(product.name)


def _imagined(product: Product) -> Device:
    """Make a device with the common properties of a product."""
    return Device(
        id=product.name,
        index=0,
        model=product.model,
        memory_bytes=product.memory_bytes,
        tags=(product.name, *product.aliases),
        slots=product.slots,
        fractional=Fractional.SHARED,
    )


def _type_share(types: Iterable[str], chosen: Sequence[NodeKind]) -> dict[str, float]:
    """Return a quantity of Ray's own resource of a type, for autoscalers; empty if several types will do."""
    (*others, last) = types
    name = next(
        (name for kind in chosen for name in kind.resources if name == f"{TYPE_PREFIX}{last}"),
        "",
    )
    everywhere = name and all(name in kind.resources for kind in chosen)
    return {} if others or not everywhere else {name: TYPE_SHARE}


def _quantities(request: Request, terms: Sequence[str]) -> dict[str, float]:
    # Summed in whole units: Ray refuses 0.1 + 0.2 of a device, since it is no multiple of 0.0001.
    units: dict[str, int] = {}
    for term, resource in zip(request.terms, terms, strict=True):
        units[resource] = units.get(resource, 0) + term.units
    return {resource: each / UNITS_PER_DEVICE for resource, each in units.items()}


def among(values: Iterable[str]) -> str:
    """Return the selector of a label for a list of values."""
    (*others, last) = values
    return f"in({','.join((*others, last))})" if others else last


def satisfies(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return whether a node has the labels of a selector of ours."""
    for name, wanted in selector.items():
        values = wanted.removeprefix("!").removeprefix("in(").removesuffix(")").split(",")
        if (labels.get(name) in values) == wanted.startswith("!"):
            return False
    return True


def has(resources: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    """Return whether a node was started with some quantities of resources."""
    return all(resources.get(resource, 0) >= quantity for resource, quantity in wanted.items())


def _preference(request: Request, terms: Sequence[str], kind: NodeKind) -> list[int]:
    """Return for each term the position of the served name: earlier names are preferred."""
    devices = by_resource(kind.inventory.usable)
    return [
        next(i for i, name in enumerate(term.names) if any(goes_by(each, (name,)) for each in devices[resource]))
        for term, resource in zip(request.terms, terms, strict=True)
    ]


def _by_resource(term: Term, resource: str) -> bool:
    """Return whether a term names a resource as a whole, without a type."""
    typed = any(each.filter.typed for each in asked(term))
    return not typed and any(name.lower() == resource.lower() for name in term.names)
