"""Times as text, in every function that takes a time."""

import asyncio
import time

import anyaccel as aa
import pytest

MACHINE = "sim:A1:2"


async def schedule(scheduler):
    """Take the only device for 90 minutes, then wait for it in vain."""
    scheduler.allocate("A1:2", time="1:30:00")
    scheduler.submit("A1", time="2h").cancel()
    await scheduler.acquire("A1", timeout="0.01s", time="90m")


def test_a_scheduler_takes_texts(acme):
    with pytest.raises(aa.NotFreeError, match=r"not free within 0\.01 s"):
        asyncio.run(schedule(aa.open_scheduler(aa.detect(MACHINE, timeout="1m"), shared=False)))


def test_a_pool_takes_texts(acme):
    with aa.Pool("A1", machine=MACHINE, shared=False, timeout="1h", grace="1m", idle="2m", signal="USR1@30m") as pool:
        assert pool.submit(abs, -1).result("10m") == 1
        assert pool.submit(abs, -1).exception("10m") is None
        assert list(pool.map(abs, [-1, -2], timeout="10m")) == [1, 2]
        assert sorted(pool.map_unordered(abs, [-1, -2], timeout="10m")) == [1, 2]
        actors = pool.actors(list, 1, [1])
        assert list(actors.map("count", [1], timeout="10m")) == [1]
        with pytest.raises(aa.TaskTimeoutError):
            pool.options(timeout="0.1s").submit(time.sleep, 1000).result()


def test_functions_that_ask_the_machine_take_texts(acme):
    found = aa.detect(MACHINE, timeout="1:00:00")
    assert aa.stats(found, timeout="1m") == ({}, ())
    assert aa.prepare("A1", machine=MACHINE, timeout="1m").environment.allocation.devices
    with aa.watch(MACHINE, every="0.1s", timeout="1m", since=aa.detect("sim:A1:1")) as changes:
        assert [device.name for device in next(iter(changes)).added] == ["acme/1"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: aa.detect(MACHINE, timeout="soon"),
        lambda: aa.stats(aa.detect(MACHINE), timeout="soon"),
        lambda: aa.watch(MACHINE, timeout="soon"),
        lambda: aa.Pool("A1", machine=MACHINE, timeout="soon"),
        lambda: aa.Pool("A1", machine=MACHINE, shared=False).map(abs, [1], timeout="soon"),
        lambda: aa.open_scheduler(aa.detect(MACHINE), shared=False).submit("A1", time="soon"),
        lambda: aa.acquire("A1", machine=MACHINE, timeout="soon"),
    ],
)
def test_a_text_that_is_no_duration_is_refused(call, acme):
    with pytest.raises(aa.UsageError, match=r"time(out)? must be a duration such as 90s, 15m, 2h, 1h30m or 1:30:00"):
        call()
