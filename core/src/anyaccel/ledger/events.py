"""Waiting for the ledger on an asyncio event loop."""

from __future__ import annotations

import asyncio

from anyaccel.ledger.acquisition import Acquisition


async def pause(request: Acquisition) -> None:
    """Wait until it may be worth another look."""
    loop = asyncio.get_running_loop()
    wake = loop.create_future()

    def finish() -> None:
        if not wake.done():
            wake.set_result(None)

    def note(descriptor: int) -> None:
        if not wake.done() and request.noted(descriptor):
            finish()

    descriptors = request.descriptors()
    timer = loop.call_later(request.pause(), finish)
    for descriptor in descriptors:
        loop.add_reader(descriptor, note, descriptor)
    try:
        await wake
    finally:
        timer.cancel()
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
