"""Search for the nearest request that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from anyaccel.model import UNITS_PER_DEVICE, Request, Term, replace
from anyaccel.model.extent import bits
from anyaccel.scheduler.filters import asked
from anyaccel.scheduler.placement import Layout, Occupancy, Validate, place, want

_TRIES = 64  # alternatives per term and filter: people read the first that fits, and each costs a placement


def nearest(layout: Layout, free: Occupancy, request: Request, validate: Validate | None) -> Request | None:
    """Return the nearest request that ``free`` can serve; None when there is none.

    Each term that does not fit alone is changed: a share of an indivisible device becomes one device, a quantity that
    the vendor refuses the next accepted one, else fewer devices. Then quantities go down until the terms fit together.
    """

    def fits(*terms: Term) -> bool:
        return place(layout, free, [want(layout, term) for term in terms], validate) is not None

    terms = []
    for term in request.terms:
        near = next((near for near in _near(layout, free, term) if fits(near)), None)
        if near is None:
            return None
        terms.append(near)
    for _ in range(_TRIES):
        if fits(*terms):
            return replace(request, terms=tuple(terms))
        # The largest term shrinks first, and the last of several: people write the important one first.
        index = max(range(len(terms)), key=lambda index: (terms[index].units, index))
        if terms[index].count > 1:
            terms[index] = replace(terms[index], units=terms[index].units - UNITS_PER_DEVICE)
        elif len(terms) > 1:
            del terms[index]
        else:
            return None
    return None


def _near(layout: Layout, free: Occupancy, term: Term) -> Iterator[Term]:
    """Yield terms in the order of distance from ``term``: itself, somewhat more, less, then other filters."""
    yield term
    there = [layout.devices[position] for position in bits(layout.named(term) & layout.usable)]
    filters = asked(term, layout.inventory)
    others = [near for each in filters for near in islice(each.filter.find_near(each, there), _TRIES)]
    if term.fraction:
        if term.memory_bytes:
            yield from _less_memory(layout, free, term)
        else:
            most = max((free.units[position] for position in bits(want(layout, term).mask)), default=0)
            if 0 < most < term.units:
                yield replace(term, units=most)
            yield from (near for near in others if near.units > term.units)
        yield replace(term, units=UNITS_PER_DEVICE, memory_bytes=0)
    else:
        room = _room(layout, free, term)
        below = min(term.count - 1, room)
        for count in (
            *range(term.count + 1, min(room, term.count + _TRIES) + 1),
            *range(below, max(0, below - _TRIES), -1),
        ):
            yield replace(term, units=count * UNITS_PER_DEVICE)
        part = max(
            (free.units[position] for position in bits(layout.named(term) & layout.usable & ~layout.ours)), default=0
        )
        if 0 < part < UNITS_PER_DEVICE:
            yield replace(term, units=part)
    yield from others


def _less_memory(layout: Layout, free: Occupancy, term: Term) -> Iterator[Term]:
    """Yield the term with the most memory that is free on one device, in whole GiB where there is as much.

    Nothing if no memory is free, or as much as the term asks for.
    """
    able = bits(layout.serving(replace(term, memory_bytes=1)))
    most = max((free.units[at] * (layout.devices[at].memory_bytes or 0) // UNITS_PER_DEVICE for at in able), default=0)
    unit = next((unit for unit in (1 << 30, 1 << 20) if most >= unit), 1)
    if 0 < most < term.memory_bytes:
        yield replace(term, memory_bytes=most // unit * unit)


def _room(layout: Layout, free: Occupancy, term: Term) -> int:
    """Return the largest number of devices for a term, without regard to the vendor's rule; an estimate if linked."""
    mask = want(layout, replace(term, units=UNITS_PER_DEVICE)).mask & free.whole
    if term.linked:
        return max(((layout.topology.linked[position] & mask).bit_count() + 1 for position in bits(mask)), default=0)
    choices = want(layout, replace(term, units=2 * UNITS_PER_DEVICE)).choices
    groups = ((group & free.whole).bit_count() for choice in choices for group in choice)
    return max(groups, default=min(mask.bit_count(), 1))
