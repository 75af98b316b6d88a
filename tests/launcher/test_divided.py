"""A device and its parts are never both held: in one scheduler, and between processes that see different ones."""

import contextlib
import json
import random
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.errors import NeverFitsError, NotFreeError
from anyaccel.model import replace
from holders import end, hold_and_show, in_line
from waiting import PATIENCE, until

DIVIDED = (Path(__file__).parent.parent / "vendors" / "divided.py").read_text()
SHOW = [sys.executable, "-c", "import os; print(os.environ['CARDS_VISIBLE'])"]
hold = partial(hold_and_show, "CARDS_VISIBLE")


@pytest.fixture(autouse=True)
def divided(install):
    return install("divided", DIVIDED)


@pytest.fixture
def cards(monkeypatch):
    """A scheduler of so many cards, each with two halves."""

    def cards(count=1):
        monkeypatch.setenv("CARDS", str(count))
        return aa.open_scheduler(aa.detect())

    return cards


def ids(allocation):
    return [device.id for device in allocation.devices]


def test_who_holds_a_part_keeps_the_device_from_others_and_the_other_way_round(cards):
    scheduler = cards()
    first, second = scheduler.allocate("Half:1", note="job"), scheduler.allocate("Half:0.5")
    with pytest.raises(NotFreeError, match=rf"0 of 1 Whole free; held by {first.id} \(job, its part card-0-a\), "):
        scheduler.allocate("Whole:1")
    with pytest.raises(NotFreeError, match=r"no Whole has 0\.1 free"):
        scheduler.allocate("Whole:0.1")
    scheduler.release(first)
    assert scheduler.free("card-0") == 0
    scheduler.release(second)
    share = scheduler.allocate("Whole:0.5")
    assert ids(share) == ["card-0"]
    with pytest.raises(NotFreeError, match=rf"held by {share.id} \(Whole:0.5, all of card-0\)"):
        scheduler.allocate("Half:1")
    assert ids(scheduler.allocate("Whole:0.5")) == ["card-0"]


def test_the_use_of_a_device_without_a_lease_is_use_of_its_parts(divided):
    """The parts of a device in use are in use, too, and of these the reason names the device that is."""
    hook = """
from anyaccel.plugin import DeviceProcess, Stats

@hookimpl
def anyaccel_stats(devices, ctx):
    return {"card-0": Stats(processes=(DeviceProcess(pid=7),))}
"""
    divided.write_text(DIVIDED + hook)
    with aa.acquire("Half:1", wait=0) as half:
        assert ids(half) == ["card-0-a"]
    reason = "^Half:1 is not free: divided/0 is used without a lease, by process 7\\."
    with pytest.raises(NotFreeError, match=reason):
        aa.acquire("Half:1", wait=0, avoid_busy=True)


def test_one_request_never_gets_a_device_and_its_part(cards):
    assert sorted(ids(cards(2).allocate("Whole:1 Half:2"))) == ["card-0", "card-1-a", "card-1-b"]
    assert ids(cards(1).allocate("CARD:2,mixed")) == ["card-0-a", "card-0-b"]
    with pytest.raises(NeverFitsError, match="each term fits alone"):
        cards(1).allocate("Whole:1 Half:1")
    verdict = cards(1).why("CARD:3,mixed")
    assert (verdict.ever_fits, [reason.code.value for reason in verdict.reasons]) == (False, ["parts"])
    assert "no 3 of 1 Whole, 2 Half are apart" in verdict.message
    assert str(verdict.nearest) == "CARD:2,mixed"


def test_a_request_for_a_device_is_not_passed_by_requests_for_its_parts(cards):
    scheduler = cards(2)
    half = scheduler.allocate("Half:1")
    wholes = scheduler.submit("Whole:2")
    with pytest.raises(NotFreeError, match="waiting for the same devices in front"):
        scheduler.allocate("Half:1")
    scheduler.release(half)
    assert sorted(ids(wholes.allocation)) == ["card-0", "card-1"]
    halves = [scheduler.submit("Half:2"), scheduler.submit("Half:2")]
    scheduler.release(wholes.allocation)
    assert [ids(ticket.allocation)[0] for ticket in halves] == ["card-0-a", "card-1-a"]


def test_neighboring_parts_do_not_wait_for_each_other(cards):
    scheduler = cards(1)
    scheduler.allocate("Half:0.6")
    waiting = scheduler.submit("Half:2")
    assert waiting.allocation is None
    assert scheduler.pending() == (waiting,)


@pytest.mark.parametrize("seed", range(20))
def test_no_request_ever_gets_a_part_of_what_another_one_holds(cards, seed):
    scheduler, rng, held = cards(3), random.Random(seed), []
    for _ in range(150):
        if held and rng.random() < 0.45:
            scheduler.release(held.pop(rng.randrange(len(held))))
        with contextlib.suppress(NotFreeError):
            held.append(scheduler.allocate(rng.choice(["Whole", "Whole:0.5", "Half", "Half:0.3", "CARD:2,mixed"])))
        taken = sorted({device for allocation in held for device in ids(allocation)})
        assert not [one for one, other in pairwise(taken) if other.startswith(f"{one}-")], taken
    for allocation in held:
        scheduler.release(allocation)
    assert {scheduler.free(device.id) for device in scheduler.inventory.devices} == {10_000}


def test_processes_exclude_each_other_whatever_they_see(anyaccel):
    holder, seen = hold("Half:1", VIEW="half")
    assert seen == "card-0-a"
    for view in ("whole", "whole half"):
        refused = anyaccel("run", "Whole:1", "--no-wait", "--", *SHOW, env={"VIEW": view})
        assert (refused.returncode, "; you have " in refused.stderr) == (4, True), refused.stderr
    for view in ("half", "whole half"):
        done = anyaccel("run", "Half:1", "--no-wait", "--", *SHOW, env={"VIEW": view})
        assert done.stdout.strip() == "card-0-b", done.stderr
    end(holder)
    holder, seen = hold("Whole:0.5", VIEW="whole")
    assert seen == "card-0"
    for view in ("half", "whole half"):
        refused = anyaccel("run", "Half:0.1", "--no-wait", "--", *SHOW, env={"VIEW": view})
        assert (refused.returncode, "; you have " in refused.stderr) == (4, True), refused.stderr
    assert anyaccel("run", "Whole:0.5", "--no-wait", "--", *SHOW).stdout.strip() == "card-0"
    end(holder)
    assert anyaccel("run", "Half:2", "--no-wait", "--", *SHOW).stdout.strip() == "card-0-a,card-0-b"


def test_a_held_part_that_is_not_listed_keeps_the_device_from_others_and_no_other_part():
    inventory = aa.detect()
    some = replace(inventory, devices=tuple(each for each in inventory.devices if each.id != "card-0-a"))
    with aa.acquire("Half:1", inventory=inventory) as held:
        assert ids(held) == ["card-0-a"]
        assert aa.why("Half:1", inventory=some).fits_now
        scheduler = aa.open_scheduler(some, shared=True)
        assert (scheduler.free("card-0"), scheduler.free("card-0-b")) == (0, 10_000)
        for request in ("Whole:1", "Whole:0.1"):
            with pytest.raises(NotFreeError, match="you have divided/0"):
                scheduler.allocate(request)
            with pytest.raises(NotFreeError):
                aa.acquire(request, inventory=some, wait=0)
        taken = scheduler.allocate("Half:1")
        assert ids(taken) == ["card-0-b"]
        scheduler.release(taken)
        with aa.acquire("Half:1", inventory=some, wait=0) as other:
            assert ids(other) == ["card-0-b"]
    with aa.acquire("Whole:1", inventory=some, wait=0):
        pass


def test_it_is_said_through_what_a_device_is_held(anyaccel):
    holder, _ = hold("Half:1")
    shown = {each["id"]: each for each in json.loads(anyaccel("status", "--json").stdout)["devices"]}
    assert [(name, each["free"]) for name, each in shown.items()] == [("card-0", 0), ("card-0-a", 0), ("card-0-b", 1)]
    ((whole,), (part,)) = shown["card-0"]["holders"], shown["card-0-a"]["holders"]
    assert (whole["lease"], whole["through"], part["through"]) == (part["lease"], "card-0-a", None)
    assert "with card-0-a" in anyaccel("status").stdout
    why = json.loads(anyaccel("why", "Whole:1", "--json").stdout)
    assert "you have divided/1 (Half:1, lease " in why["message"]
    assert why["reasons"][0]["holders"] == [part["lease"]]
    end(holder)
    holder, _ = hold("Whole:1", VIEW="whole")
    (half, _) = json.loads(anyaccel("status", "--json", env={"VIEW": "half"}).stdout)["devices"]
    assert (half["free"], half["holders"][0]["through"]) == (0, "card-0")
    end(holder)


def test_who_waits_in_the_machines_line_gets_what_parts_leave(anyaccel):
    (first, one), (second, other) = hold("Half:1"), hold("Half:1")
    assert (one, other) == ("card-0-a", "card-0-b")
    waiter = subprocess.Popen([sys.executable, "-m", "anyaccel", "run", "Whole:1", "--", *SHOW], stdout=-1, text=True)
    in_line(1)
    end(first)
    with pytest.raises(subprocess.TimeoutExpired):
        waiter.wait(0.5)
    passing = ("run", "Half:1", "--no-wait", "--", *SHOW)
    # Where who waits has not shown for a while that it does, as on a machine that does much else, it is passed.
    until(lambda: anyaccel(*passing).returncode == 4, "a half not to be given to who came later")
    end(second)
    assert waiter.communicate(timeout=PATIENCE)[0].strip() == "card-0"


def test_a_worker_with_a_part_has_neither_the_device_nor_its_other_parts(anyaccel):
    inner = f"{sys.executable} -m anyaccel run CARD:1 --no-wait -- printenv CARDS_VISIBLE"
    assert anyaccel("run", "Half:1", "--", "sh", "-c", inner).stdout.strip() == "card-0-a"
    outer = anyaccel("run", "Half:1", "--", "sh", "-c", f"{sys.executable} -m anyaccel run Whole:1 --no-wait -- true")
    assert outer.returncode == 3, outer.stderr


@pytest.mark.parametrize("shared", [True, False])
def test_a_kept_worker_gives_its_device_back_for_a_part_and_a_part_for_the_device(shared):
    program = f"""
import anyaccel, os
def work():
    return os.environ["CARDS_VISIBLE"]
if __name__ == "__main__":
    options = dict(shared={shared}, max_calls=0, idle=300)
    with anyaccel.Pool("Whole:1", **options) as wholes, anyaccel.Pool("Half:1", **options) as halves:
        for pool in (wholes, halves, wholes):
            print(pool.submit(work).result(30))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["card-0", "card-0-a", "card-0"], done.stderr


def test_ray_counts_parts_and_not_what_they_are_parts_of(cards):
    exports = pytest.importorskip("anyaccel_export.ray", reason="needs anyaccel-export")
    devices = cards(2).inventory.devices
    assert [device.type for device in exports.by_resource(devices)["CARD"]] == ["Half"] * 4
    assert exports.node_resources(devices) == {"CARD": 4, "accelerator_type:Half": 1}


def test_parts_are_exported_and_not_what_they_are_parts_of(anyaccel):
    pytest.importorskip("anyaccel_export", reason="needs anyaccel-export")
    exported = anyaccel("export", "hyperqueue")
    assert ("card-0-b" in exported.stdout, "card-0 is left out" in exported.stderr) == (True, True), exported
    assert "card-0," not in exported.stdout


@pytest.mark.parametrize("parent", ["name", "card * 2", "'a b'"])
def test_a_parent_that_cannot_be_is_refused(parent, install, anyaccel, monkeypatch):
    faulty = DIVIDED.replace('"divided"', '"faulty"').replace("parent=parent", f"parent=({parent})")
    install("faulty", faulty.replace("card * 2", "'card-0' if parent is None else parent"))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "faulty")
    (vendor,) = json.loads(anyaccel("status", "--json").stdout)["vendors"]
    assert (vendor["state"], "Device.parent must" in vendor["reason"]) == ("failed", True)
