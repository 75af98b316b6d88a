"""A scheduler of one process goes by the same rules as those who wait in the machine's ledger."""

import anyaccel
import pytest
from anyaccel.errors import NotFreeError
from anyaccel.policy import Limits, Policy
from anyaccel.scheduler import Scheduler


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


pytestmark = pytest.mark.usefixtures("acme")


@pytest.fixture
def scheduler(clock):
    inventory = anyaccel.detect(machine="sim:A1:2")

    def scheduler(policy):
        return Scheduler(inventory, policy=policy, clock=clock)

    return scheduler


def test_who_ends_in_time_passes(scheduler, clock):
    made = scheduler(Policy())
    first = made.allocate("APU:1", time=100)
    big = made.submit("APU:2")
    clock.now = 10.0
    with pytest.raises(NotFreeError):
        made.allocate("APU:1")
    with pytest.raises(NotFreeError):
        made.allocate("APU:1", time=91)
    passed = made.allocate("APU:1", time=90)
    late = made.submit("APU:1", time=200)
    made.release(passed)
    assert late.allocation is None
    made.release(first)
    assert big.allocation is not None
    made.release(big.allocation)
    assert late.allocation is not None


def test_who_waits_passes_once_it_may(scheduler, clock):
    made = scheduler(Policy())
    made.allocate("APU:1", time=100)
    second = made.allocate("APU:1", time=100)
    big, small = made.submit("APU:2"), made.submit("APU:1", time=50)
    made.release(second)
    assert (big.allocation, small.allocation is None) == (None, False)


def test_limits_and_fair_shares_by_user(scheduler):
    made = scheduler(Policy(limits=Limits(devices=1), plain=False))
    first = made.allocate("APU:1", user=7)
    limited = made.submit("APU:1", user=7)
    assert limited.allocation is None
    other = made.submit("APU:1", user=8)
    assert other.allocation is not None
    made.release(other.allocation)
    assert limited.allocation is None
    made.release(first)
    assert limited.allocation is not None
    fair = scheduler(Policy(fair_shares=True, plain=False))
    held = [fair.allocate("APU:1", user=7), fair.allocate("APU:1", user=7)]
    greedy, modest = fair.submit("APU:1", user=7), fair.submit("APU:1", user=8)
    fair.release(held[0])
    assert (greedy.allocation, modest.allocation is None) == (None, False)


@pytest.mark.parametrize("policy", [None, Policy()])
def test_the_order_of_arrival_and_priority_is_the_same(scheduler, policy):
    made = scheduler(policy)
    held = made.allocate("APU:2")
    tickets = [made.submit("APU:1", priority=priority) for priority in (0, 0, 5)]
    made.release(held)
    assert [ticket.allocation is not None for ticket in tickets] == [True, False, True]
    assert tickets[1].cancel()
