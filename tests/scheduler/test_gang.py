"""Gangs: one request on several machines of a fleet, by all at once or by none."""

import asyncio
import json

import anyaccel
import pytest
from anyaccel.errors import NeverFitsError, NotFreeError, UsageError
from anyaccel.model import Extent, Gang
from anyaccel.policy import Limits, Policy
from anyaccel.scheduler import Fleet, ReasonCode, Scheduler, parse_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lengths import length
from small_machines import chip_rule, chips, gpus, machine, possible


def fleet(**machines):
    return Fleet({name: machine(*devices) for name, devices in machines.items()}, validate=chip_rule)


def where(allocation):
    return [member.machine for member in allocation.members]


def test_a_gang_gets_all_that_it_asks_for_on_each_machine_and_gives_it_back_as_a_whole():
    some = fleet(one=[gpus(2)], two=[gpus(1)], three=[gpus(4)])
    gang = some.allocate("GPU:2", hosts=2, note="job")
    assert isinstance(gang, Gang)
    assert where(gang) == ["one", "three"]
    assert [len(member.devices) for member in gang.members] == [2, 2]
    assert (len(gang.devices), gang.cpu) == (4, False)
    assert [holder.id for holder in some.on("three").holders("h100-0")] == [gang.members[1].id]
    with pytest.raises(ValueError, match="a gang is released as a whole"):
        some.release(gang.members[0])
    some.release(gang)
    with pytest.raises(ValueError, match="is not held"):
        some.release(gang)
    assert [some.on(name).free("h100-0") for name in ("one", "two", "three")] == [10_000] * 3
    alone = some.allocate("GPU:2")
    assert alone.members == (alone,), "who works member by member need not tell the two apart"


def test_a_gang_that_cannot_have_all_has_nothing():
    some = fleet(one=[gpus(2)], two=[gpus(2)], three=[gpus(2)])
    held = some.allocate("GPU:1", hosts=2, note="small")
    with pytest.raises(NotFreeError) as busy:
        some.allocate("GPU:2", hosts=2)
    assert busy.value.verdict.reasons[0].code is ReasonCode.HOSTS
    assert str(busy.value).startswith(
        "GPU:2 does not fit now: at most 1 of 3 machines can serve it now, and it is to be on 2; one: 1 of 2 GPU free"
    )
    assert "(small)" in str(busy.value)
    assert some.on("three").free("h100-0") == 10_000
    some.release(held)
    assert some.why("GPU:2", hosts=3).fits_now


def test_a_gang_that_never_fits_is_told_at_once_with_the_number_that_would():
    some = fleet(one=[gpus(2)], two=[gpus(1)], three=[gpus(2), chips(2)])
    with pytest.raises(NeverFitsError) as never:
        some.submit("GPU:2", hosts=3)
    assert str(never.value) == (
        "GPU:2 can never fit: 2 of 3 machines can ever serve it, and it is to be on 3; two: this machine has 1 GPU "
        "(1 H100)."
    )
    assert never.value.hint == "ask for 2 hosts"
    assert (never.value.verdict.nearest, never.value.verdict.nearest_now) == (None, None)
    ticket = some.submit("GPU:2", hosts=3, infeasible="pend")
    assert some.allocate("GPU:2", hosts=2), "it stands in no request's way"
    assert [(each.units, each.largest, each.requests) for each in some.demand()] == [(60_000, 20_000, 1)]
    some.update("four", machine(gpus(2)))
    some.update("five", machine(gpus(2)))
    assert ticket.allocation is None
    some.update("six", machine(gpus(2)))
    assert where(ticket.allocation) == ["four", "five", "six"]


@pytest.mark.parametrize("hosts", [0, -1, 1.5, True, "2", None])
def test_hosts_are_a_number_of_machines(hosts):
    with pytest.raises(UsageError, match=r"hosts must be a whole number, 1 or more \(got"):
        fleet(one=[gpus(1)]).submit("GPU", hosts=hosts)


def test_one_machine_has_gangs_of_one():
    scheduler = Scheduler(machine(gpus(2)))
    assert len(scheduler.allocate("GPU", hosts=1).members) == 1
    with pytest.raises(NeverFitsError, match="1 of 1 machines can ever serve it, and it is to be on 2"):
        scheduler.allocate("GPU", hosts=2)
    assert scheduler.allocate("GPU,else=cpu", hosts=2).cpu


def test_small_requests_for_the_same_devices_do_not_overtake_a_gang():
    some = fleet(one=[gpus(2)], two=[gpus(2)], three=[chips(1)])
    held = [some.allocate("GPU") for _ in range(4)]
    told = []
    gang = some.submit("GPU:2", hosts=2, note="gang", on_placed=told.append)
    small = [some.submit("GPU") for _ in range(3)]
    urgent = some.submit("GPU", priority=1)
    assert some.allocate("TPU").machine == "three", "it competes with no request"
    assert (gang.place, small[0].place) == (2, 3)
    assert "in front: t5 (urgent)" not in gang.why().message
    some.release(held.pop())
    assert urgent.allocation
    for each in held:
        some.release(each)
    assert gang.allocation is None, "one device is still held"
    with pytest.raises(NotFreeError, match=r"in front: t1 \(gang\)"):
        some.allocate("GPU:0.5")
    some.release(urgent.allocation)
    assert told == [gang]
    assert where(gang.allocation) == ["one", "two"]
    assert not any(ticket.allocation for ticket in small)
    some.release(gang.allocation)
    assert all(ticket.allocation for ticket in small)


def test_a_gang_that_is_cancelled_makes_room_for_those_behind():
    some = fleet(one=[gpus(1)], two=[gpus(1)])
    some.allocate("GPU")
    gang, small = some.submit("GPU", hosts=2), some.submit("GPU")
    assert gang.cancel()
    assert small.allocation.machine == "two"
    assert not gang.cancel()
    some.update("two", None)
    some.update("three", machine(gpus(1)))
    assert gang.why().ever_fits, "what is said of it later is said of the machines as they are"


def test_a_task_that_waits_for_a_gang_ends_in_time_or_by_cancelling_and_holds_nothing():
    some = fleet(one=[gpus(1)], two=[gpus(1)])
    held = some.allocate("GPU")

    async def main():
        with pytest.raises(NotFreeError, match=r"not free within 0\.01 s: .*at most 1 of 2 machines can serve it now"):
            await some.acquire("GPU", hosts=2, timeout=0.01)
        task = asyncio.create_task(some.acquire("GPU", hosts=2))
        await asyncio.sleep(0)
        some.release(held)  # the task has not run since
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await some.acquire("GPU", hosts=2)

    gang = asyncio.run(main())
    assert where(gang) == ["one", "two"]


def test_a_machine_that_is_lost_while_a_gang_waits_and_one_that_comes():
    some = fleet(one=[gpus(2)], two=[gpus(2)])
    held = some.allocate("GPU")
    gang, cpu = some.submit("GPU:2", hosts=2), some.submit("GPU:2,else=cpu", hosts=2)
    some.update("two", None)
    assert gang.allocation is None
    assert cpu.allocation.cpu
    verdict = gang.why()
    assert (verdict.ever_fits, verdict.hint) == (False, "ask for 1 host")
    assert some.allocate("GPU").machine == "one", "what can never be served stands in no request's way"
    some.release(held)
    some.update("three", machine(gpus(2)))
    assert gang.allocation is None
    some.update("four", machine(gpus(2)))
    assert where(gang.allocation) == ["three", "four"]


def test_a_machine_that_is_lost_while_a_gang_holds_it():
    some = fleet(one=[gpus(1)], two=[gpus(1)])
    gang = some.allocate("GPU", hosts=2)
    ticket = some.submit("GPU", hosts=2)
    some.update("two", None)
    assert len(some.on("two").holders("h100-0")) == 1
    some.update("two", machine(gpus(1)))
    assert some.on("two").free("h100-0") == 0, "it is back, and still held"
    some.update("two", None)
    some.release(gang)
    assert ticket.allocation is None
    with pytest.raises(KeyError):
        some.on("two")
    some.update("three", machine(gpus(1)))
    assert where(ticket.allocation) == ["one", "three"]


def test_a_gang_as_a_document_and_in_the_environment_of_a_worker(acme):
    machines = {name: anyaccel.detect("sim:A1:2") for name in ("one", "two")}
    scheduler = anyaccel.open_scheduler(machines)
    gang = scheduler.allocate("A1", hosts=2)
    assert anyaccel.from_json(json.loads(json.dumps(anyaccel.to_json(gang)))) == gang
    for member in gang.members:
        worker = anyaccel.worker_environment(member, machines[member.machine], environ={})
        assert worker.allocation == member
    with pytest.raises(ValueError, match="is a gang on 2 machines; ask each of its members"):
        anyaccel.worker_environment(gang, machines["one"], environ={})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def with_policy(policy, **machines):
    clock = Clock()
    return clock, Fleet({name: machine(each) for name, each in machines.items()}, policy=policy, clock=clock)


def test_who_ends_before_a_gang_could_start_passes_it():
    clock, some = with_policy(Policy(), one=gpus(2), two=gpus(2), three=gpus(2))
    first = some.allocate("GPU:1", hosts=2, time=100)  # one and two
    last = some.allocate("GPU:1", time=300)
    assert last.machine == "one"
    gang = some.submit("GPU:2", hosts=2)
    clock.now = 10.0
    with pytest.raises(NotFreeError):
        some.allocate("GPU")
    with pytest.raises(NotFreeError):
        some.allocate("GPU", time=91)  # two is free at 100, and three is now
    passed = some.allocate("GPU", time=90)
    some.release(first)
    some.release(passed)
    assert where(gang.allocation) == ["two", "three"]


def test_the_earliest_start_of_a_request_is_that_of_the_machine_that_is_free_first():
    _, some = with_policy(Policy(), one=gpus(2), two=gpus(2))
    for seconds in (200, 100):
        some.allocate("GPU:1", time=seconds)
    held = some.allocate("GPU:2", time=50)
    assert held.machine == "two"
    some.submit("GPU:2")
    some.release(held)
    assert some.pending() == ()


def test_each_member_of_a_gang_counts_for_its_user_s_limit():
    _, some = with_policy(Policy(limits=Limits(devices=2)), one=gpus(2), two=gpus(2))
    with pytest.raises(NeverFitsError, match="4 devices are over user 7's limit of 2"):
        some.submit("GPU:2", hosts=2, user=7)
    gang = some.allocate("GPU:1", hosts=2, user=7)
    waits = some.submit("GPU:1", user=7)
    assert waits.allocation is None
    assert some.submit("GPU:1", user=8).allocation
    some.release(gang)
    assert waits.allocation


def test_what_others_hold_of_a_machine_counts():
    some = fleet(one=[gpus(1)], two=[gpus(1)])
    foreign = some.occupy("two", {"h100-0": Extent()}, holder="7f3c", note="alice")
    with pytest.raises(NotFreeError, match=r"two: 0 of 1 GPU free; held by 7f3c \(alice\)"):
        some.allocate("GPU", hosts=2)
    ticket = some.submit("GPU", hosts=2)
    some.release(foreign)
    assert where(ticket.allocation) == ["one", "two"]


NAMES = ("one", "two", "three")
MACHINES = [machine(gpus(2)), machine(gpus(1)), machine(gpus(2), chips(2)), machine(gpus(3), gpus(1, "A100")), None]
REQUESTS = ("GPU", "GPU:2", "GPU:0.4", "GPU:0.7", "A100|H100", "TPU", "TPU:2", "GPU:0.5 TPU")


class GangModel(RuleBasedStateMachine):
    """Drives a fleet and keeps its own books: what is free on each machine, and who came when."""

    def __init__(self):
        super().__init__()
        self.machines = {name: MACHINES[index] for index, name in enumerate(NAMES)}
        self.fleet = Fleet(self.machines, chip_rule, ("GPU", "TPU", "H100", "A100"))
        self.held, self.waiting = [], []

    def free(self, name):
        """What is free of each device of a machine, given what is held."""
        left = {device.id: 10_000 for device in self.machines[name].devices}
        for allocation in self.held:
            for member in allocation.members:
                for share in member.shares if member.machine == name else ():
                    if share.device.id in left:
                        left[share.device.id] -= share.units
        return left

    def able(self, request, *, ever):
        """The machines that can serve a request now, or ever."""
        found = []
        for name, inventory in self.machines.items():
            devices = inventory.devices if inventory else ()
            left = dict.fromkeys((each.id for each in devices), 10_000) if ever or not devices else self.free(name)
            if possible(devices, left, request, chip_rule):
                found.append(name)
        return found

    def wants(self, ticket):
        """The devices for which a ticket competes."""
        found = set()
        for name in self.able(ticket.request, ever=True):
            for device in self.machines[name].devices:
                for term in ticket.request.terms:
                    one = parse_request(str(term).split(":")[0])
                    if possible((device,), {device.id: 10_000}, one, chip_rule):
                        found.add((name, device.id))
        return found

    def ahead(self, ticket):
        return [
            other
            for other, count in self.waiting
            if other is not ticket
            and (-other.priority, other.number) < (-ticket.priority, ticket.number)
            and len(self.able(other.request, ever=True)) >= count
            and self.wants(other) & self.wants(ticket)
        ]

    def settle(self):
        """Book the placed requests: all of a gang, each member on a machine of its own, and none before a rival."""
        placed = [each for each in self.waiting if each[0].allocation]
        self.waiting = [each for each in self.waiting if not each[0].allocation]
        for ticket, hosts in placed:
            assert not self.ahead(ticket)
            members = ticket.allocation.members
            assert len(members) == len({member.machine for member in members}) == hosts
            assert all(len(member.grants) == len(ticket.request.terms) for member in members)
            self.held.append(ticket.allocation)

    @rule(text=st.sampled_from(REQUESTS), hosts=st.integers(1, 3), priority=st.integers(0, 1))
    def submit(self, text, hosts, priority):
        ticket = self.fleet.submit(text, hosts=hosts, priority=priority, infeasible="pend")
        fits = len(self.able(ticket.request, ever=False)) >= hosts
        assert bool(ticket.allocation) == (fits and not self.ahead(ticket))
        self.waiting.append((ticket, hosts))
        self.settle()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        allocation = data.draw(st.sampled_from(self.held))
        self.held.remove(allocation)
        self.fleet.release(allocation)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data):
        ticket, hosts = data.draw(st.sampled_from(self.waiting))
        assert ticket.cancel()
        self.waiting.remove((ticket, hosts))
        self.settle()

    @rule(name=st.sampled_from(NAMES), inventory=st.sampled_from(MACHINES))
    def update(self, name, inventory):
        self.machines[name] = inventory
        self.fleet.update(name, inventory)
        self.settle()

    @invariant()
    def nothing_is_given_twice(self):
        for name, inventory in self.machines.items():
            if inventory:
                left = self.free(name)
                assert {key: max(0, units) for key, units in left.items()} == {
                    device.id: self.fleet.on(name).free(device.id) for device in inventory.devices
                }

    @invariant()
    def no_request_waits_that_could_be_served(self):
        for ticket, hosts in self.waiting:
            if not self.ahead(ticket):
                assert len(self.able(ticket.request, ever=False)) < hosts
                assert not ticket.why().fits_now


TestGangModel = GangModel.TestCase
TestGangModel.settings = settings(max_examples=length(8, 50), stateful_step_count=20, deadline=None)
