"""The order of waiting requests: none starves, none is delayed past the bound, all processes compute the same."""

import os
import pwd
import random

import pytest
from anyaccel import policy
from anyaccel.backfill import earliest_starts, forecast, may_pass
from anyaccel.configuration import Configuration
from anyaccel.ledger.machine_policy import read_policy
from anyaccel.model import replace
from anyaccel.policy import (
    Block,
    Holding,
    Limits,
    Need,
    Policy,
    Usage,
    Waiting,
    sum_usage,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lengths import length

WHOLE = 10_000
DEVICES = "abcd"
# Five properties, so 10,000 cases at full length.
CASES = settings(max_examples=length(50, 500), deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Job:
    """A request of a made-up day."""

    def __init__(self, number, arrives, count, lasts, *, known, user, priority, among=DEVICES, ends_early=0):
        self.waiting = Waiting(
            key=number,
            number=number,
            since=float(arrives),
            priority=priority,
            user=user,
            seconds=float(lasts) if known else None,
            needs=(Need(count=count, units=WHOLE, among=frozenset(among)),),
            wants=frozenset(among),
        )
        self.count = count
        self.lasts = max(1, lasts - ends_early)
        self.among = among
        self.started = None
        self.passed = None


def in_the_way(rules, before, one, used, now):
    return [each for each in before if rules.keeps_waiting(each, one, used, competes=rules.competes(each, one, now))]


def simulate(jobs, rules, *, on_look=None, until=100_000):
    """Serve made-up requests as waiters would, in virtual time; a device is whole or not."""
    now, waiting, running = 0.0, [], []
    coming = sorted(jobs, key=lambda job: job.waiting.number)
    while coming or waiting or running:
        moments = [job.started + job.lasts for job, _ in running] + [job.waiting.since for job in coming[:1]]
        edges = [edge for block in rules.blocks for edge in (block.begin, block.end)]
        moments += [edge for edge in edges if now < edge < until] if waiting else []
        now = max(now, min(moments)) if moments else now
        assert now < until, "a request starves"
        ended = [(job, held) for job, held in running if job.started + job.lasts <= now]
        running = [each for each in running if each not in ended]
        for job, held in ended if rules.half_life else ():
            user, end = job.waiting.user, job.started + job.lasts
            usage = rules.past.get(user, Usage()).with_lease(len(held), job.lasts, end, rules.half_life)
            rules = replace(rules, past={**rules.past, user: usage})
        while coming and coming[0].waiting.since <= now:
            waiting.append(coming.pop(0))
        progress = True
        while progress:
            progress = False
            held = [each for _, own in running for each in own]
            by_key = {job.waiting.key: job for job in waiting}
            order = rules.order([job.waiting for job in waiting], held, now)
            used = sum_usage(held)
            if on_look:
                on_look(order, running, now, rules)
            for position, each in enumerate(order):
                ahead = in_the_way(rules, order[:position], each, used, now)
                passes = bool(ahead)
                if passes and not may_pass(rules, each, ahead, held, now):
                    continue
                job = by_key[each.key]
                taken = {one.device for one in held} | rules.barred(each, now)
                free = [device for device in job.among if device not in taken and not rules.limited(each, used)]
                if len(free) < job.count:
                    continue
                job.started, job.devices = now, frozenset(free[: job.count])
                until_ = None if each.seconds is None else now + each.seconds
                own = [
                    Holding(device=device, user=each.user, since=now, until=until_, passed=now if passes else None)
                    for device in free[: job.count]
                ]
                running.append((job, own))
                waiting.remove(job)
                progress = True
                break
        if not moments and waiting:
            raise AssertionError(f"{waiting[0].waiting} never starts")
    return {job.waiting.key: job.started for job in jobs}


def days(*, one_kind=False):
    """Up to eight requests of one machine with four devices; drawn by a seed, which is quick."""
    return st.builds(lambda number, seed: day(random.Random(seed), number, one_kind), st.integers(2, 8), st.integers(0))


def day(draw, number, one_kind):
    jobs, now = [], 0
    for each in range(number):
        now += draw.randint(0, 8)
        among = DEVICES if one_kind else draw.choice([DEVICES, DEVICES, "ab", "cd", "a"])
        job = {
            "number": each,
            "arrives": now,
            "count": draw.randint(1, len(among)),
            "lasts": draw.randint(1, 20),
            "known": one_kind or draw.random() < 0.5,
            "user": draw.choice([1, 2, 3]),
            "priority": 0 if one_kind else draw.choice([0, 0, 5]),
            "among": among,
            "ends_early": 0 if one_kind else draw.randint(0, 10),
        }
        jobs.append(job)
    return jobs


def made(jobs):
    return [Job(**job) for job in jobs]


@CASES
@given(days(one_kind=True))
def test_no_request_starts_later_than_in_turn(jobs):
    """Where everything lasts as long as it says and the bound is 0; beside the order without backfill."""
    in_turn = simulate(made([job | {"known": False} for job in jobs]), Policy())
    found = simulate(made(jobs), Policy())
    assert all(found[key] <= in_turn[key] for key in found)


@CASES
@given(days(one_kind=True), st.sampled_from([0.0, 3.0, 10.0]))
def test_no_head_is_delayed_past_the_bound(jobs, bound):
    """Who is first in line starts when what ran as it became first has made room, or so much later."""
    promised = {}

    def on_look(order, running, now, _):
        if order and order[0].key not in promised:
            ends = sorted(job.started + job.lasts for job, held in running for _ in held)
            missing = order[0].needs[0].count - (len(DEVICES) - len(ends))
            promised[order[0].key] = max(now, ends[missing - 1] if missing > 0 else now)

    starts = simulate(made(jobs), Policy(backfill=bound), on_look=on_look)
    assert all(starts[key] <= promise + bound for key, promise in promised.items())


@CASES
@given(days(), st.booleans(), st.sampled_from([None, 1, 2]), st.integers(0, 1000))
def test_everybody_computes_the_same_order_from_the_same_facts(jobs, fair, most, seed):
    """In whichever order the facts are listed, for every process; and no request is left out or comes twice."""
    rules = Policy(fair_shares=fair, patience=15.0, limits=Limits(devices=most, priority=3))
    waiting = [job.waiting for job in made(jobs)]
    held = [Holding(device=device, user=number % 3 + 1) for number, device in enumerate("wxyz")]
    expected = rules.order(waiting, held, 20.0)
    shuffled, held_shuffled = list(waiting), list(held)
    random.Random(seed).shuffle(shuffled)
    random.Random(seed).shuffle(held_shuffled)
    assert rules.order(shuffled, held_shuffled, 20.0) == expected
    assert sorted(each.number for each in expected) == sorted(each.number for each in waiting)
    for position, each in enumerate(expected):
        ahead = expected[:position]
        assert may_pass(rules, each, ahead, held, 20.0) == may_pass(rules, each, ahead, held_shuffled, 20.0)


@CASES
@given(days(), st.booleans(), st.sampled_from([0.0, 5.0]))
def test_no_request_starves(jobs, fair, bound):
    """Whatever shares, priorities and backfill say, everybody starts; who has waited long is next."""
    rules = Policy(backfill=bound, fair_shares=fair, patience=30.0)
    starts = simulate(made(jobs), rules)
    assert None not in starts.values()


def blocks():
    """Up to three reservations and a drain that ends."""
    reservations = st.builds(
        lambda devices, begin, lasts, user: Block(
            devices=frozenset(devices), begin=float(begin), end=float(begin + lasts), users=(user,)
        ),
        st.sets(st.sampled_from(DEVICES), min_size=1),
        st.integers(0, 60),
        st.integers(1, 20),
        st.sampled_from([1, 2, 3]),
    )
    drains = st.builds(
        lambda devices, end: Block(devices=frozenset(devices), begin=float("-inf"), end=float(end)),
        st.sets(st.sampled_from(DEVICES), min_size=1),
        st.integers(1, 60),
    )
    return st.builds(lambda some, more: some + more, st.lists(reservations, max_size=3), st.lists(drains, max_size=1))


def fairness():
    """Rules for shares: none, by what users hold, and by what they used, also as members of two groups."""
    groups = {"lab": Limits(weight=2), "course": Limits()}
    over_time = {"fair_shares": True, "half_life": 25.0, "past": {1: Usage(seconds=70.0, at=0.0)}}
    both = {1: "lab", 2: "lab", 3: "course"}
    return st.sampled_from(
        [
            {},
            {"fair_shares": True},
            over_time,
            {**over_time, "groups": groups, "members": {1: "lab", 2: "course", 3: "lab"}},
            {**over_time, "groups": groups, "members": {3: "course"}, "users": {2: Limits(weight=3, devices=4)}},
            {"groups": {"lab": Limits(total=4)}, "members": {1: "lab", 2: "lab"}},
            {**over_time, "groups": {"lab": Limits(total=4), "course": Limits(total=5)}, "members": both},
        ]
    )


@CASES
@given(days(), blocks(), fairness(), st.sampled_from([0.0, 5.0]), st.integers(0, 1000))
def test_no_reservation_and_no_drain_is_broken_and_no_request_starves(jobs, withheld, shares, bound, seed):
    """With fair shares, groups, priorities, time limits and backfill together; each waiter computes the same."""
    rules = Policy(backfill=bound, patience=30.0, blocks=tuple(withheld), **shares)
    again = random.Random(seed).sample(withheld, len(withheld))

    def on_look(order, running, now, rules):
        held = [each for _, own in running for each in own]
        past = dict(reversed(rules.past.items()))
        shuffled = replace(rules, blocks=tuple(again), past=past)
        assert shuffled.order(reversed(order), list(reversed(held)), now) == rules.order(order, held, now)
        assert earliest_starts(shuffled.blocks, order, held, now) == earliest_starts(
            rules.blocks, order, list(reversed(held)), now
        )
        used, same = sum_usage(held), sum_usage(reversed(held))
        for position, one in enumerate(order):
            assert shuffled.over_limits(one, same) == rules.over_limits(one, used)
            assert in_the_way(shuffled, order[:position], one, same, now) == in_the_way(
                rules, order[:position], one, used, now
            )

    jobs = made(jobs)
    starts = simulate(jobs, rules, on_look=on_look)
    assert None not in starts.values()
    for job in jobs:
        for block in withheld:
            if job.devices.isdisjoint(block.devices) or job.waiting.user in block.users:
                continue
            assert job.started >= block.end or job.started + job.lasts <= block.begin


def test_a_reserved_device_is_given_to_its_user_though_others_came_first():
    first = Job(1, 0, 4, 50, known=False, user=1, priority=5)
    own = Job(4, 10, 2, 5, known=False, user=2, priority=0, among="ab")
    short = Job(2, 1, 1, 3, known=True, user=1, priority=0, among="a")
    late = Job(3, 8, 1, 3, known=True, user=1, priority=0, among="a")
    rules = Policy(blocks=(Block(devices=frozenset("ab"), begin=10.0, end=20.0, users=(2,)),))
    assert simulate([first, short, late, own], rules) == {1: 20.0, 2: 1.0, 3: 70.0, 4: 10.0}


@CASES
@given(days(), st.integers(1, 4))
def test_a_limit_holds_and_keeps_no_other_user_waiting(jobs, most):
    rules = Policy(limits=Limits(devices=most))
    fitting = [job for job in jobs if job["count"] <= most]
    jobs = made(fitting)
    starts = simulate(jobs, rules)
    for moment in starts.values():
        held = {}
        for job in jobs:
            if job.started <= moment < job.started + job.lasts:
                held[job.waiting.user] = held.get(job.waiting.user, 0) + job.count
        assert max(held.values(), default=0) <= most


@CASES
@given(days(), st.sampled_from([0.0, 5.0]), st.integers(2, 5))
def test_a_groups_total_holds_for_all_its_members_together_and_no_request_starves(jobs, bound, total):
    members = {1: "lab", 2: "lab"}
    rules = Policy(backfill=bound, patience=30.0, groups={"lab": Limits(total=total)}, members=members)
    jobs = made([job for job in jobs if job["count"] <= total or job["user"] == 3])
    starts = simulate(jobs, rules)
    assert None not in starts.values()
    for moment in starts.values():
        running = [job for job in jobs if job.started <= moment < job.started + job.lasts]
        assert sum(job.count for job in running if job.waiting.user in members) <= total


def test_members_do_not_use_up_the_total_before_an_earlier_request_of_their_group():
    """Though its devices are free, and theirs are others; requests of other users are served."""
    rules = Policy(groups={"lab": Limits(total=3)}, members={1: "lab", 2: "lab"})
    run = [
        Job(1, 0, 1, 40, known=True, user=1, priority=0, among="a"),
        Job(2, 0, 1, 60, known=True, user=2, priority=0, among="b"),
        Job(3, 1, 2, 10, known=False, user=1, priority=0, among="cd"),  # waits for the total
        Job(4, 2, 1, 20, known=True, user=2, priority=0, among="e"),  # ends before the total has room
        Job(5, 3, 1, 20, known=False, user=2, priority=0, among="f"),  # there is room, but not for both
        Job(6, 4, 1, 5, known=False, user=3, priority=0, among="c"),  # of no group
        Job(7, 5, 1, 70, known=True, user=1, priority=0, among="g"),  # ends later
    ]
    starts = simulate(run, rules)
    assert starts == {1: 0.0, 2: 0.0, 3: 40.0, 4: 2.0, 5: 50.0, 6: 4.0, 7: 50.0}
    own = rules.limits_of(1)
    assert (own, rules.total_group(1), rules.total_group(3), rules.plain) == (Limits(), "lab", "", False)


def waiting(number, count=1, seconds=None, since=0.0, **more):
    needs = (Need(count=count, units=WHOLE, among=frozenset(DEVICES)),)
    return Waiting(key=number, number=number, since=since, seconds=seconds, needs=needs, **more)


def test_a_short_one_passes_one_that_waits_for_all_devices():
    held = [Holding(device="a", until=100.0)]
    head = waiting(1, 4)
    assert earliest_starts(Policy().blocks, [head], held) == [100.0]
    assert may_pass(Policy(), waiting(2, 1, 60.0), [head], held, 40.0)
    assert not may_pass(Policy(), waiting(2, 1, 61.0), [head], held, 40.0)
    assert may_pass(Policy(backfill=1), waiting(2, 1, 61.0), [head], held, 40.0)
    assert not may_pass(Policy(), waiting(2, 1), [head], held, 40.0)


def test_what_passed_does_not_let_others_pass():
    """Else each could delay the head by the bound once more, for ever."""
    held = [Holding(device="a", until=100.0), Holding(device="b", until=110.0, passed=50.0)]
    head = waiting(1, 4, since=10.0)
    assert may_pass(Policy(backfill=10), waiting(2, 1, 10.0), [head], held, 100.0)
    assert not may_pass(Policy(backfill=10), waiting(2, 1, 15.0), [head], held, 100.0)
    assert earliest_starts(Policy().blocks, [waiting(3, 4, since=60.0)], held) == [110.0]


def test_without_a_known_end_the_bound_counts_from_the_arrival():
    held = [Holding(device="a")]
    head = waiting(1, 4, since=10.0)
    assert not may_pass(Policy(), waiting(2, 1, 1.0), [head], held, 20.0)
    assert may_pass(Policy(backfill=60), waiting(2, 1, 50.0), [head], held, 20.0)
    assert not may_pass(Policy(backfill=60), waiting(2, 1, 51.0), [head], held, 20.0)


def test_those_behind_the_head_are_not_delayed_either_beyond_what_they_wait_for_anyway():
    held = [Holding(device="a", until=100.0)]
    ahead = [waiting(1, 4), waiting(2, 2)]  # the second could start now, but for the first
    assert earliest_starts(Policy().blocks, ahead, held) == [100.0, 100.0]
    assert may_pass(Policy(), waiting(3, 1, 50.0), ahead, held, 10.0)


def test_shares_of_one_device_count():
    half = Need(count=1, units=5000, among=frozenset("a"))
    one = Waiting(key=1, number=1, since=0.0, needs=(half,))
    both = [Holding(device="a", units=5000, until=10.0), Holding(device="a", units=5000, until=20.0)]
    assert earliest_starts(Policy().blocks, [one], both) == [10.0]
    assert forecast(policy.PLAIN, [one], both, 5.0) == {1: 10.0}


def test_fair_shares_put_those_first_who_hold_less():
    rules = Policy(fair_shares=True, users={7: Limits(weight=4)})
    held = [Holding(device="a", user=5), Holding(device="b", user=7), Holding(device="c", user=7)]
    one, two, three = waiting(1, user=5), waiting(2, user=6), waiting(3, user=7)
    assert [each.user for each in rules.order([one, two, three], held, 0.0)] == [6, 7, 5]


def test_with_a_half_life_the_user_comes_first_who_used_less_lately():
    half_life = 100.0
    lately = Usage().with_lease(1, 50, 1000.0, half_life)
    long_ago = Usage().with_lease(4, 50, 0.0, half_life)
    rules = Policy(fair_shares=True, half_life=half_life, past={5: lately, 6: long_ago})
    running = [Holding(device="a", user=7, since=900.0), Holding(device="b", user=7)]
    waits = [waiting(number, user=user) for number, user in enumerate([7, 5, 6, 8])]
    assert [each.user for each in rules.order(waits, running, 1000.0)] == [8, 6, 5, 7]
    # The same device-seconds, whether the lease has ended, still runs, or was two leases one after the other.
    ended = Usage().with_lease(1, 60, 960.0, half_life).with_lease(1, 40, 1000.0, half_life)
    assert ended.decayed(1300.0, half_life) == pytest.approx(rules.usage(running, 1000.0)[7] / 8)
    assert rules.usage([], 1000.0)[6] == pytest.approx(long_ago.seconds / 1024)


def test_the_order_of_ends_and_a_clock_that_was_set_back_do_not_matter():
    early, late = (2, 30, 100.0, 50.0), (1, 10, 160.0, 50.0)
    one, other = (Usage().with_lease(*first).with_lease(*second) for first, second in ((early, late), (late, early)))
    assert one.decayed(500.0, 50.0) == pytest.approx(other.decayed(500.0, 50.0))
    assert one.decayed(0.0, 50.0) == one.seconds


def test_the_members_of_a_group_share_its_weight():
    past = {user: Usage(seconds=seconds, at=0.0) for user, seconds in {1: 60.0, 2: 10.0, 3: 50.0, 4: 45.0}.items()}
    groups = {"lab": Limits(devices=2, weight=2), "course": Limits(devices=1)}
    members = {1: "lab", 2: "lab", 3: "course"}
    rules = Policy(fair_shares=True, half_life=10.0, past=past, groups=groups, members=members)
    waits = [waiting(number, user=user) for number, user in enumerate([1, 2, 3, 4])]
    # lab: 70 of weight 2; course: 50; user 4 alone: 45.
    assert [each.user for each in rules.order(waits, [], 0.0)] == [2, 1, 4, 3]
    assert [rules.limits_of(user).devices for user in (1, 3, 4, None)] == [2, 1, None, None]
    assert not Policy(groups=groups).plain


def test_a_priority_counts_up_to_the_users_highest():
    rules = Policy(limits=Limits(priority=0), users={7: Limits(priority=10)})
    liar, honest, allowed = waiting(2, priority=99, user=5), waiting(1, user=6), waiting(3, priority=5, user=7)
    assert rules.order([liar, honest, allowed], [], 0.0) == [allowed, honest, liar]
    assert rules.limits_of(0) == Limits()


def test_forecast_knows_what_is_known():
    held = [Holding(device="a", until=50.0), Holding(device="b"), Holding(device="c", until=70.0)]
    first, second, third = waiting(1, 2, 30.0), waiting(2, 1, 5.0), waiting(3, 4)
    assert forecast(policy.PLAIN, [first, second, third], held, 10.0) == {1: 50.0, 2: 70.0, 3: None}


def test_forecast_counts_reservations_until_their_end():
    """Devices a and b are reserved for user 2, c and d from 60 on; e has no end."""
    blocks = (
        Block(devices=frozenset("ab"), begin=0.0, end=50.0, users=(2,)),
        Block(devices=frozenset("cd"), begin=60.0, end=90.0, users=(2,)),
    )
    rules, held = Policy(blocks=blocks), [Holding(device="e"), Holding(device="a", until=20.0)]

    def asks(number, count, seconds=None, user=1):
        need = Need(count=count, units=WHOLE, among=frozenset("abcde"))
        return Waiting(
            key=number, number=number, since=0.0, seconds=seconds, user=user, needs=(need,), wants=frozenset("abcde")
        )

    assert forecast(rules, [asks(1, 2)], held, 10.0) == {1: 50.0}
    assert forecast(rules, [asks(1, 4)], held, 10.0) == {1: 90.0}
    assert forecast(rules, [asks(1, 5)], held, 10.0) == {1: None}
    assert forecast(rules, [asks(1, 2, 10.0)], held, 10.0) == {1: 10.0}
    # Request 1 takes the devices that are not reserved until then, so that the next one has to wait for the end.
    assert forecast(rules, [asks(1, 2, 30.0), asks(2, 2, 5.0)], held, 10.0) == {1: 10.0, 2: 40.0}


def test_forecast_counts_limits_of_users_and_groups():
    rules = Policy(limits=Limits(devices=2), groups={"lab": Limits(total=2)}, members={3: "lab", 4: "lab"})
    held = [Holding(device="a", user=1, until=30.0), Holding(device="b", user=1, until=40.0)]
    held += [Holding(device="c", user=4, until=70.0)]
    own, large, other = waiting(1, 1, 5.0, user=1), waiting(2, 2, 5.0, user=3), waiting(3, 1, 5.0, user=2)
    over = waiting(4, 3, user=2)
    assert forecast(rules, [own, large, over, other], held, 10.0) == {1: 30.0, 2: 70.0, 3: 10.0, 4: None}


def test_the_configuration_becomes_the_rules():
    values = {
        "queue.fair_shares": True,
        "limits.devices": 2,
        "limits.time": 3600.0,
        f"users.{os.geteuid()}.devices": 8,
        "users.no-user-of-this-name.devices": 8,
    }
    rules = read_policy(Configuration(path="x", found=True, values=values))
    own = Limits(devices=8, seconds=3600.0)
    assert rules == Policy(
        fair_shares=True,
        patience=86400.0,
        limits=Limits(devices=2, seconds=3600.0),
        users={os.geteuid(): own},
    )
    assert not rules.plain
    groups = {
        "groups.0.devices": 3,
        "groups.0.total_devices": 5,
        "groups.0.weight": 2,
        "groups.no-group-of-this-name.time": 5.0,
    }
    over_time = {"queue.half_life": 60.0, f"users.{os.geteuid()}.priority": 1, "users.4294967290.weight": 3}
    rules = read_policy(Configuration(path="x", found=True, values=values | groups | over_time))
    assert rules.half_life == 60.0
    assert rules.groups == {"0": Limits(devices=3, seconds=3600.0, weight=2, total=5)}
    assert rules.limits_of(4294967290) == Limits(devices=2, seconds=3600.0, weight=3)
    assert read_policy(Configuration(path="x")).plain
    assert read_policy(Configuration(path="x", found=True, values={"queue.backfill": 60.0})) == Policy(backfill=60.0)


def test_the_first_group_in_the_file_counts_and_a_users_own_entry_comes_before():
    """By the database of groups, where root is in its primary group alone."""
    own, other = str(pwd.getpwuid(1).pw_gid), "4294967291"
    tables = {
        "groups.0.devices": 1,
        f"groups.{other}.devices": 2,
        f"groups.{own}.devices": 3,
        f"groups.{own}.time": 9.0,
    }

    def read(**values):
        return read_policy(Configuration(path="x", found=True, values={**tables, **values}))

    assert (read().limits_of(1).devices, read().members.get(1)) == (3, own)
    assert read().limits_of(4294967290) == Limits()
    assert read(**{"users.1.devices": 7}).limits_of(1) == Limits(devices=7, seconds=9.0)
    assert read(**{"users.1.devices": 7}).limits_of(1) == read(**{"users.1.devices": 7}).users[1]


@pytest.mark.parametrize("policy", [Policy(), Policy(limits=Limits(devices=9))])
def test_the_order_without_rules_is_that_of_priority_and_arrival(policy):
    found = policy.order([waiting(1), waiting(2, priority=1), waiting(3)], [], 0.0)
    assert [each.number for each in found] == [2, 1, 3]


def over(rules, count, user, held=(), **more):
    return rules.over_limits(waiting(1, count, user=user, **more), sum_usage(held))


def test_a_groups_total_counts_each_member_and_says_so():
    rules = Policy(
        limits=Limits(devices=5),
        users={5: Limits(devices=4)},
        groups={"lab": Limits(devices=2, total=3), "course": Limits(total=0)},
        members={0: "lab", 5: "lab", 6: "lab", 7: "course"},
    )
    held = [Holding(device=device, user=user) for device, user in (("a", 5), ("b", 6), ("c", 8), ("d", 0))]
    held += [Holding(device="a", user=6, inner=True)]  # a part of another lease
    assert over(rules, 1, 6, held) == over(rules, 4, 8) == over(rules, 9, 0, held) == ()
    assert over(rules, 2, 5, held, inner=True) == ()
    (more,) = over(rules, 2, 5, held)
    assert (
        more.message() == more.message("ada") == "group lab holds 2 devices, and 2 more are over group lab's limit of 3"
    )
    assert more.remedy == "'anyaccel status' lists the leases; one that a member of group lab releases makes room"
    (full,) = over(rules, 1, 5, [*held, Holding(device="e", user=5)])
    assert (full.message(), full.lasting) == ("group lab is at the limit of 3 devices", False)
    own, never = over(rules, 4, 6)
    assert (own.message(), never.message()) == (
        "4 devices are over your limit of 2", "4 devices are over group lab's limit of 3",
    )  # fmt: skip
    assert never.remedy.startswith("ask for 3 devices at most; the administrator can raise 'total_devices' in ")
    (none,) = over(rules, 1, 7)
    assert (none.message(), none.remedy) == (
        "1 device is over group course's limit of 0",
        "the administrator can raise 'total_devices' in /etc/anyaccel/config.toml",
    )


def test_a_limit_says_what_is_over_it_and_the_way_out():
    rules = Policy(limits=Limits(devices=2, seconds=5400.0, priority=1))
    held = [Holding(device="a", user=5), Holding(device="b", units=5000, user=5), Holding(device="c", user=6)]

    def said(count, user=5, held=held, **more):
        return [each.message() for each in rules.over_limits(waiting(1, count, user=user, **more), sum_usage(held))]

    assert said(1) == ["you hold 1.5 devices, and 1 more is over your limit of 2"]
    assert said(1, held=[*held, Holding(device="b", units=5000, user=5)]) == ["you are at your limit of 2 devices"]
    assert said(1, held=[*held, Holding(device="x", user=5, inner=True)], inner=True) == []
    assert said(1, user=6) == said(9, user=0) == []
    assert said(3, seconds=3.5 * 3600, priority=2) == [
        "3 devices are over your limit of 2",
        "a time of 3h30m is over your limit of 1h30m",
        "a priority of 2 is over your limit of 1",
    ]
    now, (never,) = over(rules, 1, 5, held)[0], over(rules, 3, 6)
    assert now.message("ada") == "ada holds 1.5 devices, and 1 more is over ada's limit of 2"
    assert now.remedy == "'anyaccel status' lists your leases, and 'anyaccel release LEASE' ends one"
    assert never.message("ada") == "3 devices are over ada's limit of 2"
    assert never.remedy == (
        "ask for 2 devices at most; the administrator can raise 'devices' in /etc/anyaccel/config.toml"
    )
    (nothing,) = over(Policy(limits=Limits(devices=0)), 1, 5)
    assert nothing.message() == "1 device is over your limit of 0"
    assert nothing.remedy == "the administrator can raise 'devices' in /etc/anyaccel/config.toml"
