"""A scheduler of one process goes by the same rules as requests that wait in the machine's ledger."""

import re

import anyaccel
import pytest
from anyaccel.errors import NeverFitsError, NotFreeError, UsageError
from anyaccel.model import Extent
from anyaccel.policy import Limits, Policy
from anyaccel.scheduler import ReasonCode, Scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length


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
    made = scheduler(Policy(limits=Limits(devices=1)))
    first = made.allocate("APU:1", user=7)
    limited = made.submit("APU:1", user=7)
    assert limited.allocation is None
    other = made.submit("APU:1", user=8)
    assert other.allocation is not None
    made.release(other.allocation)
    assert limited.allocation is None
    made.release(first)
    assert limited.allocation is not None
    fair = scheduler(Policy(fair_shares=True))
    held = [fair.allocate("APU:1", user=7), fair.allocate("APU:1", user=7)]
    greedy, modest = fair.submit("APU:1", user=7), fair.submit("APU:1", user=8)
    fair.release(held[0])
    assert (greedy.allocation, modest.allocation is None) == (None, False)


def test_with_a_half_life_the_scheduler_counts_what_it_gave_out_before(scheduler, clock):
    made = scheduler(Policy(fair_shares=True, half_life=100.0))
    first = made.allocate("APU:2", user=7)
    clock.now = 50.0
    made.release(first)
    held = made.allocate("APU:2", user=9)
    earlier, later = made.submit("APU:1", user=7), made.submit("APU:1", user=8)
    assert (earlier.place, later.place) == (2, 1)
    clock.now = 60.0
    made.release(held)
    made.release(later.allocation)
    made.release(earlier.allocation)
    # User 7 held 2 devices for 50 s, and user 9 for 10 s.
    held = made.allocate("APU:2", user=8)
    heavy, light = made.submit("APU:1", user=7), made.submit("APU:1", user=9)
    assert (heavy.place, light.place) == (2, 1)


@pytest.mark.parametrize("policy", [None, Policy()])
def test_the_order_of_arrival_and_priority_is_the_same(scheduler, policy):
    made = scheduler(policy)
    held = made.allocate("APU:2")
    tickets = [made.submit("APU:1", priority=priority) for priority in (0, 0, 5)]
    made.release(held)
    assert [ticket.allocation is not None for ticket in tickets] == [True, False, True]
    assert tickets[1].cancel()


def test_with_fair_shares_the_place_and_the_reason_say_the_same(scheduler):
    made = scheduler(Policy(fair_shares=True))
    first, second = made.allocate("APU:1", user=7), made.allocate("APU:1", user=7)
    greedy, modest = made.submit("APU:1", user=7), made.submit("APU:1", user=8)
    assert (greedy.place, modest.place) == (2, 1)
    assert made.pending() == (modest, greedy)
    assert "in front: t2" in greedy.why().message
    assert "in front" not in modest.why().message
    made.release(first)
    assert (modest.allocation is None, greedy.place) == (False, 1)
    made.release(second)
    assert greedy.allocation is not None


def test_a_request_that_waits_for_a_limit_says_so(scheduler):
    made = scheduler(Policy(limits=Limits(devices=1)))
    first = made.allocate("APU:1", user=7)
    waits = made.submit("APU:1", user=7)
    verdict = waits.why()
    assert (verdict.fits_now, verdict.ever_fits) == (False, True)
    assert verdict.reasons[0].code is ReasonCode.LIMIT
    assert "user 7 is at the limit of 1 device" in verdict.message
    with pytest.raises(NotFreeError, match="user 7 is at the limit of 1 device"):
        made.allocate("APU:1", user=7)
    made.release(first)
    assert waits.allocation is not None


@pytest.mark.parametrize(
    ("limits", "terms", "told"),
    [
        (Limits(devices=1), {"request": "APU:2"}, "2 devices are over user 7's limit of 1.\nask for 1 device at most"),
        (Limits(seconds=60), {"time": 90}, "a time of 1m30s is over user 7's limit of 1m.\nask for 1m at most"),
        (Limits(priority=0), {"priority": 5}, "a priority of 5 is over user 7's limit of 0.\nask for 0 at most"),
        (Limits(devices=0), {}, "1 device is over user 7's limit of 0.\n"),
    ],
)
def test_a_request_over_a_limit_that_lasts_never_fits(scheduler, limits, terms, told):
    made = scheduler(Policy(limits=limits))
    asked = {"request": "APU:1", "user": 7, **terms}
    for ask in (made.allocate, made.submit):
        with pytest.raises(NeverFitsError) as refused:
            ask(**asked)
        assert f"{refused.value}\n{refused.value.hint}" == f"{asked['request']} can never fit: {told}"
    assert made.why(**asked) == refused.value.verdict
    pending = made.submit(**asked, infeasible="pend")
    assert (pending.allocation, pending.why().ever_fits, pending.place) == (None, False, 0)
    assert (made.pending(), made.demand()) == ((pending,), ())
    later = made.submit("APU:2", user=0)  # it blocks no other request
    assert later.allocation is not None
    made.release(later.allocation)
    assert pending.allocation is None


def test_a_request_without_a_time_limit_has_the_longest_of_its_user(scheduler, clock):
    made = scheduler(Policy(limits=Limits(seconds=50)))
    made.allocate("APU:1", time=40)
    made.submit("APU:2")
    with pytest.raises(NotFreeError):
        made.allocate("APU:1")
    made.allocate("APU:1", time=40)


def test_why_is_of_the_user_and_the_time_limit_that_it_is_asked_about(scheduler):
    made = scheduler(Policy(limits=Limits(devices=1)))
    made.allocate("APU:1", time=100, user=7)
    assert made.why("APU:1", user=8).fits_now
    assert made.why("APU:1", user=7).reasons[0].code is ReasonCode.LIMIT
    made = scheduler(Policy())
    made.allocate("APU:1", time=100)
    made.submit("APU:2")
    with pytest.raises(UsageError, match="time must be"):
        made.why("APU:1", time=-1)


def test_what_a_foreign_holder_has_counts_for_no_user(scheduler):
    made = scheduler(Policy(limits=Limits(devices=1), fair_shares=True))
    made.occupy({made.inventory.devices[0].id: Extent()}, holder="container")
    assert made.allocate("APU:1").devices == made.inventory.devices[1:]


def test_a_groups_total_counts_its_members_together(scheduler):
    made = scheduler(Policy(groups={"lab": Limits(total=1)}, members={7: "lab", 8: "lab"}))
    first = made.allocate("APU:1", user=7)
    waits, later = made.submit("APU:1", user=8), made.submit("APU:1", user=7)
    assert (waits.place, later.place) == (1, 2)
    assert waits.why().reasons[0].message == "group lab is at the limit of 1 device"
    other = made.allocate("APU:1", user=9)
    made.release(other)
    assert waits.allocation is None
    made.release(first)
    assert (waits.allocation is not None, later.allocation) == (True, None)


POLICIES = (
    None,
    Policy(),
    Policy(backfill=30.0),
    Policy(fair_shares=True),
    Policy(fair_shares=True, patience=20.0, users={7: Limits(weight=4, priority=1)}),
    Policy(fair_shares=True, half_life=8.0, groups={"lab": Limits(devices=2)}, members={7: "lab"}),
    Policy(limits=Limits(devices=2)),
    Policy(backfill=3.0, groups={"lab": Limits(devices=2, total=2)}, members={7: "lab", 8: "lab"}),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "release", "cancel", "wait"]),
        st.sampled_from(["APU:1", "APU:2", "APU:0.5", "A1:1"]),
        st.integers(0, 2),
        st.sampled_from([7, 8, None]),
        st.sampled_from([None, 5.0, 50.0]),
        st.integers(0, 9),
    ),
    max_size=14,
)


@settings(max_examples=length(25, 80), deadline=None)
@given(st.sampled_from(POLICIES), STEPS)
def test_place_reason_and_service_agree_under_every_policy(policy, steps):
    clock = Clock()
    made = Scheduler(anyaccel.detect(machine="sim:A1:3"), policy=policy, clock=clock)
    tickets = []
    for step, request, priority, user, seconds, index in steps:
        holding = [ticket for ticket in tickets if ticket.allocation]
        waiting = made.pending()
        if step == "submit":
            # One over a limit that lasts, such as that of priorities, waits for nothing.
            tickets.append(made.submit(request, priority=priority, user=user, time=seconds, infeasible="pend"))
        elif step == "release" and holding:
            ticket = holding[index % len(holding)]
            tickets.remove(ticket)
            made.release(ticket.allocation)
        elif step == "cancel" and waiting:
            assert waiting[index % len(waiting)].cancel()
        clock.now += 4.0 * (step == "wait")
        order = made.pending()
        for ticket in order:
            verdict = ticket.why()
            ahead = [
                name for each in verdict.reasons if each.code is ReasonCode.WAITING_BEHIND for name in each.holders
            ]
            assert ticket.place == (1 + len(ahead) if verdict.ever_fits else 0)
            assert not verdict.fits_now or (policy is not None and policy.patience)  # no event tells that it is over
            assert set(ahead) <= {each.id for each in order[: order.index(ticket)]}


def test_a_policy_is_an_argument_of_open_scheduler():
    policy = Policy(fair_shares=True)
    inventory = anyaccel.detect(machine="sim:A1:2")
    for made in (
        anyaccel.open_scheduler(inventory, policy=policy),
        anyaccel.open_scheduler({"node": inventory}, policy=policy),
    ):
        made.allocate("APU:2", user=7)
        greedy, modest = made.submit("APU:2", user=7), made.submit("APU:2", user=8)
        assert (greedy.place, modest.place) == (2, 1)
    with pytest.raises(UsageError, match=re.escape("the machine's configuration is the policy of all programs")):
        anyaccel.open_scheduler(inventory, shared=True, policy=policy)


def test_ten_thousand_requests_wait_and_a_decision_looks_at_the_first_of_each_kind(scheduler, monkeypatch):
    made = scheduler(Policy(fair_shares=True))
    held = made.allocate("APU:2", user=1)
    tickets = [made.submit("APU:1", user=number % 4) for number in range(10_000)]
    asked = []
    turn = Policy.sort_key

    def count(self, *facts):
        found = turn(self, *facts)
        return lambda waiting: asked.append(waiting) or found(waiting)

    monkeypatch.setattr(Policy, "sort_key", count)
    assert made.submit("APU:2", user=9).cancel()
    assert tickets[5000].cancel()
    made.release(held)
    assert sum(ticket.allocation is not None for ticket in tickets) == 2
    assert len(asked) < 100
