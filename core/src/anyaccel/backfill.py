"""Backfill: which waiting request may pass earlier ones, and when requests start, by the queue policy.

A request with a time limit may pass earlier requests that cannot start yet, if the request ends before the earliest
start of each of them, plus a bound. Leases that passed an earlier request after its arrival do not move this earliest
start. So the requests that pass one request delay it together by no more than the bound, compared with a start in turn
after leases that last until their limits. A lease without a limit may end at any moment: then the bound counts from the
arrival of the request.

As in :mod:`anyaccel.policy`, every function is pure, and times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from anyaccel.model import UNITS_PER_DEVICE
from anyaccel.policy import FOREVER, Block, Holding, Need, Policy, Waiting, sum_usage


def may_pass(policy: Policy, one: Waiting, ahead: Sequence[Waiting], held: Sequence[Holding], now: float) -> bool:
    """Return whether a request may be served before earlier requests that cannot start yet.

    Without a time limit, the request may only pass if ``ahead`` is empty.

    Args:
        policy: The queue policy.
        one: The request that would pass.
        ahead: Earlier requests that block this one, in the order of service; see
            :meth:`anyaccel.policy.Policy.keeps_waiting`.
        held: The active leases.
        now: The time.
    """
    if one.seconds is None:
        return not ahead
    return now + one.seconds <= latest_end(policy, one, ahead, held, now)


def latest_end(policy: Policy, one: Waiting, ahead: Sequence[Waiting], held: Sequence[Holding], now: float) -> float:
    """Return the time by which a request must end to be served before earlier requests; infinity if none is ahead.

    The arguments are those of :func:`may_pass`. The time limit of the request does not count.
    """
    starts = earliest_starts(policy.blocks, ahead, held, now)
    ends = [start for other, start in zip(ahead, starts, strict=True) if policy.competes(one, other, now)]
    used = sum_usage(held)
    scarce = (other for other in ahead if policy.share_scarce_total(other, one, used))
    ends += [_room_since(policy, other, held) for other in scarce]
    return min(ends, default=FOREVER) + policy.backfill


def _room_since(policy: Policy, one: Waiting, held: Iterable[Holding]) -> float:
    """Return the earliest time when the limits of a request's user and group have room for it; not before its arrival.

    As for devices, leases without a time limit and leases that passed the request do not count.
    """
    terms = [
        (each.until, each.units, each.user)
        for each in held
        if each.until is not None and not each.inner and each.delays(one)
    ]
    return max(one.since, _time_of_room(policy, one, terms))


def earliest_starts(
    blocks: Sequence[Block], waiting: Sequence[Waiting], held: Sequence[Holding], now: float = -FOREVER
) -> list[float]:
    """Return the earliest start in turn of each waiting request, in the order of ``waiting``.

    A start is never before the arrival. Leases without a time limit may end at any moment, and so do not count; nor
    do leases that passed the request.

    Args:
        blocks: Drained and reserved devices.
        waiting: The waiting requests, in the order of service.
        held: The active leases.
        now: The time, from which drains and reservations count.
    """
    found: list[float] = []
    for position, one in enumerate(waiting):
        # In turn: with room for this request alone, it still waits for earlier requests for a common device.
        before = [start for other, start in zip(waiting[:position], found, strict=True) if one.competes(other)]
        found.append(max([_earliest_alone(one, held, blocks, now), *before]))
    return found


def forecast(
    policy: Policy, waiting: Iterable[Waiting], held: Sequence[Holding], now: float
) -> dict[Hashable, float | None]:
    """Forecast the starts of waiting requests, by key, if every lease lasts until its time limit; None for unknown.

    A start is not before the starts of earlier requests that block the request, nor before the limits of the user
    and group have room. Without needs, over a limit that lasts, or behind a lease or request without a time limit,
    a start is unknown. A request within a running reservation for its user may start before its forecast.

    Args:
        policy: The queue policy.
        waiting: The waiting requests, in the order of service.
        held: The active leases.
        now: The time.
    """
    busy: dict[Hashable, list[tuple[float, int]]] = {}
    terms: list[tuple[float, int, int | None]] = []  # end, units and user: what counts for limits
    for each in held:
        end = FOREVER if each.until is None else max(each.until, now)
        busy.setdefault(each.device, []).append((end, each.units))
        if not each.inner:
            terms.append((end, each.units, each.user))
    used = sum_usage(held)
    starts: dict[Hashable, float | None] = {}
    passed: list[tuple[Waiting, float]] = []
    # In the order of service: what an earlier request will hold counts for each later one. A request over a limit
    # blocks no request that is not, so it comes behind.
    for one in sorted(waiting, key=lambda each: policy.limited(each, used)):
        own = [_find_time(need, busy, one, policy.blocks, now) for need in one.needs] or [FOREVER]
        before = (begun for other, begun in passed if policy.competes(one, other, now))
        start = max([now, _time_of_room(policy, one, terms), *own, *before])
        passed.append((one, start))
        starts[one.key] = None if start == FOREVER else start
        end = FOREVER if one.seconds is None else start + one.seconds
        terms.append((end, one.units, one.user))
        for need in one.needs:
            for _, device in _soonest(need, busy, one, policy.blocks, now)[: need.count]:
                left = [(until, units) for until, units in busy.get(device, ()) if until > start]
                busy[device] = [*left, (end, need.units_on(device))]
    return starts


def _time_of_room(policy: Policy, one: Waiting, terms: Iterable[tuple[float, int, int | None]]) -> float:
    """Return the time when the limits of a request's user and group have room for it.

    Minus infinity for now, infinity for a limit that lasts.

    Args:
        policy: The queue policy.
        one: The request.
        terms: End, units and user of each lease, also of requests that will be served before.
    """
    if policy.bars(one):
        return FOREVER
    found, limits, group = -FOREVER, policy.limits_of(one.user), policy.total_group(one.user)
    if one.inner:
        return found
    if limits.devices is not None:
        own = [(end, units) for end, units, user in terms if user == one.user]
        found = _free_at(own, one.units, limits.devices * UNITS_PER_DEVICE)
    if group:
        of_group = [(end, units) for end, units, user in terms if policy.total_group(user) == group]
        most = (policy.groups[group].total or 0) * UNITS_PER_DEVICE
        found = max(found, _free_at(of_group, one.units, most))
    return found


def _earliest_alone(one: Waiting, held: Iterable[Holding], blocks: Sequence[Block], now: float) -> float:
    """Return the earliest start of a request without other requests, and without leases that passed the request.

    Not before the arrival. If several machines are needed, the start is that of the last of them.
    """
    before: dict[Hashable, list[tuple[float, int]]] = {}
    for each in held:
        if each.until is not None and each.delays(one):
            before.setdefault(each.device, []).append((each.until, each.units))
    starts = sorted(
        max([one.since, *(_find_time(need, before, one, blocks, now) for need in needs)])
        for needs in one.sites or [one.needs]
    )
    return starts[one.hosts - 1]  # the last of the machines that are needed


def _find_time(
    need: Need, busy: Mapping[Hashable, Sequence[tuple[float, int]]], one: Waiting, blocks: Sequence[Block], now: float
) -> float:
    """Return the time when enough devices have room for a need of a request, and are not withheld from it.

    Minus infinity if there is room already, or if the need lists too few devices.
    """
    times = _soonest(need, busy, one, blocks, now)
    # The count-th device in time: the others are free by then.
    # A need that lists too few devices, as from another version, has an unknown start: so no request may pass it.
    return times[need.count - 1][0] if 0 < need.count <= len(times) else -FOREVER


def _soonest(
    need: Need, busy: Mapping[Hashable, Sequence[tuple[float, int]]], one: Waiting, blocks: Sequence[Block], now: float
) -> list[tuple[float, Hashable]]:
    """Return the devices of a need with the time from which each is free for a request, soonest first."""
    times = (
        (_open_at(device, _free_at(busy.get(device, ()), need.units_on(device)), one, blocks, now), device)
        for device in need.among
    )
    return sorted(times, key=lambda each: (each[0], str(each[1])))  # in one order in every process


def _open_at(device: Hashable, free: float, one: Waiting, blocks: Sequence[Block], now: float) -> float:
    """Return the first time from ``free`` on at which a device is not withheld from a request.

    Return ``free`` itself, even in the past, if the device is not withheld at ``now`` or ``free``, the later of both.
    """
    start = max(free, now)
    # In the order of their starts: a request that moves behind one block may meet the next.
    for block in sorted((each for each in blocks if device in each.devices), key=lambda each: each.begin):
        if block.meets(one, start):
            start = block.end
    return start if start > max(free, now) else free


def _free_at(busy: Sequence[tuple[float, int]], units: int, most: float = UNITS_PER_DEVICE) -> float:
    """Return the time of enough room for some units on a device; minus infinity if there is room already.

    Args:
        busy: End and units of each lease of the device.
        units: The needed units.
        most: All units: of the device, or of a group's total.
    """
    taken, free = sum(each for _, each in busy), -FOREVER
    for end, each in sorted(busy):
        if taken + units <= most:
            break
        taken, free = taken - each, end
    return free
