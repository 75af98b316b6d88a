"""Ctrl-C, at any moment, leaves no device held that cannot be released."""

import asyncio
import os
from pathlib import Path

import anyaccel
import pytest
from anyaccel.launcher.use import get_process_lease
from anyaccel.ledger import Ledger
from interrupts import interrupted, release
from waiting import until

MACHINE = "sim:A1:2"
ROOT = Path(anyaccel.__file__).parent
WITHIN = tuple(f"{ROOT / room}{os.sep}" for room in ("launcher", "ledger"))


def acquired_and_kept(inventory):
    anyaccel.acquire("APU:1", inventory=inventory, wait=0).release()


def acquired_in_a_loop(inventory):
    async def acquire():
        (await anyaccel.acquire_async("APU:1", inventory=inventory, wait=0)).release()

    asyncio.run(acquire())


def used(inventory):
    anyaccel.use("APU:1", inventory=inventory, wait=0).release()


def allocated(inventory):
    scheduler = anyaccel.open_scheduler(inventory, shared=True)
    allocation = scheduler.allocate("APU:1")
    try:
        release(scheduler, allocation)
    finally:
        assert scheduler.free(inventory.devices[0].id) == 10_000


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # coroutines that were never begun
@pytest.mark.parametrize("work", [acquired_and_kept, acquired_in_a_loop, used, allocated])
def test_devices_go_back_whenever_an_interrupt_comes(acme, work):
    inventory = anyaccel.detect(MACHINE)
    work(inventory)  # which imports what it needs
    before = dict(os.environ)
    for where in interrupted(lambda: work(inventory), WITHIN):
        assert not Ledger.open().leases(), where
        assert not Ledger.open().tickets(), where
        assert dict(os.environ) == before, where
        assert get_process_lease() is None, where


def left_to_a_command(inventory):
    lease = anyaccel.acquire("APU:1", inventory=inventory, wait=0)
    try:
        lease.popen(["true"]).wait()
    finally:
        lease.release()


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")  # a command that was started, but not returned
def test_an_interrupt_keeps_no_device_while_it_is_left_to_commands(acme):
    inventory = anyaccel.detect(MACHINE)
    left_to_a_command(inventory)
    for where in interrupted(
        lambda: left_to_a_command(inventory), (f"{ROOT}/ledger/lease.py", f"{ROOT}/ledger/directory.py")
    ):
        until(lambda: not Ledger.open().leases(), where)  # the command may still run
