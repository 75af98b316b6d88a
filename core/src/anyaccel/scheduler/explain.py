"""Reasons why a request does not fit, and the nearest request that does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from anyaccel.model import (
    UNITS_PER_DEVICE,
    Reason,
    ReasonCode,
    Request,
    Term,
    VendorState,
    Verdict,
    bits,
    format_units,
    join_names,
    replace,
)
from anyaccel.scheduler.books import Books, RequestPlan
from anyaccel.scheduler.filters import asked, rules
from anyaccel.scheduler.placement import Layout, Occupancy, Resolved, Wanted, place, vetoed, want
from anyaccel.text import listed

_TOLD = 4
"""Number of machines whose reasons are listed."""


def judge(plan: RequestPlan, machines: Sequence[Books], ahead: Mapping[str, str]) -> Verdict:
    """Explain why a request is not served now, or never; of several machines, the first four are listed.

    The nearest requests that would fit are given for requests on one machine only.

    Args:
        plan: The request, which could not be placed.
        machines: The machines, by number.
        ahead: The earlier tickets that block the request, by id, with a description.
    """
    able = [machines[number] for number in plan.resolved]
    refusing = able if ahead else [books for books in able if not plan.open >> books.number & 1]
    reasons: list[Reason] = []
    if ahead and plan.ever_fits:
        reasons.append(_waiting_behind(plan, machines, ahead))
    if plan.hosts > 1 and machines and not (ahead and plan.ever_fits):
        message = (
            f"at most {plan.open.bit_count()} of {len(able)} machines can serve it now, and it is to be on {plan.hosts}"
            if plan.ever_fits
            else f"{len(able)} of {len(machines)} machines can ever serve it, and it is to be on {plan.hosts}"
        )
        reasons.append(Reason(code=ReasonCode.HOSTS, message=message))
    if not machines:
        reasons.append(Reason(code=ReasonCode.NOT_ENOUGH, message="there is no machine"))
    told = refusing if plan.ever_fits else [books for books in machines if books not in able]
    verdicts = [_judge(books, plan.request) for books in told[:_TOLD]]
    for books, verdict in zip(told, verdicts, strict=False):
        where = f"{books.machine}: " if books.machine else ""
        reasons += [replace(each, message=where + each.message) for each in verdict.reasons]
    if reasons and len(told) > _TOLD:
        more = len(told) - _TOLD
        message = f"{reasons[-1].message}; {more} more machine{'s' if more > 1 else ''} likewise"
        reasons[-1] = replace(reasons[-1], message=message)
    ways_out = [way for verdict in verdicts for way in verdict.ways_out]
    if able and not plan.ever_fits:
        ways_out.append(f"ask for {len(able)} host{'s' if len(able) > 1 else ''}")
    alone = verdicts if plan.hosts == 1 else []  # the nearest request of one machine may not fit several
    return Verdict(
        request=plan.request,
        fits_now=False,
        ever_fits=plan.ever_fits,
        reasons=tuple(reasons),
        nearest=None if plan.ever_fits else next((each.nearest for each in alone if each.nearest), None),
        nearest_now=None if ahead else next((each.nearest_now for each in alone if each.nearest_now), None),
        ways_out=tuple(dict.fromkeys(ways_out)),
    )


def _judge(books: Books, request: Request) -> Verdict:
    """Explain whether one machine would serve a request without rivals, and the nearest request that fits."""
    layout, free = books.layout, books.occupancy
    empty = Occupancy(layout)
    found = books.resolve(request)
    if place(free, found.wanted) is not None:
        return Verdict(request=request, fits_now=True, ever_fits=True)
    if found.ever_fits:
        reasons = list(_reasons_now(books, found))
    else:
        # If only the vendors' variables are in the way, each term fits, and no other reason would say why.
        reasons = list(_rivals(layout, request)) or list(_reasons_ever(empty, found))
    return Verdict(
        request=request,
        fits_now=False,
        ever_fits=found.ever_fits,
        reasons=tuple(reasons),
        nearest=None if found.ever_fits else nearest(empty, request),
        nearest_now=nearest(free, request),
        ways_out=tuple(_remedies(layout, reasons)),
    )


def _remedies(layout: Layout, reasons: Sequence[Reason]) -> Iterator[str]:
    """Yield the ways out: remedies of unhealthy devices, plug-ins to install, separate commands for rival vendors."""
    broken: dict[str, list[str]] = {}
    unknown: list[str] = []
    for reason in reasons:
        if reason.code is ReasonCode.UNHEALTHY:
            for device in (layout.devices[layout.positions[each]] for each in reason.devices):
                broken.setdefault(device.health_remedy, []).append(device.name)
        elif reason.code is ReasonCode.UNKNOWN_NAME and reason.term:
            unknown += reason.term.names
    yield from (f"{join_names(names)}: {remedy}" for remedy, names in broken.items() if remedy)
    if unknown:
        from anyaccel.extras import plugin_remedy  # only such errors need it

        yield from filter(None, map(plugin_remedy, layout.names.find_unknown(unknown)))
    if any(reason.code is ReasonCode.VARIABLE for reason in reasons):
        yield "ask for their devices in separate commands"


def _rivals(layout: Layout, request: Request) -> Iterator[Reason]:
    """Yield a reason for each pair of vendors that cannot serve one worker together.

    Nothing without conflicts of variables, or if the request would not fit without them, either.
    """
    if not layout.rivals:
        return
    reports = tuple(replace(report, env_vars=()) for report in layout.inventory.vendors)
    twin = Layout(replace(layout.inventory, vendors=reports), layout.names, layout.validate)
    placed = place(Occupancy(twin), [want(twin, term) for term in request.terms])
    spots = [spot for each in placed or () for spot in each]
    devices = [layout.devices[spot.position] for spot in spots]
    for one, other, variable in layout.conflicts(spots):
        yield Reason(
            code=ReasonCode.VARIABLE,
            message=f"{one} and {other} both obey the variable {variable}, and no value of it means devices of"
            " both, so one worker cannot have them together",
            devices=tuple(device.id for device in devices if device.vendor in {one, other}),
        )


def _reasons_ever(empty: Occupancy, found: Resolved) -> Iterator[Reason]:
    """Yield reasons why a request does not fit an idle machine."""
    layout = empty.layout
    alone = [each for each in found.wanted if place(empty, [each]) is None]
    for each in alone:
        if each.mask.bit_count() < each.term.count:
            yield from _shortage(layout, each.term)
        elif each.term.fraction and not each.mask & empty.whole:
            yield _small_part(empty, each)
        else:
            yield from _form(empty, each)
        if unknown := layout.names.find_unknown(each.term.names):
            message = f"no installed plug-in knows {' and '.join(unknown)}"
            yield Reason(code=ReasonCode.UNKNOWN_NAME, message=message, term=each.term)
    if not alone:
        have = _inventory(layout, found.mask)
        yield Reason(code=ReasonCode.TOGETHER, message=f"each term fits alone; together they need more than {have}")


def _shortage(layout: Layout, term: Term) -> Iterator[Reason]:
    """Yield reasons why there are too few devices for a term: the count, and the rules that exclude devices."""
    named = layout.named(term)
    label = layout.names.label(term)
    everything = (1 << len(layout.devices)) - 1
    instead = f" (it has {_inventory(layout, everything)})" if everything else " and no other device"
    have = _inventory(layout, named, label) if named else f"no {label}{instead}"
    yield Reason(code=ReasonCode.NOT_ENOUGH, message=f"this machine has {have}", term=term, devices=_ids(layout, named))
    if not named:  # with devices of the name, a failed vendor is not the reason
        yield from _failed_vendors(layout, term)
    left = [layout.devices[position] for position in bits(named)]
    for rule in rules(term, layout.inventory):  # each device counts for the first rule that excludes it
        failing = [device for device in left if not rule.passes(device)]
        left = [device for device in left if rule.passes(device)]
        message = rule.explain_failure(failing) if failing or rule.counts else ""
        if message:
            if rule.code is ReasonCode.NOT_FRACTIONAL:
                said = vetoed(layout, term, [layout.positions[failing[0].id]])
                message += f" ({said})" if said else ""
            ids = tuple(device.id for device in failing)
            yield Reason(code=rule.code, message=message, term=term, devices=ids, filter=rule.filter)


def _small_part(empty: Occupancy, wanted: Wanted) -> Reason:
    """Return the reason that this process can hand out less of each device than the term asks of one."""
    label = empty.layout.names.label(wanted.term)
    most = _most_free(empty, wanted.mask, wanted.term)
    message = f"this process itself holds at most {most} of one {label}, and can hand out no more"
    return Reason(code=ReasonCode.PART, message=message, term=wanted.term, devices=_ids(empty.layout, wanted.mask))


def _form(free: Occupancy, wanted: Wanted) -> Iterator[Reason]:
    """Yield reasons why enough devices do not suit: several types, not linked, or refused by the vendor."""
    layout, term, whole = free.layout, wanted.term, free.whole
    groups = [group & whole for groups in wanted.choices for group in groups]
    alike = [group for group in groups if group.bit_count() >= term.count]
    large = [group for each in alike for group in layout.apart(each) if group.bit_count() >= term.count]
    if alike and not large:
        code, fault = ReasonCode.PARTS, "apart: a device is given out, or its parts are"
    elif not large:
        code, fault = ReasonCode.MIXED_TYPES, "of one type (the option 'mixed' accepts several)"
    elif term.linked and not any(layout.topology.best_set(group, term.count, linked=True) for group in large):
        code, fault = ReasonCode.NOT_LINKED, "all linked to each other directly"
    else:
        yield from _vetoes(layout, term, large)
        return
    among = wanted.mask & whole
    message = f"no {term.count} of {_inventory(layout, among)} are {fault}"
    yield Reason(code=code, message=message, term=term, devices=_ids(layout, among))


def _vetoes(layout: Layout, term: Term, groups: Iterable[int]) -> Iterator[Reason]:
    """Yield the vendors' refusals of the best-connected set of each group; equal texts once."""
    refused: dict[str, int] = {}
    for group in groups:
        chosen = layout.topology.best_set(group, term.count, linked=term.linked)
        refused.setdefault(vetoed(layout, term, tuple(bits(chosen))), chosen)
    for text, chosen in refused.items():
        if text:
            ids = _ids(layout, chosen)
            yield Reason(code=ReasonCode.VENDOR_RULE, message=text.rstrip("."), term=term, devices=ids)


def _failed_vendors(layout: Layout, term: Term) -> Iterator[Reason]:
    """Yield failed vendors whose devices may have been meant: failed is not absent.

    If the term names no vendor and no resource of a vendor, every failed vendor may have been meant.
    """
    names = {name.lower() for name in term.names}
    reports = layout.inventory.vendors
    meant = [report for report in reports if names & {report.vendor.lower(), report.resource.lower()}]
    for report in meant or reports:
        if report.state is VendorState.FAILED and report.problem:
            more = f"'anyaccel plugins {report.vendor}' says more"
            message = f"detection of vendor {report.vendor!r} failed: {report.problem.reason.rstrip('.')}; {more}"
            yield Reason(code=ReasonCode.VENDOR_FAILED, message=message, term=term)


def _waiting_behind(plan: RequestPlan, machines: Sequence[Books], ahead: Mapping[str, str]) -> Reason:
    """Return the reason with the earlier requests. Devices are listed for one machine only: ids are unique there."""
    devices = _ids(machines[0].layout, plan.resolved[0].mask) if len(machines) == 1 else ()
    return Reason(
        code=ReasonCode.WAITING_BEHIND,
        message=f"waiting for the same devices in front: {listed(list(ahead.values()))}",
        devices=devices,
        holders=tuple(ahead),
    )


def _reasons_now(books: Books, found: Resolved) -> Iterator[Reason]:
    """Yield reasons why a request that fits the machine is not served now."""
    free = books.occupancy
    alone = [each for each in found.wanted if place(free, [each]) is None]
    for each in alone:
        if not each.term.fraction and (each.mask & free.whole).bit_count() >= each.term.count:
            yield from _form(free, each)
        yield _taken(books, each.mask, each.term)
    if not alone:
        yield _taken(books, found.mask, found.request.terms[0] if len(found.wanted) == 1 else None)


def _taken(books: Books, mask: int, term: Term | None) -> Reason:
    """Return the reason that names the holders of wanted devices: those of one term, or of a whole request."""
    layout, free = books.layout, books.occupancy
    held = [position for position in bits(mask) if free.units[position] < UNITS_PER_DEVICE]
    names = {key: text for position in held for key, text in books.describe_holders(position).items()}
    label = layout.names.label(term) if term else "devices"
    if term and term.fraction:
        start = f"no {label} has {term.quantity} free, the most is {_most_free(free, mask, term)}"
    else:
        partly = sum(free.units[position] > 0 for position in held)
        start = f"{(mask & free.whole).bit_count()} of {mask.bit_count()} {label} free"
        start += f", {partly} in part" if partly else ""
    by = f"; {books.list_holders(names)}" if names else ""
    ids = tuple(layout.devices[position].id for position in held)
    return Reason(code=ReasonCode.TAKEN, message=start + by, term=term, devices=ids, holders=tuple(names))


def _most_free(free: Occupancy, mask: int, term: Term) -> str:
    """Return the most that is free on one of the devices in a bit mask: as memory if the term asks for memory."""
    if term.memory_bytes:
        return f"{_most_memory(free, mask) / (1 << 30):.1f}GiB"
    return format_units(_most_units(free, mask))


def _most_units(free: Occupancy, mask: int) -> int:
    """Return the most units that are free on one of the devices in a bit mask."""
    return max((free.units[at] for at in bits(mask)), default=0)


def _most_memory(free: Occupancy, mask: int) -> int:
    """Return the most memory in bytes that is free on one of the devices in a bit mask; unknown memory counts as 0."""
    sizes = (free.units[at] * (free.layout.devices[at].memory_bytes or 0) // UNITS_PER_DEVICE for at in bits(mask))
    return max(sizes, default=0)


def _ids(layout: Layout, mask: int) -> tuple[str, ...]:
    """Return the ids of the devices in a bit mask."""
    return tuple(layout.devices[position].id for position in bits(mask))


def _inventory(layout: Layout, mask: int, label: str = "") -> str:
    """Count devices: ``2 GPU (2 X1)``, or ``2 X1`` if the label is the type."""
    types = Counter(layout.devices[position].type for position in bits(mask))
    kinds = ", ".join(f"{count} {type_}" for type_, count in types.items())
    if not label or list(types) == [label]:
        return kinds or "no device"
    return f"{mask.bit_count()} {label} ({kinds})"


_TRIES = 64  # alternatives per term and filter: people read the first that fits, and each costs a placement


def nearest(free: Occupancy, request: Request) -> Request | None:
    """Return the nearest request that ``free`` can serve; None when there is none.

    Each term that does not fit alone is changed: a share of an indivisible device becomes one device, a quantity that
    the vendor refuses the next accepted one, else fewer devices. Then quantities go down until the terms fit together.
    """

    def fits(*terms: Term) -> bool:
        return place(free, [want(free.layout, term) for term in terms]) is not None

    terms = []
    for term in request.terms:
        near = next((near for near in _near(free, term) if fits(near)), None)
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


def _near(free: Occupancy, term: Term) -> Iterator[Term]:
    """Yield terms in the order of distance from ``term``: itself, somewhat more, less, then other filters."""
    layout = free.layout
    yield term
    usable = layout.named(term) & layout.usable
    there = [layout.devices[position] for position in bits(usable)]
    filters = asked(term, layout.inventory)
    others = [near for each in filters for near in islice(each.filter.find_near(each, there), _TRIES)]
    if term.fraction:
        if term.memory_bytes:
            yield from _less_memory(free, term)
        else:
            most = _most_units(free, layout.serving(term))
            if 0 < most < term.units:
                yield replace(term, units=most)
            yield from (near for near in others if near.units > term.units)
        yield replace(term, units=UNITS_PER_DEVICE, memory_bytes=0)
    else:
        room = _room(free, term)
        for count in (*range(term.count + 1, room + 1)[:_TRIES], *range(min(term.count - 1, room), 0, -1)[:_TRIES]):
            yield replace(term, units=count * UNITS_PER_DEVICE)
        part = _most_units(free, usable & ~layout.ours)
        if 0 < part < UNITS_PER_DEVICE:
            yield replace(term, units=part)
    yield from others


def _less_memory(free: Occupancy, term: Term) -> Iterator[Term]:
    """Yield the term with the most memory that is free on one device, in whole GiB where there is as much.

    Nothing if no memory is free, or as much as the term asks for.
    """
    most = _most_memory(free, free.layout.serving(replace(term, memory_bytes=1)))
    unit = next((unit for unit in (1 << 30, 1 << 20) if most >= unit), 1)
    if 0 < most < term.memory_bytes:
        yield replace(term, memory_bytes=most // unit * unit)


def _room(free: Occupancy, term: Term) -> int:
    """Return the largest number of devices for a term, without regard to the vendor's rule; an estimate if linked."""
    layout = free.layout
    mask = layout.serving(replace(term, units=UNITS_PER_DEVICE)) & free.whole
    if term.linked:
        return max(((layout.topology.linked[position] & mask).bit_count() + 1 for position in bits(mask)), default=0)
    choices = want(layout, replace(term, units=2 * UNITS_PER_DEVICE)).choices
    groups = ((group & free.whole).bit_count() for choice in choices for group in choice)
    return max(groups, default=min(mask.bit_count(), 1))
