"""Waiting for the ledger on an asyncio event loop."""

from __future__ import annotations

import asyncio

from anyaccel.ledger.waiting import Waiter


async def pause(waiter: Waiter) -> None:
    """Wait until it may be worth another look."""
    loop = asyncio.get_running_loop()
    wake = loop.create_future()

    def finish() -> None:
        if not wake.done():
            wake.set_result(None)

    def note(descriptor: int) -> None:
        if not wake.done() and waiter.noted(descriptor):
            finish()

    descriptors = waiter.descriptors()
    timer = loop.call_later(waiter.pause(), finish)
    for descriptor in descriptors:
        loop.add_reader(descriptor, note, descriptor)
    try:
        await wake
    finally:
        timer.cancel()
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
