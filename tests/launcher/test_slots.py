"""Shares of a device with slots are parts of it by position: no two holders have one, and each knows its own."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import anyaccel as aa
import pytest
from anyaccel.launcher.environment import worker_environment
from anyaccel.ledger import Ledger, entries
from anyaccel_testing import State, run_checks
from holders import end, hold_and_show

SLICES = (Path(__file__).parent.parent / "vendors" / "slices.py").read_text()
SHOW = [sys.executable, "-c", "import os; print(os.environ['SLICES'])"]
hold = partial(hold_and_show, "SLICES")
RUN = f"{sys.executable} -m anyaccel run"
MASKS = ("C15", "C16", "C17", "C18", "C19", "C20")
LOW, HIGH = "slice-0:0-1-2-3", "slice-0:4-5-6-7"


@pytest.fixture(autouse=True)
def slices(install):
    return install("slices", SLICES)


def mask(scheduler, request):
    """The mask of a worker that a scheduler gives something, and what it gives."""
    allocation = scheduler.allocate(request)
    return worker_environment(allocation, scheduler.inventory).set["SLICES"], allocation


def test_two_halves_in_one_scheduler_have_different_masks():
    scheduler = aa.open_scheduler(aa.detect())
    low, first = mask(scheduler, "SLICE:0.5")
    high, _ = mask(scheduler, "SLICE:0.5")
    assert (low, high) == (LOW, HIGH)
    (share,) = first.shares
    assert (share.slots, share.units, share.memory_bytes) == ((0, 1, 2, 3), 5_000, 40 << 30)
    scheduler.release(first)
    assert mask(scheduler, "SLICE:0.25")[0] == "slice-0:0-1"
    assert mask(scheduler, "SLICE:0.25")[0] == "slice-0:2-3"


def test_two_halves_of_one_request_are_one_mask():
    scheduler = aa.open_scheduler(aa.detect())
    both, allocation = mask(scheduler, "SLICE:0.25 SLICE:0.25")
    assert [share.slots for share in allocation.shares] == [(0, 1), (2, 3)]
    assert both == LOW
    assert mask(scheduler, "SLICE:0.5")[0] == HIGH


def test_a_whole_device_has_no_slots_in_its_mask():
    scheduler = aa.open_scheduler(aa.detect())
    shown, allocation = mask(scheduler, "SLICE:1")
    assert (shown, allocation.shares[0].slots) == ("slice-0", ())
    scheduler.release(allocation)
    assert mask(scheduler, "SLICE:0.5")[0] == LOW


def test_a_share_is_rounded_up_to_whole_slots():
    scheduler = aa.open_scheduler(aa.detect())
    shown, allocation = mask(scheduler, "SLICE:0.3")
    assert (shown, allocation.shares[0].units) == ("slice-0:0-1-2", 3_750)
    assert scheduler.why("SLICE:0.7").reasons[0].message.startswith("no SLICE has 0.7 free, the most is 0.625")
    assert mask(scheduler, "SLICE:0.6")[1].shares[0].units == 6_250
    assert mask(aa.open_scheduler(aa.detect()), "SLICE:0.9,mem=80GiB")[1].shares[0].whole


def test_two_processes_have_different_halves_and_a_third_has_none(anyaccel):
    (first, low), (second, high) = hold("SLICE:0.5"), hold("SLICE:0.5")
    assert (low, high) == (LOW, HIGH)
    assert anyaccel("run", "SLICE:0.125", "--no-wait", "--", *SHOW).returncode == 4
    (device,) = json.loads(anyaccel("status", "--json").stdout)["devices"]
    assert (device["slots"], device["free"]) == (8, 0)
    assert sorted(each["slots"] for each in device["holders"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert "(slots 4-7)" in anyaccel("status").stdout
    end(first)
    assert anyaccel("run", "SLICE:0.25", "--no-wait", "--", *SHOW).stdout.strip() == "slice-0:0-1"
    assert anyaccel("run", "SLICE:1", "--no-wait", "--", *SHOW).returncode == 4
    why = json.loads(anyaccel("why", "SLICE:0.625", "--json").stdout)
    assert (why["fits_now"], why["nearest_now"]) == (False, "SLICE:0.5")
    end(second)


def test_many_who_come_at_once_have_different_slots():
    with ThreadPoolExecutor(8) as threads:
        held = list(threads.map(hold, ["SLICE:0.125"] * 8))
    assert sorted(seen for _, seen in held) == [f"slice-0:{slot}" for slot in range(8)]
    end(*(holder for holder, _ in held))


def test_a_lease_without_slots_may_have_any(anyaccel):
    """As a process writes it that sees the device without slots: no slot is safe then, in any process."""
    state = Path(Ledger.open().path)
    if not state.exists():
        end(hold("SLICE:0.5")[0])
    holder = subprocess.Popen(["sleep", "60"])
    from anyaccel.linux.process import start_time

    owner = f"{holder.pid}.{start_time(holder.pid)}.{'0' * 16}"
    name = f"v2.slices%2Fslice-0.2500.{owner}.{entries.new_nonce()}"
    (state / name).touch()
    refused = anyaccel("run", "SLICE:0.125", "--no-wait", "--", *SHOW)
    holder.kill()
    holder.wait()
    assert refused.returncode == 4, refused.stderr
    assert anyaccel("run", "SLICE:0.125", "--no-wait", "--", *SHOW).stdout.strip() == "slice-0:0"


def test_a_worker_divides_its_own_slots_only(anyaccel):
    other, low = hold("SLICE:0.5")
    inner = (
        f"{RUN} SLICE:0.25 -- sh -c 'echo $SLICES; {RUN} SLICE:0.125 -- printenv SLICES;"
        f" {RUN} SLICE:0.25 --no-wait -- printenv SLICES'; {RUN} SLICE:0.5 -- printenv SLICES;"
        f" {RUN} SLICE:0.75 --no-wait -- true; echo $?"
    )
    done = anyaccel("run", "SLICE:0.5", "--", "sh", "-c", inner)
    assert low == LOW
    assert done.stdout.split() == ["slice-0:4-5", "slice-0:4", "slice-0:4-5", HIGH, "3"], done.stderr
    end(other)


def test_two_in_one_worker_have_different_slots_of_it(anyaccel):
    program = """
import anyaccel, os, subprocess, sys
with anyaccel.acquire("SLICE:0.25") as one, anyaccel.acquire("SLICE:0.25") as two:
    print(one.environ["SLICES"], two.environ["SLICES"])
    print(*(device.own_slots for device in anyaccel.detect().devices))
    try:
        anyaccel.acquire("SLICE:0.125", wait=0)
    except anyaccel.NotFreeError as error:
        print(error.code)
"""
    done = anyaccel("run", "SLICE:0.5", "--", sys.executable, "-c", program)
    first, second, third = done.stdout.splitlines()
    assert (first, second, third) == ("slice-0:0-1 slice-0:2-3", "(0, 1, 2, 3)", "not-free"), done.stderr


@pytest.mark.parametrize("shared", [True, False])
def test_workers_of_a_pool_have_different_halves(shared, tmp_path):
    program = f"""
import anyaccel, os, pathlib, time
def work(number):
    here = pathlib.Path({str(tmp_path)!r})
    (here / f"begun-{{number}}").touch()
    while len([*here.glob("begun-*")]) < 2:  # or one worker might do both
        time.sleep(0.01)
    return os.environ["SLICES"], anyaccel.current().shares[0].slots
if __name__ == "__main__":
    with anyaccel.Pool("SLICE:0.5", shared={shared}) as pool:
        print(sorted(pool.map(work, range(2))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str([(LOW, (0, 1, 2, 3)), (HIGH, (4, 5, 6, 7))]), done.stderr


def test_a_mask_that_we_start_in_leaves_its_slots_only(anyaccel, monkeypatch):
    """Without any lease of ours: another launcher, or a container, has set the mask."""
    monkeypatch.setenv("SLICES", "slice-0:2-3-4-5")
    (device,) = aa.detect().devices
    assert (device.units, device.own_slots, device.visible) == (5_000, (2, 3, 4, 5), True)
    first, seen = hold("SLICE:0.25")
    assert seen == "slice-0:2-3"
    monkeypatch.setenv("SLICES", "slice-0:0-1-2-3")
    assert anyaccel("run", "SLICE:0.25", "--no-wait", "--", *SHOW).stdout.strip() == "slice-0:0-1"
    assert anyaccel("run", "SLICE:0.5", "--no-wait", "--", *SHOW).returncode == 4
    assert anyaccel("run", "SLICE:1", "--no-wait", "--", *SHOW).returncode == 3
    end(first)
    assert anyaccel("run", "SLICE:0.5", "--no-wait", "--", *SHOW).stdout.strip() == LOW
    monkeypatch.setenv("SLICES", "slice-0:8")
    (device,) = aa.detect().devices
    assert not device.visible


@pytest.mark.parametrize("slots", ["()", "(8,)", "(0, 0)", "(-1,)", "[0]", '("0",)'])
def test_slots_that_a_device_has_not_are_not_visible(slots, install, monkeypatch):
    broken = SLICES.replace('"slices"', '"broken"').replace("slots=numbers)", f"slots={slots})")
    install("broken", broken)
    monkeypatch.setenv("ANYACCEL_PLUGINS", "broken")
    monkeypatch.setenv("SLICES", "slice-0:1")
    inventory = aa.detect()
    assert [device.visible for device in inventory.devices] == [False]
    assert "VisiblePart" in inventory.vendors[0].notes[0]


def test_devices_with_slots_and_divided_ones_can_be_simulated(anyaccel):
    first, second = aa.detect("sim:Sliced:2").devices
    assert (first.slots, second.slots, first.parent) == (8, 8, None)
    scheduler = aa.open_scheduler(aa.detect("sim:Sliced"))
    assert mask(scheduler, "Sliced:0.5")[0] != mask(scheduler, "Sliced:0.5")[0]
    devices = aa.detect("sim:sliced/slab:2,Sliced").devices
    assert [device.type for device in devices] == ["Slab"] * 6 + ["Sliced"]
    parents = [device.parent for device in devices]
    assert (len(set(parents[:3])), len(set(parents[3:6])), len(set(parents))) == (1, 1, 3)
    assert {device.id for device in devices}.isdisjoint(parents)
    assert len({device.id for device in devices}) == 7
    unknown = anyaccel("--machine", "sim:Sliced/Slabs")
    assert (unknown.returncode, "did you mean Sliced/Slab" in unknown.stderr) == (2, True)


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (("slots=2,", "slots=3,"), "Product.slots must be one of 1, 2, 4"),
        (('{"Slab": 3}', '{"Slap": 3}'), "Product.parts must name other products of this plug-in"),
        (('{"Slab": 3}', '{"Slab": 0}'), "Product.parts must name other products of this plug-in"),
        (('{"Slab": 3}', '{"Sliced": 3}'), "Product.parts must name other products of this plug-in"),
    ],
)
def test_products_that_cannot_be_are_refused(edit, rule, install, anyaccel, monkeypatch):
    install("broken", SLICES.replace('"slices"', '"broken"').replace(*edit))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "broken")
    assert rule in anyaccel("--machine", "sim:Sliced").stderr


def test_a_product_that_is_not_simulated_is_not_checked(install, monkeypatch):
    install("broken", SLICES.replace('"slices"', '"broken"').replace("slots=8,", "slots=3,"))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "broken")
    with pytest.raises(aa.MachineError, match=r"Product\.slots must be one of"):
        aa.detect("sim:Sliced")
    assert [device.type for device in aa.detect("sim:Slab").devices] == ["Slab"]


def test_a_vendor_with_slots_passes_the_checks_of_masks():
    results = run_checks("slices", only=MASKS)
    assert [result for result in results if result.state is not State.OK] == []
    assert {result.check for result in results} == set(MASKS)


@pytest.mark.parametrize(
    ("edit", "check", "said"),
    [
        (("if share and share.slots else", "if share and share.whole else"), "C16", "name Share.slots in the mask"),
        (("slots=numbers)", "slots=(0,))"), "C19", "must be half of slice"),
    ],
)
def test_a_mask_without_slots_fails_a_check(edit, check, said, install, monkeypatch):
    install("broken", SLICES.replace('"slices"', '"broken"').replace(*edit))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "broken")
    found = {
        result.check: result.message for result in run_checks("broken", only=[check]) if result.state is State.FAILED
    }
    assert said in found[check]


@pytest.mark.parametrize("slots", [0, 3, 7, 32, 40])
def test_slots_that_are_no_whole_part_of_a_device_are_refused(slots, install, anyaccel, monkeypatch):
    install("uneven", SLICES.replace('"slices"', '"uneven"').replace("slots=8", f"slots={slots}"))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "uneven")
    (vendor,) = json.loads(anyaccel("status", "--json").stdout)["vendors"]
    assert vendor["state"] == "failed"
    assert f"Device.slots must be one of 1, 2, 4, 5, 8, 10, 16, 20, 25 (got {slots} for" in vendor["reason"]


def test_a_device_with_slots_is_shared_by_them(install, anyaccel, monkeypatch):
    install("shared", SLICES.replace('"slices"', '"shared"').replace("PARTITIONED", "SHARED"))
    monkeypatch.setenv("ANYACCEL_PLUGINS", "shared")
    (vendor,) = json.loads(anyaccel("status", "--json").stdout)["vendors"]
    assert (vendor["state"], "it must return Fractional.PARTITIONED" in vendor["reason"]) == ("failed", True)
