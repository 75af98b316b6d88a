"""The scheduler of several machines: one allocation is of one machine, one line for all."""

import asyncio
import json
import random
from threading import Thread

import anyaccel as aa
import pytest
from anyaccel.errors import NeverFitsError, NotFreeError, UnknownNameError
from anyaccel.model import replace
from anyaccel.scheduler import Fleet, books, parse_request
from anyaccel.scheduler.placement import place
from small_machines import chip_rule, chips, gpus, machine, possible


def fleet(**machines):
    return Fleet({name: machine(*devices) for name, devices in machines.items()}, validate=chip_rule)


def test_machines_are_filled_one_after_the_other_and_an_allocation_says_its_machine():
    both = fleet(one=[gpus(2)], two=[gpus(4)])
    given = [both.allocate(request, note="job") for request in ("GPU:1", "GPU:2", "GPU:0.5", "GPU:0.5", "GPU:2")]
    assert [allocation.machine for allocation in given] == ["one", "two", "one", "one", "two"]
    assert [device.id for device in given[1].devices] == ["h100-0", "h100-1"], "ids are those of the machine"
    assert both.on("one").free("h100-0") == 0
    assert [each.id for each in both.on("two").holders("h100-0")] == [given[1].id]
    both.release(given[0])
    assert both.allocate("GPU:1").machine == "one"
    with pytest.raises(ValueError, match="released before"):
        both.release(given[0])


def test_all_terms_of_a_request_are_served_on_one_machine():
    both = fleet(one=[gpus(1), chips(2)], two=[gpus(2), chips(8)])
    assert both.allocate("GPU:1 TPU:4").machine == "two"
    with pytest.raises(NeverFitsError, match="one: this machine has 1 GPU"):
        both.allocate("GPU:3")


def test_what_is_not_free_and_what_can_never_fit_is_said_of_each_machine():
    some = fleet(**{f"node{number}": [gpus(1)] for number in range(6)})
    held = [some.allocate("GPU", note=f"job {number}") for number in range(6)]
    with pytest.raises(NotFreeError) as busy:
        some.allocate("GPU")
    assert "node0: 0 of 1 GPU free; held by" in str(busy.value)
    assert "(job 3)" in str(busy.value)
    assert "2 more machines likewise" in str(busy.value)
    assert busy.value.verdict.ever_fits
    some.release(held[5])
    assert some.why("GPU").fits_now
    assert some.allocate("GPU").machine == "node5", "asking takes nothing"
    with pytest.raises(NeverFitsError, match=r"node0: this machine has 1 GPU \(1 H100\); 5|node0: .*2 more machines"):
        some.allocate("GPU:2")
    assert str(some.why("GPU:2").nearest) == "GPU:1"
    with pytest.raises(UnknownNameError, match="unknown name 'GPUX'"):
        some.allocate("GPUX")


def test_a_name_that_one_machine_alone_knows():
    both = fleet(one=[gpus(1)], two=[gpus(1, "A100")])
    assert both.allocate("A100").machine == "two"
    ticket = both.submit("A100", note="second")
    both.update("three", machine(gpus(1, "A100"), chips(1)))
    assert ticket.allocation.machine == "three"
    assert both.allocate("TPU").machine == "three"


def test_who_came_first_is_first_also_where_machines_differ():
    both = fleet(one=[gpus(2)], two=[gpus(1), chips(1)])
    first, second = both.allocate("GPU:2"), both.allocate("GPU:1")
    big = both.submit("GPU:2", note="big")
    small = both.submit("GPU:1", note="small")
    urgent = both.submit("GPU:1", note="urgent", priority=1)
    tpu = both.submit("TPU:1", note="other devices")
    assert tpu.allocation.machine == "two", "it competes with no request"
    assert [ticket.place for ticket in (urgent, big, small, tpu)] == [1, 2, 3, 0]
    assert "in front: t3 (urgent), t1 (big)" in small.why().message
    both.release(second)
    assert urgent.allocation.machine == "two"
    both.release(urgent.allocation)
    assert small.allocation is None, "the big one came first, and may want a device of either machine"
    both.release(first)
    assert (big.allocation.machine, small.allocation.machine) == ("one", "two")
    assert both.pending() == ()


def test_waiting_on_a_loop_ends_in_time_or_by_cancelling():
    both = fleet(one=[gpus(1)], two=[gpus(1)])
    held = [both.allocate("GPU"), both.allocate("GPU")]

    async def main():
        with pytest.raises(NotFreeError, match=r"not free within 0\.01 s: .*two: 0 of 1"):
            await both.acquire("GPU", timeout=0.01)
        task = asyncio.create_task(both.acquire("GPU"))
        while not both.pending():  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert both.pending() == ()
        task = asyncio.create_task(both.acquire("GPU", note="served"))
        while not both.pending():  # noqa: ASYNC110
            await asyncio.sleep(0)
        Thread(target=both.release, args=(held[1],)).start()
        return await task

    assert asyncio.run(main()).machine == "two"


def test_a_machine_that_is_gone_keeps_what_is_held_until_it_is_released():
    both = fleet(one=[gpus(1)], two=[gpus(1)])
    held = [both.allocate("GPU"), both.allocate("GPU")]
    ticket = both.submit("GPU", note="waits")
    both.update("two", None)
    assert set(both.machines) == {"one"}
    assert len(both.on("two").holders("h100-0")) == 1
    both.release(held[1])
    assert ticket.allocation is None, "that machine is gone"
    with pytest.raises(KeyError):
        both.on("two")
    both.update("one", None)
    assert both.pending() == (ticket,)
    both.update("three", machine(gpus(2)))
    assert ticket.allocation.machine == "three"
    both.release(held[0])
    assert both.allocate("GPU").machine == "three"


def test_a_device_lost_and_one_added_on_one_of_the_machines():
    both = fleet(one=[gpus(2)], two=[chips(1)])
    held = both.allocate("GPU:2")
    both.update("one", machine(gpus(1)))
    with pytest.raises(NeverFitsError):
        both.allocate("GPU:2")
    ticket = both.submit("GPU:2", infeasible="pend")
    both.update("one", machine(gpus(4)))
    assert sorted(device.id for device in ticket.allocation.devices) == ["h100-2", "h100-3"]
    both.release(held)
    assert len(both.allocate("GPU:2").devices) == 2


def test_a_name_stays_known_when_the_only_machine_with_it_is_replaced():
    some = fleet(one=[gpus(1, "A100")])
    ticket = some.submit("A100:2", infeasible="pend")
    some.update("one", None)
    some.update("two", machine(gpus(1)))
    assert some.pending() == (ticket,)
    some.update("three", machine(gpus(2, "A100")))
    assert ticket.allocation.machine == "three"


def test_without_machines_nothing_fits_and_the_cpu_does():
    nothing = Fleet({})
    with pytest.raises(NeverFitsError, match=r"^GPU:1 can never fit: there is no machine\.$"):
        nothing.allocate("GPU", hosts=2)
    held = nothing.allocate("GPU,else=cpu")
    assert (held.cpu, held.machine) == (True, "")
    nothing.release(held)


@pytest.mark.parametrize("given", ["sim:A1:2", None, {"a": "sim:A1:2"}])
def test_what_is_no_inventory_is_refused(given):
    with pytest.raises(aa.UsageError, match=r"inventory must be what anyaccel.detect\(\) returns, or a"):
        aa.open_scheduler(given)


def test_the_public_name_takes_machines_by_name_and_documents_say_the_machine():
    scheduler = aa.open_scheduler({"one": aa.detect(declare={"GPU": 1}), "two": aa.detect(declare={"GPU": 2})})
    allocation = scheduler.allocate("declared:2")
    again = aa.from_json(json.loads(json.dumps(aa.to_json(allocation))))
    assert (again, again.machine) == (allocation, "two")
    inventories = {name: aa.to_json(inventory) for name, inventory in scheduler.machines.items()}
    assert (
        aa.open_scheduler({name: aa.from_json(each) for name, each in inventories.items()}).machines
        == scheduler.machines
    )
    assert aa.worker_environment(allocation, scheduler.machines[allocation.machine]).allocation == allocation
    with pytest.raises(aa.UsageError, match="leases are those of one machine"):
        aa.open_scheduler(scheduler.machines, shared=True)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_given_twice_and_nothing_is_refused_that_one_machine_could_serve(seed):
    """Against a brute-force look at each machine, where no request waits."""
    chance = random.Random(seed)
    machines = {f"m{number}": machine(gpus(chance.randint(0, 3)), chips(chance.choice((0, 2)))) for number in range(3)}
    both, held = Fleet(machines, validate=chip_rule, known=("GPU", "TPU", "H100")), []
    for _ in range(60):
        if held and chance.random() < 0.4:
            both.release(held.pop(chance.randrange(len(held))))
            continue
        request = chance.choice(("GPU:1", "GPU:2", "GPU:0.5", "GPU:0.3,mem=20GiB", "TPU:2", "GPU TPU:1", "H100|TPU:1"))
        free = {
            name: {device.id: both.on(name).free(device.id) for device in each.devices}
            for name, each in machines.items()
        }
        fits = [
            name
            for name, each in machines.items()
            if possible(each.devices, free[name], parse_request(request), chip_rule)
        ]
        try:
            allocation = both.allocate(request)
        except (NotFreeError, NeverFitsError):
            assert not fits
            continue
        assert allocation.machine == fits[0]
        for share in allocation.shares:
            free[allocation.machine][share.device.id] -= share.units
            assert free[allocation.machine][share.device.id] >= 0
        held.append(allocation)


def test_a_decision_looks_at_no_machine_that_it_does_not_touch(monkeypatch):
    asked = []
    monkeypatch.setattr(books, "place", lambda *given: asked.append(given) or place(*given))
    many = Fleet({f"m{number}": machine(gpus(2)) for number in range(300)})
    held = [many.allocate("GPU:2") for _ in range(300)]
    assert len(asked) == 300 + 299, "each refuses once"
    asked.clear()
    for _ in range(1000):
        many.release(held.pop())
        held.append(many.allocate("GPU:2"))
        with pytest.raises(NotFreeError):
            many.allocate("GPU:2")
    assert len(asked) <= 2 * 1000
    assert replace(held[0], machine="").machine == ""
