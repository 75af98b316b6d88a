"""Ctrl-C, at any moment, leaves a scheduler that has lost no device, no request and no notice."""

import contextlib
from pathlib import Path

import anyaccel
import pytest
from interrupts import interrupted, release

WITHIN = f"{Path(anyaccel.__file__).parent}/scheduler/"


def allocated(scheduler, _):
    release(scheduler, scheduler.allocate("APU:1"))


def shared_out(scheduler, _):
    release(scheduler, scheduler.allocate("APU:0.5"))


def ganged(scheduler, _):
    release(scheduler, scheduler.allocate("APU:1", hosts=2))


def queued(scheduler, placed):
    """Let a request wait for a device, which is placed once that is released."""
    held = scheduler.allocate("APU:2")
    tickets = []
    try:
        tickets.append(scheduler.submit("APU:1", on_placed=placed.append))
        tickets.append(scheduler.submit("APU:2", on_placed=placed.append))
        tickets[1].cancel()
    finally:
        try:
            release(scheduler, held)
        finally:
            for ticket in tickets:
                with contextlib.suppress(KeyboardInterrupt):
                    ticket.cancel()
                assert ticket.allocation is None or placed == [ticket]
                if ticket.allocation is not None:
                    with contextlib.suppress(KeyboardInterrupt):
                        release(scheduler, ticket.allocation)


def changed(scheduler, _):
    held = scheduler.allocate("APU:1")
    try:
        scheduler.update(scheduler.inventory)
    finally:
        release(scheduler, held)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("work", [allocated, shared_out, queued, changed, ganged])
def test_a_scheduler_loses_nothing_whenever_an_interrupt_comes(acme, work):
    inventory = anyaccel.detect("sim:A1:2")
    scheduler = anyaccel.open_scheduler({"a": inventory, "b": inventory} if work is ganged else inventory)
    books = [scheduler.on("a"), scheduler.on("b")] if work is ganged else [scheduler]
    work(scheduler, [])
    for where in interrupted(lambda: work(scheduler, []), WITHIN):
        assert scheduler.pending() == (), where
        for each in books:
            for device in inventory.devices:
                assert each.holders(device.id) == (), where
                assert each.free(device.id) == 10_000, where
        assert scheduler.why("APU:2").fits_now, where
