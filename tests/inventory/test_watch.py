"""Watching a machine for changes."""

import asyncio
import threading
from threading import Event, Thread

import anyaccel
import pytest
from anyaccel.inventory.watch import Watch, compare
from anyaccel.model import Health, Inventory, VendorReport, VendorState, replace
from small_machines import gpus, machine

EVERY = 0.001
pytestmark = pytest.mark.usefixtures("acme")


def test_what_is_added_lost_and_changed_is_told(monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
    with anyaccel.watch(since=anyaccel.detect(), every=EVERY) as watch:
        monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:3")
        change = next(watch)
        assert [device.index for device in change.added] == [2]
        assert change.inventory == watch.inventory
        assert str(change) == f"added: {change.added[0].id}" or change.changed  # links of the others are new
        monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:1")
        assert len(next(watch).lost) == 2
        watch.close()
        assert list(watch) == []


def test_a_broken_device_is_a_change():
    (device,) = gpus(1)
    broken = replace(device, health=Health.UNHEALTHY)
    change = compare(machine([device]), machine([broken]))
    assert (change.changed, change.added, change.lost) == ((broken,), (), ())
    assert str(change) == "changed: h100-0"
    assert not compare(machine([device]), machine([device]))


def test_failed_is_not_lost():
    devices = gpus(2)
    fine = Inventory(machine="m", devices=devices, vendors=(VendorReport(vendor="acme", state=VendorState.OK),))
    failed = Inventory(machine="m", devices=(), vendors=(VendorReport(vendor="acme", state=VendorState.FAILED),))
    change = compare(fine, failed)
    assert change.inventory.devices == devices
    assert (change.lost, change.failed) == ((), ("acme",))
    assert str(change) == "detection failed: acme"
    assert not compare(change.inventory, failed)  # told once
    assert not compare(change.inventory, fine)


def test_a_vendor_that_is_well_again_and_fails_anew_is_told_anew():
    fine = Inventory(machine="m", devices=gpus(1), vendors=(VendorReport(vendor="acme", state=VendorState.OK),))
    failed = Inventory(machine="m", devices=(), vendors=(VendorReport(vendor="acme", state=VendorState.FAILED),))
    looks = iter([failed, fine, failed])
    watch = Watch(lambda: next(looks), fine, EVERY)
    assert [next(watch).failed, next(watch).failed] == [("acme",), ("acme",)]


def test_a_look_of_a_reader_that_was_cancelled_does_not_bring_the_past_back():
    one, two = machine(gpus(1)), machine(gpus(2))
    looking, go_on = Event(), Event()
    looks = iter([one, one, two, two])

    def look():
        found = next(looks)
        if not looking.is_set():
            looking.set()
            assert go_on.wait(60)
        return found

    watch = Watch(look, None, EVERY)
    others = set(threading.enumerate())  # readers that were cancelled before may not have ended yet

    async def main():
        first = asyncio.ensure_future(anext(watch))
        await asyncio.to_thread(looking.wait, 60)
        (late,) = [each for each in threading.enumerate() if each.name == "anyaccel-watch" and each not in others]
        first.cancel()
        await asyncio.wait([first])
        change = await anext(watch)
        go_on.set()
        await asyncio.to_thread(late.join)
        assert watch.inventory == change.inventory == two

    asyncio.run(main())


@pytest.mark.parametrize("every", [0, -1, float("nan"), [5]])
def test_what_is_no_interval_is_refused(every):
    with pytest.raises(anyaccel.UsageError, match="every must be a number of seconds"):
        anyaccel.watch(every=every)


def test_an_asyncio_loop_runs_on_while_it_looks(monkeypatch):
    monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:1")

    async def main():
        watch = anyaccel.watch(every=EVERY)  # nothing is known yet: the first look is where it begins
        task = asyncio.ensure_future(anext(watch))
        while watch.inventory is None and not task.done():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(EVERY)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.setenv("ANYACCEL_MACHINE", "sim:A1:2")
        async for change in watch:  # what a cancelled reader did not get is not lost
            assert len(change.added) == 1
            watch.close()

    asyncio.run(main())


def test_a_reader_that_waits_is_let_go_and_told_what_goes_wrong():
    watch = anyaccel.watch("sim:A1:1", every=3600)
    ended = Event()
    thread = Thread(target=lambda: (list(watch), ended.set()))
    thread.start()
    watch.close()
    assert ended.wait(60)
    with pytest.raises(anyaccel.MachineError):
        next(anyaccel.watch("sim:NoSuchThing:1"))

    async def main():
        return await anext(anyaccel.watch("sim:NoSuchThing:1"))

    with pytest.raises(anyaccel.MachineError):
        asyncio.run(main())
