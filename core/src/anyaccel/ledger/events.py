"""Waiting for the ledger on an asyncio event loop."""

from __future__ import annotations

import asyncio

from anyaccel.ledger.acquisition import Acquisition


async def pause(attempt: Acquisition) -> None:
    """Wait until it may be worth another attempt."""
    loop = asyncio.get_running_loop()
    wake = loop.create_future()

    def finish(*, event: bool) -> None:
        if event:
            attempt.woken()
        if not wake.done():
            wake.set_result(None)

    descriptors = attempt.events()
    timer = loop.call_later(attempt.pause(), lambda: finish(event=False))
    for descriptor in descriptors:
        loop.add_reader(descriptor, lambda: finish(event=True))
    try:
        await wake
    finally:
        timer.cancel()
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
