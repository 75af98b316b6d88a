"""The request nearest to one that does not fit."""

from __future__ import annotations

from collections.abc import Iterator

from anyaccel.model import UNITS_PER_DEVICE, Request, Term, replace
from anyaccel.scheduler.placement import Layout, Occupancy, Validate, place, want
from anyaccel.scheduler.topology import bits

_TRIES = 64


def nearest(layout: Layout, free: Occupancy, request: Request, validate: Validate | None) -> Request | None:
    """The nearest request that ``free`` can serve.

    Each term that does not fit alone is changed: a share of a device that is given out whole becomes one device, a
    quantity that the vendor refuses the next one that it accepts, else fewer devices. Then quantities go down until
    the terms fit together.
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
        index = max(range(len(terms)), key=lambda index: (terms[index].units, index))
        if terms[index].count > 1:
            terms[index] = replace(terms[index], units=terms[index].units - UNITS_PER_DEVICE)
        elif len(terms) > 1:
            del terms[index]
        else:
            return None
    return None


def _near(layout: Layout, free: Occupancy, term: Term) -> Iterator[Term]:
    """Terms in the order of their distance from ``term``: itself, somewhat more, less, then with less memory."""
    yield term
    if term.fraction:
        most = max((free.units[position] for position in bits(want(layout, term).mask)), default=0)
        if 0 < most < term.units:
            yield replace(term, units=most)
        yield from _larger_shares(layout, term)
        yield replace(term, units=UNITS_PER_DEVICE)
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
    if term.memory_bytes is not None:
        for size in _sizes(layout, term):
            share = size * min(term.units, UNITS_PER_DEVICE) // UNITS_PER_DEVICE
            if 0 < share < term.memory_bytes:
                yield replace(term, memory_bytes=share)


def _room(layout: Layout, free: Occupancy, term: Term) -> int:
    """How many devices a term could get at most, were it not for the vendor's rule."""
    mask = want(layout, replace(term, units=UNITS_PER_DEVICE)).mask & free.whole
    if term.linked:
        return max(((layout.topology.linked[position] & mask).bit_count() + 1 for position in bits(mask)), default=0)
    choices = want(layout, replace(term, units=2 * UNITS_PER_DEVICE)).choices
    groups = ((group & free.whole).bit_count() for choice in choices for group in choice)
    return max(groups, default=min(mask.bit_count(), 1))


def _larger_shares(layout: Layout, term: Term) -> Iterator[Term]:
    """The smallest shares that have the memory that a term asks for."""
    for size in _sizes(layout, term):
        units = -(-(term.memory_bytes or 0) * UNITS_PER_DEVICE // size)
        if term.units < units < UNITS_PER_DEVICE:
            yield replace(term, units=units)


def _sizes(layout: Layout, term: Term) -> list[int]:
    """The amounts of memory that the devices of a term have, largest first."""
    named = layout.named(term) & layout.usable
    return sorted({layout.devices[position].memory_bytes or 0 for position in bits(named)} - {0}, reverse=True)
