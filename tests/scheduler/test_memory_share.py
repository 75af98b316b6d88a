"""Shares that are asked for by their memory: exact on each device, alike for the scheduler, the ledger and reasons."""

import pytest
from anyaccel.backfill import forecast
from anyaccel.errors import NeverFitsError, NotFreeError, RequestError
from anyaccel.model import UNITS_PER_DEVICE, Extent, Fractional, Health, Term, format_memory, replace
from anyaccel.policy import PLAIN, Holding, Waiting
from anyaccel.scheduler import Choice, Scheduler, parse_request
from anyaccel.text import size
from hypothesis import example, given
from hypothesis import strategies as st
from small_machines import gpus, machine

GIB = 1 << 30
MEMORIES = st.sampled_from([None, 1, 16 * GIB, 24 * GIB, 80 * GIB, 81559 << 20, 141 * GIB])
AMOUNTS = st.one_of(st.integers(1, 200 * GIB), st.integers(1, 160).map(lambda number: number * GIB))


@st.composite
def machines(draw):
    """One to four devices of different memory, some of them indivisible, divided into slots, or broken."""
    found = []
    for index, each in enumerate(gpus(draw(st.integers(1, 4)), links=0)):
        slots = draw(st.sampled_from([1, 1, 4, 8]))
        kind = draw(st.sampled_from([Fractional.SHARED, Fractional.SHARED, Fractional.NO]))
        kind = Fractional.PARTITIONED if slots > 1 and kind else kind
        health = draw(st.sampled_from([Health.HEALTHY, Health.HEALTHY, Health.UNHEALTHY]))
        found.append(
            replace(each, memory_bytes=draw(MEMORIES), fractional=kind, slots=slots, health=health, numa_node=index % 2)
        )
    return machine(found)


def needed(device, amount):
    """Units of a device that have so much memory, or None; told without the code under test."""
    if not device.usable or not device.fractional or not device.memory_bytes or device.memory_bytes < amount:
        return None
    slot = UNITS_PER_DEVICE // device.slots if device.slots > 1 else 1
    return next(
        units
        for units in range(slot, UNITS_PER_DEVICE + 1, slot)
        if units * device.memory_bytes >= amount * UNITS_PER_DEVICE
    )


@given(machines(), AMOUNTS, st.data())
def test_a_share_has_so_much_memory_and_no_more_than_the_grain(inventory, amount, data):
    request = parse_request(f"GPU:{amount}B")
    assert parse_request(str(request)) == request
    scheduler = Scheduler(inventory)
    taken = {}
    for device in inventory.usable:
        units = data.draw(st.sampled_from([0, 0, 2500, 5000, 10_000]))
        if units and device.slots == 1 and device.fractional:
            scheduler.occupy({device.id: Extent(units)}, holder=f"h-{device.id}")
            taken[device.id] = Extent(units)
    able = {device.id: units for device in inventory.devices if (units := needed(device, amount))}
    free = {key for key, units in able.items() if units <= scheduler.free(key)}
    chosen = Choice(inventory, request).choose(taken)
    verdict = scheduler.why(request)
    assert (verdict.ever_fits, verdict.fits_now) == (bool(able), bool(free))
    assert (chosen is not None) == bool(free)
    for near, occupied in ((verdict.nearest, {}), (verdict.nearest_now, taken)):
        assert near is None or Choice(inventory, near).choose(occupied) is not None
    if not free:
        with pytest.raises(NotFreeError if able else NeverFitsError):
            scheduler.allocate(request)
        return
    ((mine,),) = (grant.shares for grant in scheduler.allocate(request).grants)
    ((other,),) = (grant.shares for grant in chosen)
    assert (mine.device.id, mine.units) == (other.device.id, other.units)
    assert mine.device.id in free
    assert mine.units == able[mine.device.id]
    assert mine.memory_bytes >= amount


def test_it_composes():
    large, small = gpus(1), gpus(1, "L4", memory_bytes=24 * GIB)
    inventory = machine([replace(large[0], numa_node=0)], [replace(small[0], numa_node=1)])
    for text, kind in (("GPU:20GiB,numa=1", "L4"), ("H100:20GiB", "H100"), ("L4|H100:30GiB", "H100")):
        (share,) = Scheduler(inventory).allocate(text).shares
        assert share.device.type == kind
    both = Scheduler(inventory).allocate("GPU:20GiB GPU:70GiB")
    assert [share.device.type for share in both.shares] == ["L4", "H100"]


def test_what_is_taken_and_the_nearest_are_said_in_memory():
    scheduler = Scheduler(machine(gpus(1)))
    scheduler.allocate("GPU:50GiB")
    assert str(scheduler.why("GPU:40GiB")) == (
        "GPU:40GiB does not fit now: no GPU has 40GiB free, the most is 30.0GiB; held by a1 (GPU:50GiB).\n"
        "fits now: GPU:30GiB"
    ).replace("a1", next(iter(scheduler.holders("h100-0"))).id)
    never = scheduler.why("GPU:100GiB")
    assert "the largest memory is 80GiB, less than 100GiB" in never.message
    assert str(never.nearest) == "GPU:80GiB"
    odd = Scheduler(machine(gpus(1, memory_bytes=81559 << 20)))
    assert "the largest memory is 79.6GiB, less than 200GiB" in odd.why("GPU:200GiB").message
    assert "the largest memory is 85.5GB, less than mem=200GB" in odd.why("GPU:1,mem=200GB").message
    with pytest.raises(NeverFitsError, match=r"the memory is unknown of acme/0"):
        Scheduler(machine(gpus(1, memory_bytes=None))).allocate("GPU:1GiB")
    with pytest.raises(NeverFitsError, match=r"given out whole only: acme/0"):
        Scheduler(machine(gpus(1, fractional=Fractional.NO))).allocate("GPU:1GiB")


def test_the_vendors_rule_sees_a_share_in_units():
    asked = []
    rule = lambda term, devices: asked.append((term, devices[0].id))  # noqa: E731
    Scheduler(machine(gpus(1)), rule).allocate("GPU:20GiB")
    assert set(asked) == {(Term(names=("GPU",), units=2500, filters=(("mem", "20GiB"),)), "h100-0")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("GPU:20GiB,mem=20GiB", "must stand without 'mem'"),
        ("GPU:0GiB", "must be more than 0"),
        ("GPU:20QiB", "must be a number with a unit of"),
    ],
)
def test_what_makes_no_sense_is_refused(text, words):
    with pytest.raises(RequestError, match=words):
        parse_request(text)
    with pytest.raises(RequestError, match="with 0 units"):
        parse_request(replace(parse_request("GPU"), terms=(Term(names=("GPU",), memory_bytes=GIB),)))


@given(st.integers(1, 1 << 50))
@example(20 * GIB)
@example(1_500_000_000_000)
def test_an_amount_is_written_exactly(amount):
    assert size(format_memory(amount)) == amount


def test_the_policy_knows_what_each_device_would_need():
    """A forecast: the small device is free first, but only the large one has enough left then."""
    choice = Choice(machine(gpus(1), gpus(1, "L4", memory_bytes=24 * GIB)), parse_request("GPU:20GiB"))
    (need,) = choice.needs
    assert (need.units, need.units_on("h100-0"), need.units_on("l4-0")) == (8334, 2500, 8334)
    held = [
        Holding(device="l4-0", units=5000, until=10.0),
        Holding(device="h100-0", units=9000, until=20.0),
    ]
    more = Holding(device="l4-0", units=2000, until=40.0)
    waiting = Waiting(key=1, number=1, since=0.0, needs=(need,), seconds=5.0)
    assert forecast(PLAIN, [waiting], [*held, more], 0.0) == {1: 20.0}
    assert forecast(PLAIN, [waiting], held, 0.0) == {1: 10.0}
