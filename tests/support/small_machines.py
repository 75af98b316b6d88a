"""Machines made by hand, a rule as vendors have them, and an oracle that tries everything."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from anyaccel.model import UNITS_PER_DEVICE, Device, Fractional, Inventory, Request, Term
from anyaccel.scheduler import Validate
from anyaccel.scheduler.filters import asked_memory

GIB = 1 << 30


def gpus(
    count: int,
    tag: str = "H100",
    *,
    vendor: str = "acme",
    links: Mapping[tuple[int, int], int] | int = 0,
    numa: int | None = None,
    memory_bytes: int | None = 80 * GIB,
    fractional: Fractional = Fractional.SHARED,
    resource: str = "GPU",
) -> tuple[Device, ...]:
    """Devices that are alike; ``links`` is one strength for all pairs, or a strength for some."""
    ids = [f"{tag.lower()}-{index}" for index in range(count)]
    pairs = dict.fromkeys(combinations(range(count if links else 0), 2), links) if isinstance(links, int) else links
    peers = {(a, b): strength for (a, b), strength in pairs.items() if strength}
    return tuple(
        Device(
            id=ids[index],
            index=index,
            order=index,
            model=f"Model {tag}",
            tags=(tag,),
            vendor=vendor,
            resource=resource,
            kind=resource.lower(),
            memory_bytes=memory_bytes,
            numa_node=None if numa is None else index // numa,
            fractional=fractional,
            links={ids[b]: strength for (a, b), strength in peers.items() if a == index},
        )
        for index in range(count)
    )


def chips(count: int) -> tuple[Device, ...]:
    """Devices that are given out whole, in the sets that :func:`chip_rule` allows."""
    return gpus(count, "CHIP-V5", vendor="tensor", resource="TPU", fractional=Fractional.NO, links=1, memory_bytes=None)


def chip_rule(term: Term, devices: Sequence[Device]) -> str | None:
    """Chips come in 1, 2, 4 or 8, aligned."""
    indexes = [device.index for device in devices if device.resource == "TPU"]
    count = len(indexes)
    if not count or count == 1:
        return None
    if count not in (2, 4, 8):
        return f"chips are given out as 1, 2, 4 or 8 (got {count})."
    if indexes[0] % count or indexes != list(range(indexes[0], indexes[0] + count)):
        return f"{count} chips must be aligned neighbors (got {indexes})."
    return None


def machine(*devices: Sequence[Device]) -> Inventory:
    """A machine with these devices."""
    return Inventory(machine="made by hand", devices=tuple(device for group in devices for device in group))


def legal(term: Term, chosen: Sequence[Device], validate: Validate | None) -> bool:
    """Whether a term may be served by exactly these devices, were they free."""

    def named(name: str, device: Device) -> bool:
        return name.lower() in {text.lower() for text in (device.resource, device.vendor, *device.tags)}

    share = min(term.units, UNITS_PER_DEVICE)
    for device in chosen:
        if not device.usable or not any(named(name, device) for name in term.names):
            return False
        if term.fraction and device.fractional is Fractional.NO:
            return False
        if (device.memory_bytes or 0) * share < asked_memory(term) * UNITS_PER_DEVICE:
            return False
    if not term.mixed and len({(device.vendor, device.type) for device in chosen}) > 1:
        return False
    if term.linked and not all(a.links.get(b.id) or b.links.get(a.id) for a, b in combinations(chosen, 2)):
        return False
    vendors = {device.vendor for device in chosen}
    return not validate or not any(
        validate(term, [device for device in chosen if device.vendor == vendor]) for vendor in vendors
    )


def ways(
    devices: Sequence[Device], free: Mapping[str, int], terms: Sequence[Term], validate: Validate | None
) -> Iterator[tuple[tuple[Device, ...], ...]]:
    """Every way to serve terms, found by trying everything."""
    if not terms:
        yield ()
        return
    term, *rest = terms
    units = min(term.units, UNITS_PER_DEVICE)
    for chosen in combinations([device for device in devices if free[device.id] >= units], term.count):
        if legal(term, chosen, validate):
            left = dict(free) | {device.id: free[device.id] - units for device in chosen}
            yield from ((chosen, *others) for others in ways(devices, left, rest, validate))


def possible(
    devices: Sequence[Device], free: Mapping[str, int], request: Request, validate: Validate | None = None
) -> bool:
    """Whether a request can be served with what is free."""
    return next(ways(devices, free, request.terms, validate), None) is not None
