"""The scheduler: what is held, who waits, and what callers see."""

import random
import subprocess
import sys
import threading
from dataclasses import replace
from decimal import Decimal

import pytest
from anyaccel.errors import NeverFitsError, NotFreeError, RequestError, UnknownNameError, UsageError
from anyaccel.model import AGREEMENT, UNITS_PER_DEVICE, Extent
from anyaccel.scheduler import Demand, ReasonCode, Scheduler
from small_machines import GIB, chip_rule, chips, gpus, machine

WHOLE = UNITS_PER_DEVICE


def ids(allocation):
    return [device.id for device in allocation.devices]


def test_an_allocation_says_what_was_given():
    scheduler = Scheduler(machine(gpus(2), chips(1)))
    allocation = scheduler.allocate("GPU:0.25 TPU:1", note="mine")
    share, chip = allocation.shares
    assert [grant.term for grant in allocation.grants] == list(allocation.request.terms)
    assert (share.device.id, share.units, share.memory_bytes, share.enforced_by) == (
        "h100-0",
        2_500,
        20 * GIB,
        AGREEMENT,
    )
    assert (chip.device.id, chip.units, chip.memory_bytes, chip.enforced_by) == ("chip-v5-0", WHOLE, None, "")
    assert scheduler.free("h100-0") == 7_500
    assert scheduler.free("chip-v5-0") == 0
    assert scheduler.holders("h100-0") == scheduler.holders("chip-v5-0") == (allocation,)
    scheduler.release(allocation)
    assert scheduler.free("h100-0") == scheduler.free("chip-v5-0") == WHOLE
    assert scheduler.holders("h100-0") == ()


def test_a_release_counts_once_and_for_its_own_scheduler():
    one, other = Scheduler(machine(gpus(2))), Scheduler(machine(gpus(2)))
    allocation = one.allocate("GPU:1")
    other.allocate("GPU:1")
    with pytest.raises(ValueError, match=r"allocation a\d+ \(GPU:1\) is not held: it was released before, or another"):
        other.release(allocation)
    one.release(allocation)
    with pytest.raises(ValueError, match="is not held"):
        one.release(allocation)
    assert one.free("h100-0") == WHOLE


def test_a_failure_takes_nothing_and_carries_the_verdict():
    scheduler = Scheduler(machine(gpus(2)))
    with pytest.raises(NeverFitsError) as never:
        scheduler.allocate("GPU:2 GPU:1")
    assert never.value.hint == "nearest that fits: GPU:1 GPU:1"
    assert not never.value.verdict.ever_fits
    scheduler.allocate("GPU:1")
    with pytest.raises(NotFreeError) as busy:
        scheduler.allocate("GPU:0.5 GPU:1")
    assert busy.value.verdict.ever_fits
    assert str(busy.value) == busy.value.verdict.message
    assert scheduler.free("h100-1") == WHOLE


def test_wrong_requests_are_errors_everywhere():
    scheduler = Scheduler(machine(gpus(1)))
    for call in (scheduler.allocate, scheduler.submit, scheduler.why):
        with pytest.raises(RequestError):
            call("GPU:1.5")
        with pytest.raises(UnknownNameError):
            call("H10O,else=cpu")


def test_the_cpu_stands_in_only_where_devices_can_never_be():
    scheduler = Scheduler(machine(gpus(1)), known=["TPU"])
    allocation = scheduler.allocate("TPU,else=cpu")
    assert allocation.cpu
    assert allocation.grants == ()
    scheduler.release(allocation)
    assert scheduler.submit("TPU,else=cpu").allocation.cpu
    scheduler.allocate("GPU")
    with pytest.raises(NotFreeError):
        scheduler.allocate("GPU,else=cpu")
    assert scheduler.submit("GPU,else=cpu").allocation is None


def test_tickets_are_served_in_order_and_told():
    told = []
    scheduler = Scheduler(machine(gpus(2)))
    first = scheduler.submit("GPU:2", on_placed=told.append)
    assert first.allocation
    assert told == [first]
    second = scheduler.submit("GPU:2", note="second", on_placed=told.append)
    third = scheduler.submit("GPU:1", on_placed=told.append)
    urgent = scheduler.submit("GPU:1", priority=1, on_placed=told.append)
    assert scheduler.pending() == (urgent, second, third)
    scheduler.release(first.allocation)
    assert told == [first, urgent]
    scheduler.release(urgent.allocation)
    assert told == [first, urgent, second]
    scheduler.release(second.allocation)
    assert told == [first, urgent, second, third]
    assert scheduler.pending() == ()
    assert repr(third) == f"<Ticket t3 GPU:1: {third.allocation.id}>"


def test_no_request_overtakes_a_rival_that_waits():
    scheduler = Scheduler(machine(gpus(2), chips(1)))
    scheduler.allocate("GPU:1")
    big = scheduler.submit("GPU:2", note="big")
    with pytest.raises(NotFreeError) as busy:
        scheduler.allocate("GPU:1")
    (reason,) = busy.value.verdict.reasons
    assert reason.code is ReasonCode.WAITING_BEHIND
    assert reason.holders == (big.id,)
    assert str(busy.value) == "GPU:1 does not fit now: waiting for the same devices in front: t1 (big)."
    small = scheduler.submit("GPU:0.1")
    assert small.allocation is None
    assert [reason.code for reason in small.why().reasons] == [ReasonCode.WAITING_BEHIND]
    assert [reason.code for reason in big.why().reasons] == [ReasonCode.TAKEN]
    assert scheduler.allocate("TPU:1")
    assert scheduler.allocate("GPU:1", priority=1)


def test_who_cancels_makes_room_for_those_behind():
    scheduler = Scheduler(machine(gpus(2)))
    scheduler.allocate("GPU:1")
    big, small = scheduler.submit("GPU:2"), scheduler.submit("GPU:1")
    assert big.cancel()
    assert big.cancelled
    assert small.allocation
    assert not big.cancel()
    assert not small.cancel()
    assert not small.cancelled
    assert small.why().fits_now
    assert scheduler.pending() == ()


def test_what_can_never_fit_is_refused_or_kept_as_demand():
    scheduler = Scheduler(machine(gpus(2)), known=["A100"])
    with pytest.raises(NeverFitsError):
        scheduler.submit("GPU:3")
    kept = scheduler.submit("GPU:3", infeasible="pend")
    other = scheduler.submit(["H100|A100:3", "A100:0.5"], infeasible="pend")
    assert scheduler.submit("GPU:2").allocation
    waits = [scheduler.submit("gpu:0.5"), scheduler.submit("GPU:1 GPU:1")]
    assert scheduler.pending() == (*waits, kept, other)
    assert scheduler.demand() == (
        Demand(name="GPU", resource="GPU", units=25_000, largest=10_000, requests=2, infeasible=False),
        Demand(name="GPU", resource="GPU", units=30_000, largest=30_000, requests=1, infeasible=True),
        Demand(name="H100|A100", resource="GPU", units=30_000, largest=30_000, requests=1, infeasible=True),
        Demand(name="A100", resource="", units=5_000, largest=5_000, requests=1, infeasible=True),
    )
    assert scheduler.demand()[0].devices == Decimal("2.5")
    assert kept.cancel()
    assert scheduler.pending() == (*waits, other)


def test_a_callback_may_use_the_scheduler_and_may_fail(caplog):
    scheduler = Scheduler(machine(gpus(1)))
    held = scheduler.allocate("GPU")

    def fail(ticket):
        scheduler.release(ticket.allocation)
        raise RuntimeError("boom")

    first, second = scheduler.submit("GPU", on_placed=fail), scheduler.submit("GPU")
    scheduler.release(held)
    assert first.allocation
    assert second.allocation
    assert "on_placed of <Ticket t1 GPU:1" in caplog.text


def test_shares_pack_without_loss():
    """Eighty shares of 0.18 fill sixteen devices exactly; one device is never shared and held whole."""
    scheduler = Scheduler(machine(gpus(16)))
    shares = [scheduler.allocate("GPU:0.18") for _ in range(80)]
    assert {scheduler.free(f"h100-{index}") for index in range(16)} == {1_000}
    with pytest.raises(NotFreeError):
        scheduler.allocate("GPU:0.18")
    for share in shares:
        scheduler.release(share)
    whole, quarter = scheduler.allocate("GPU:1"), scheduler.allocate("GPU:0.25")
    assert ids(whole) != ids(quarter)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_in_whatever_order_things_are_released(seed):
    chance = random.Random(seed)
    scheduler = Scheduler(machine(gpus(8, links=1), chips(8)), chip_rule)
    held = []
    for _ in range(300):
        text = chance.choice(["GPU:0.3333", "GPU:0.0001", "GPU:2", "TPU:2", "GPU:0.5 TPU:1", "GPU:1"])
        if scheduler.why(text).fits_now:
            held.append(scheduler.allocate(text))
        elif held:
            scheduler.release(held.pop(chance.randrange(len(held))))
    chance.shuffle(held)
    for allocation in held:
        scheduler.release(allocation)
    assert {scheduler.free(device.id) for device in scheduler.inventory.devices} == {WHOLE}


def test_a_large_machine():
    scheduler = Scheduler(machine(gpus(1024, numa=128)))
    shares = [scheduler.allocate("GPU:0.5") for _ in range(512)]
    wholes = [scheduler.allocate("GPU:8") for _ in range(96)]
    assert len({device.id for allocation in wholes for device in allocation.devices}) == 768
    with pytest.raises(NotFreeError):
        scheduler.allocate("GPU:1")
    for allocation in (*shares, *wholes):
        scheduler.release(allocation)
    assert len(scheduler.allocate("GPU:1024").devices) == 1024


def test_a_long_queue_is_served_to_its_end():
    scheduler = Scheduler(machine(gpus(2)))
    served = []
    tickets = [
        scheduler.submit(f"GPU:{quantity}", on_placed=served.append) for _ in range(1000) for quantity in ("1", "0.5")
    ]
    for done in range(2000):
        scheduler.release(served[done].allocation)
    assert served == tickets


def test_threads_share_one_scheduler():
    scheduler = Scheduler(machine(gpus(4, links=1)))
    use = dict.fromkeys((device.id for device in scheduler.inventory.devices), 0)
    guard, faults, start = threading.Lock(), [], threading.Barrier(8)

    def change(allocation, sign):
        with guard:
            for share in allocation.shares:
                use[share.device.id] += sign * share.units
                if not 0 <= use[share.device.id] <= WHOLE:
                    faults.append(share)

    def work(seed):
        chance = random.Random(seed)
        start.wait()
        for _ in range(150):
            placed = threading.Event()
            ticket = scheduler.submit(
                chance.choice(["GPU:0.3", "GPU:1", "GPU:2,linked", "GPU:0.5 GPU:1"]),
                priority=chance.randrange(2),
                on_placed=lambda _, placed=placed: placed.set(),
            )
            if chance.random() < 0.2 and ticket.cancel():
                continue
            if not placed.wait(30):
                faults.append(ticket)
                return
            change(ticket.allocation, 1)
            change(ticket.allocation, -1)
            scheduler.release(ticket.allocation)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert scheduler.pending() == ()
    assert {scheduler.free(device.id) for device in scheduler.inventory.devices} == {WHOLE}


def test_unknown_devices_are_key_errors():
    scheduler = Scheduler(machine(gpus(1)))
    with pytest.raises(KeyError):
        scheduler.free("unknown")
    with pytest.raises(KeyError):
        scheduler.holders("unknown")


def test_importing_is_cheap():
    costly = {"decimal", "difflib", "logging", "pluggy", "psutil", "rich", "typing_extensions"}
    code = f"import sys, anyaccel.scheduler; print(*({costly} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_what_others_hold_counts_until_it_is_over():
    scheduler = Scheduler(machine(gpus(2)))
    foreign = scheduler.occupy({"h100-0": Extent()}, holder="7f3c", note="alice, process 42")
    assert scheduler.free("h100-0") == 0
    verdict = scheduler.why("GPU:2")
    assert (verdict.fits_now, verdict.ever_fits) == (False, True)
    assert "held by 7f3c (alice, process 42)" in verdict.message
    scheduler.release(foreign)
    assert scheduler.why("GPU:2").fits_now
    nothing = scheduler.occupy({}, holder="7f3c")
    scheduler.release(nothing)
    scheduler.update(machine(gpus(1)))
    assert scheduler.occupy({"h100-0": Extent()}, holder="7f3c").devices == gpus(1)


def test_no_more_is_handed_out_of_a_device_than_is_ours():
    (device,) = gpus(1)
    scheduler = Scheduler(machine([replace(device, units=5_000)]))
    assert scheduler.free(device.id) == 5_000
    verdict = scheduler.why("GPU:1")
    assert (verdict.ever_fits, str(verdict.nearest)) == (False, "GPU:0.5")
    assert "ours in part only: acme/0" in verdict.message
    verdict = scheduler.why("GPU:0.75")
    assert (verdict.ever_fits, str(verdict.nearest)) == (False, "GPU:0.5")
    (reason,) = verdict.reasons
    assert (reason.code, reason.devices) == (ReasonCode.PART, (device.id,))
    assert "this process itself holds at most 0.5 of one GPU" in verdict.message
    assert "holds at most 40.0GiB of one GPU" in scheduler.why("GPU:60GiB").message
    scheduler.allocate("GPU:0.25")
    scheduler.allocate("GPU:0.25")
    assert not scheduler.why("GPU:0.25").fits_now


@pytest.mark.parametrize("priority", ["high", None, 0.5, float("nan")])
def test_a_priority_that_has_no_order_is_refused_before_it_waits(priority):
    one = Scheduler(machine(gpus(2)))
    held = one.allocate("GPU:2")
    with pytest.raises(UsageError, match="priority must be a whole number"):
        one.submit("GPU:2", priority=priority)
    behind = one.submit("GPU:1")
    one.release(held)
    assert behind.allocation is not None, "the calls of others go on"
