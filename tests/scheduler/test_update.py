"""A machine that changes while devices are held and others wait."""

import json
from functools import partial
from itertools import count

import pytest
from anyaccel import from_json, to_json
from anyaccel.errors import NotFreeError
from anyaccel.model import Extent, Fractional, Health, replace
from anyaccel.policy import Limits, Policy
from anyaccel.scheduler import Fleet, ReasonCode, Scheduler, allocator
from hypothesis import given, settings
from hypothesis import strategies as st
from small_machines import chip_rule, chips, gpus, machine

WHOLE = 10_000


def test_what_is_held_of_a_lost_device_counts_until_it_is_released():
    one, two = gpus(2)
    scheduler = Scheduler(machine([one, two]))
    held = scheduler.allocate("GPU", note="ada's")
    kept = scheduler.allocate("GPU")
    assert held.devices == (one,)
    scheduler.update(machine([two]))
    assert scheduler.inventory == machine([two])
    assert scheduler.holders(one.id) == (held,)
    assert (scheduler.free(one.id), scheduler.free(two.id)) == (0, 0)
    assert scheduler.why("GPU:2").ever_fits is False
    scheduler.update(machine([one, two]))  # it is back, and still his
    assert scheduler.free(one.id) == 0
    assert scheduler.holders(one.id) == (held,)
    scheduler.update(machine([two]))
    scheduler.release(held)
    scheduler.update(machine([one, two]))
    assert (scheduler.free(one.id), scheduler.free(two.id)) == (WHOLE, 0)
    scheduler.release(kept)
    assert scheduler.free(two.id) == WHOLE


def test_who_waits_is_served_in_order_by_devices_that_come():
    told = []
    scheduler = Scheduler(machine(gpus(1)))
    scheduler.allocate("GPU")
    first = scheduler.submit("GPU", on_placed=told.append)
    huge = scheduler.submit("GPU:3", infeasible="pend", on_placed=told.append)
    last = scheduler.submit("GPU", on_placed=told.append)
    assert scheduler.pending() == (first, last, huge)
    scheduler.update(machine(gpus(2)))
    assert told == [first]
    scheduler.update(machine(gpus(4)))  # the huge one fits now, came before the last and needs what first holds
    assert told == [first]
    assert scheduler.pending() == (huge, last)
    scheduler.release(first.allocation)
    assert told == [first, huge]


def test_who_can_never_be_served_any_more_waits_for_the_device_to_come_back():
    h100, a100 = gpus(1), gpus(1, "A100")
    scheduler = Scheduler(machine(h100, a100))
    held = scheduler.allocate("A100")
    ticket = scheduler.submit("A100")
    fallback = scheduler.submit("A100,else=cpu")
    scheduler.update(machine(h100))
    assert ticket.why().ever_fits is False
    assert fallback.allocation.cpu
    assert scheduler.submit("GPU").allocation.devices == h100  # no request in the way
    scheduler.release(held)
    assert ticket.allocation is None
    scheduler.update(machine(h100, a100))
    assert ticket.allocation.devices == a100


def test_a_broken_device_is_told_as_such_and_serves_again_when_it_is_repaired():
    one, two = gpus(2)
    scheduler = Scheduler(machine([one, two]))
    held = scheduler.allocate("GPU:0.5")
    broken = replace(one, health=Health.UNHEALTHY, health_reason="it fell off the bus")
    scheduler.update(machine([broken, two]))
    assert scheduler.free(one.id) == 0
    ticket = scheduler.submit("GPU:2", infeasible="pend")
    assert ReasonCode.UNHEALTHY in {reason.code for reason in ticket.why().reasons}
    scheduler.update(machine([one, two]))
    assert scheduler.free(one.id) == WHOLE // 2
    scheduler.release(held)
    assert ticket.allocation.devices == (one, two)


def test_a_whole_that_is_held_keeps_the_parts_into_which_it_was_divided():
    (whole,) = gpus(1)
    parts = tuple(replace(part, id=f"part-{part.index}", parent=whole.id) for part in gpus(2, "MIG"))
    scheduler = Scheduler(machine([whole]))
    held = scheduler.allocate("GPU")
    scheduler.update(machine(parts))
    assert [scheduler.free(part.id) for part in parts] == [0, 0]
    ticket = scheduler.submit("MIG:2")
    scheduler.release(held)
    assert ticket.allocation.devices == parts


def test_a_held_device_that_gets_other_slots_counts_as_taken_whole():
    (device,) = gpus(1, fractional=Fractional.PARTITIONED)
    scheduler = Scheduler(machine([replace(device, slots=4)]))
    quarter = scheduler.allocate("GPU:0.25")
    assert quarter.shares[0].slots == (0,)
    scheduler.update(machine([replace(device, slots=8)]))
    assert scheduler.free(device.id) == 0
    scheduler.release(quarter)
    assert scheduler.free(device.id) == 10_000


def test_what_is_held_beyond_a_device_that_shrank_is_free_for_no_request():
    (device,) = gpus(1)
    scheduler = Scheduler(machine([device]))
    first, second = scheduler.allocate("GPU:0.5"), scheduler.allocate("GPU:0.5")
    scheduler.update(machine([replace(device, units=5_000)]))
    assert scheduler.free(device.id) == 0
    scheduler.release(first)
    assert scheduler.free(device.id) == 0
    scheduler.release(second)
    assert scheduler.free(device.id) == 5_000


def test_a_machine_with_two_devices_of_one_id_is_refused_and_nothing_has_changed():
    one, two = gpus(2)
    twins = machine([one, two, one])
    scheduler, fleet = Scheduler(machine([one, two])), Fleet({"a": machine([one, two])})
    for decides, update in ((scheduler, scheduler.update), (fleet, partial(fleet.update, "a"))):
        held = decides.allocate("GPU")
        with pytest.raises(ValueError, match=r"devices of a machine must have ids of their own \(got 'h100-0' 2 times"):
            update(twins)
        decides.release(held)
        assert len(decides.allocate("GPU:2").devices) == 2
    with pytest.raises(ValueError, match="ids of their own"):
        Scheduler(twins)


def test_what_others_hold_has_an_identity_of_its_own():
    one, two = gpus(2)
    scheduler = Scheduler(machine([one, two]))
    counted = scheduler.occupy({one.id: Extent()}, holder="container")
    with pytest.raises(ValueError, match=r"holder must be an identity under which nothing is held \(got 'container'"):
        scheduler.occupy({two.id: Extent()}, holder="container")
    scheduler.release(counted)
    given = scheduler.allocate("GPU")
    number = int(given.id.removeprefix("a"))
    theirs = scheduler.occupy({two.id: Extent()}, holder=f"a{number + 1}")  # as another process calls its own
    scheduler.release(given)
    mine = scheduler.allocate("GPU")
    for allocation in (mine, theirs):
        scheduler.release(allocation)
    assert len(scheduler.allocate("GPU:2").devices) == 2


def restarted(allocation):
    return from_json(json.loads(json.dumps(to_json(allocation))))


def test_after_a_restart_allocations_are_held_as_they_were():
    before = Fleet({"one": machine(gpus(2)), "two": machine(gpus(2))})
    gang = before.allocate("GPU:1", hosts=2)
    half = before.allocate("GPU:0.5", user=7)
    cpu = before.allocate("GPU:9,else=cpu")
    policy = Policy(limits=Limits(devices=3))
    after = Fleet(before.machines, policy=policy, clock=lambda: 5.0)
    for each in (gang, half, cpu):
        after.restore(restarted(each), note=f"job {each.id}", user=7, time=-1)
    assert [after.on("one").free(device.id) for device in gpus(2)] == [0, 5_000]
    assert after.on("two").holders("h100-0") == (gang.members[1],)
    verdict = after.why("GPU:2")
    assert f"held by {gang.members[0].id} (job {gang.id}), {half.id} (job {half.id})" in verdict.message
    with pytest.raises(NotFreeError, match=r"user 7 holds 2.5 devices, and 1 more is over"):
        after.allocate("GPU", user=7)
    with pytest.raises(ValueError, match="is held already"):
        after.restore(half)
    after.update("two", None)  # the machine did not survive the restart
    after.release(restarted(gang))
    assert [after.on("one").free(device.id) for device in gpus(2)] == [WHOLE, 5_000]
    with pytest.raises(KeyError, match="two"):
        after.on("two")
    after.release(half)
    after.release(cpu)


def test_a_new_allocation_gets_no_identity_of_a_restored_one(monkeypatch):
    before = Fleet({"one": machine(gpus(2)), "two": machine(gpus(2))})
    gang = before.allocate("GPU:1", hosts=2)
    monkeypatch.setattr(allocator, "_ALLOCATIONS", count(1))  # as in the new process
    after = Fleet(before.machines)
    after.restore(gang)
    given = [after.allocate("GPU"), after.allocate("GPU")]
    assert not {each.id for each in given} & {gang.id, *(member.id for member in gang.members)}
    after.release(gang)
    assert [after.on(name).free("h100-0") for name in ("one", "two")] == [WHOLE, WHOLE]


def test_what_cannot_be_restored_takes_nothing():
    one, two = gpus(2)
    before = Scheduler(machine([one, two]))
    pair = before.allocate("GPU:2")
    after = Scheduler(machine([one]))
    with pytest.raises(KeyError, match=two.id):
        after.restore(pair)
    assert after.free(one.id) == WHOLE
    with pytest.raises(KeyError, match="node"):
        after.restore(Fleet({"node": machine([one])}).allocate("GPU"))
    after.update(machine([one, two]))
    other = after.allocate("GPU:0.5")
    after.restore(restarted(pair))  # of what was given out since, the rest
    assert (after.free(one.id), after.free(two.id)) == (0, 0)
    after.release(other)
    assert (after.free(one.id), after.free(two.id)) == (0, 0)
    after.release(pair)
    assert (after.free(one.id), after.free(two.id)) == (WHOLE, WHOLE)


MACHINES = [
    machine(gpus(2, links=1), chips(4)),
    machine(gpus(4, links=1), chips(2)),
    machine(gpus(3), gpus(2, "A100")),
    machine([replace(device, health=Health.UNHEALTHY) for device in gpus(1)], gpus(1, "A100"), chips(4)),
    machine(gpus(2, fractional=Fractional.NO)),
    machine(),
]
REQUESTS = ("GPU", "GPU:2", "GPU:0.4", "GPU:0.7", "A100|H100", "TPU", "TPU:2", "GPU:0.5 TPU", "A100", "GPU:2,linked")
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from(REQUESTS), st.integers(0, 2)),
    st.tuples(st.just("release"), st.integers(0, 20), st.none()),
    st.tuples(st.just("cancel"), st.integers(0, 20), st.none()),
    st.tuples(st.just("update"), st.sampled_from(MACHINES), st.none()),
)
KNOWN = ("GPU", "TPU", "H100", "A100")


@given(st.sampled_from(MACHINES), st.lists(STEPS, max_size=25), st.sampled_from(MACHINES))
@settings(deadline=None)
def test_after_an_update_it_decides_as_a_fresh_scheduler_does(first, steps, last):
    scheduler = Scheduler(first, chip_rule, KNOWN)
    tickets = []
    for step, what, priority in [*steps, ("update", last, None)]:
        held = [ticket for ticket in tickets if ticket.allocation]
        waiting = [ticket for ticket in tickets if not ticket.allocation and not ticket.cancelled]
        if step == "submit":
            tickets.append(scheduler.submit(what, priority=priority, infeasible="pend"))
        elif step == "update":
            scheduler.update(what)
            check_against_a_fresh_one(scheduler, held, waiting)
        elif step == "release" and held:
            ticket = held[what % len(held)]
            scheduler.release(ticket.allocation)
            tickets.remove(ticket)
        elif step == "cancel" and waiting:
            waiting[what % len(waiting)].cancel()
    for ticket in tickets:
        ticket.cancel()
    for ticket in tickets:
        if ticket.allocation:
            scheduler.release(ticket.allocation)
    assert all(scheduler.free(each.id) == (WHOLE if each.usable else 0) for each in last.devices)


def check_against_a_fresh_one(scheduler, held, waiting):
    """One that was told what is held, and then the requests that waited, in the order of service."""
    inventory = scheduler.inventory
    fresh = Scheduler(inventory, chip_rule, KNOWN)
    there = {device.id for device in inventory.devices}
    for ticket in held:
        if all(device.id in there for device in ticket.allocation.devices):
            fresh.restore(restarted(ticket.allocation))
            continue
        kept = {key: Extent(share.units) for key, share in ticket.allocation.by_device.items() if key in there}
        fresh.occupy(kept, holder=ticket.allocation.id)
    for ticket in sorted(waiting, key=lambda each: (-each.priority, each.number)):
        twin = fresh.submit(ticket.request, priority=ticket.priority, infeasible="pend")
        assert (twin.allocation is None) == (ticket.allocation is None), ticket
        if twin.allocation is not None:
            assert twin.allocation.devices == ticket.allocation.devices
    for device in inventory.devices:
        assert scheduler.free(device.id) == fresh.free(device.id)
    assert [str(each.request) for each in scheduler.pending() if each.plan.ever_fits] == [
        str(each.request) for each in fresh.pending() if each.plan.ever_fits
    ]
