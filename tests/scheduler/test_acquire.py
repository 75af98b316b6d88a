"""Waiting for devices on an asyncio loop."""

import asyncio
import gc
from threading import Event, Thread, current_thread

import pytest
from anyaccel.errors import NeverFitsError, NotFreeError, UsageError
from anyaccel.scheduler import Scheduler
from small_machines import gpus, machine


def new(count=1):
    return Scheduler(machine(gpus(count)))


async def waiting(scheduler, count):
    """Until so many wait."""
    while len(scheduler.pending()) != count:  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0)


def test_what_is_free_is_there_at_once_and_what_is_not_when_another_thread_releases_it():
    scheduler = new()

    async def main():
        first = await scheduler.acquire("GPU")
        task = asyncio.create_task(scheduler.acquire("GPU:0.5", note="second"))
        await waiting(scheduler, 1)
        Thread(target=scheduler.release, args=(first,)).start()
        return await task

    assert asyncio.run(main()).shares[0].units == 5_000
    assert scheduler.free("h100-0") == 5_000


def test_the_higher_priority_comes_first():
    scheduler = new()
    order = []

    async def job(name, priority):
        allocation = await scheduler.acquire("GPU", priority=priority)
        order.append(name)
        scheduler.release(allocation)

    async def main():
        first = await scheduler.acquire("GPU")
        async with asyncio.TaskGroup() as group:
            for name, priority in (("low", 0), ("later", 0), ("high", 1)):
                group.create_task(job(name, priority))
            await waiting(scheduler, 3)
            scheduler.release(first)

    asyncio.run(main())
    assert order == ["high", "low", "later"]


def test_when_the_time_is_over_the_verdict_says_why_and_no_request_waits():
    scheduler = new()
    held = scheduler.allocate("GPU", note="training of ada")
    with pytest.raises(NotFreeError, match=r"not free within 0\.01 s: .*training of ada") as caught:
        asyncio.run(scheduler.acquire("GPU", timeout=0.01))
    assert caught.value.verdict.ever_fits
    assert scheduler.pending() == ()
    scheduler.release(held)
    with pytest.raises(NeverFitsError):
        asyncio.run(scheduler.acquire("GPU:2"))


@pytest.mark.parametrize("served", [False, True], ids=["while it waits", "when it has just been served"])
def test_a_task_that_is_cancelled_holds_nothing(served):
    scheduler = new()

    async def main():
        first = await scheduler.acquire("GPU")
        task = asyncio.create_task(scheduler.acquire("GPU"))
        await waiting(scheduler, 1)
        if served:
            scheduler.release(first)  # the task has not run since
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not served:
            scheduler.release(first)

    asyncio.run(main())
    assert scheduler.pending() == ()
    assert scheduler.free("h100-0") == 10_000


def test_a_ticket_can_be_awaited_by_many_as_often_as_they_like():
    scheduler = new()

    async def main():
        first = scheduler.allocate("GPU")
        ticket = scheduler.submit("GPU")

        async def look():
            return await ticket

        impatient, *others = [asyncio.create_task(look()) for _ in range(3)]
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert scheduler.pending() == (ticket,)  # who stops to look does not give the place up
        scheduler.release(first)
        return [await each for each in others], await ticket

    seen, again = asyncio.run(main())
    assert seen == [again, again]


def test_a_ticket_that_is_cancelled_wakes_the_tasks_that_await_it():
    scheduler = new()

    async def main():
        scheduler.allocate("GPU")
        ticket = scheduler.submit("GPU")
        Thread(target=ticket.cancel).start()
        with pytest.raises(asyncio.CancelledError, match=r"ticket t1 \(GPU:1\) was cancelled"):
            await ticket

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [[5], float("nan")])
@pytest.mark.parametrize("free", [True, False])
def test_a_time_that_is_none_takes_nothing_and_waits_for_nothing(timeout, free):
    scheduler = new()
    held = None if free else scheduler.allocate("GPU")
    with pytest.raises(UsageError, match=r"timeout must be a number of seconds \(any\) or a text such as"):
        asyncio.run(scheduler.acquire("GPU", timeout=timeout))
    assert scheduler.pending() == ()
    if held:
        scheduler.release(held)
    scheduler.allocate("GPU")
    with pytest.raises(NotFreeError, match="not free within 0 s"):
        asyncio.run(scheduler.acquire("GPU", timeout=-1))


def test_what_comes_when_the_loop_is_closed_goes_to_the_next():
    scheduler = new()
    held = scheduler.allocate("GPU")
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: None)  # it says that a task was destroyed
    task = loop.create_task(scheduler.acquire("GPU"))
    loop.run_until_complete(waiting(scheduler, 1))
    loop.close()
    del task
    behind = scheduler.submit("GPU")
    scheduler.release(held)
    gc.collect()
    scheduler.release(behind.allocation)
    assert (scheduler.pending(), scheduler.free("h100-0")) == ((), 10_000)


def test_a_closed_loop_on_which_a_task_looked_takes_nothing_from_a_waiter_on_another_one():
    scheduler = new()
    held = scheduler.allocate("GPU")

    def look_and_go(ticket):
        async def look():
            return await ticket

        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda _, context: None)  # it says that a task was destroyed
        task = loop.create_task(look())
        loop.run_until_complete(asyncio.sleep(0))
        assert not task.done()
        loop.close()

    async def main():
        task = asyncio.create_task(scheduler.acquire("GPU"))
        await waiting(scheduler, 1)
        await asyncio.to_thread(look_and_go, *scheduler.pending())
        scheduler.release(held)
        return await task

    given = asyncio.run(main())
    assert scheduler.holders("h100-0") == (given,)


def test_who_has_its_allocation_keeps_it_though_its_loop_is_closed_before_it_is_woken(monkeypatch):
    """As where the time of the wait ends while another thread makes room."""
    scheduler = new()
    held = scheduler.allocate("GPU")
    woken, closed = Event(), Event()

    class Slow(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, callback, *args, **options):
            if current_thread() is thread:
                woken.set()
                assert closed.wait(60)
            return super().call_soon_threadsafe(callback, *args, **options)

    thread = Thread(target=scheduler.release, args=(held,))

    async def main():
        task = asyncio.create_task(scheduler.acquire("GPU", timeout=1000))
        await waiting(scheduler, 1)
        thread.start()
        while not woken.is_set():  # noqa: ASYNC110 -- the loop must not be woken by that
            await asyncio.sleep(0.001)
        now = loop.time() + 2000
        monkeypatch.setattr(loop, "time", lambda: now)
        return await task

    loop = Slow()
    given = loop.run_until_complete(main())
    loop.close()
    closed.set()
    thread.join(60)
    assert scheduler.holders("h100-0") == (given,)


def test_tasks_that_have_looked_at_a_ticket_leave_nothing_behind():
    scheduler = new()
    scheduler.allocate("GPU")
    ticket = scheduler.submit("GPU")

    async def look():
        return await ticket

    async def main():
        counts = []
        for _ in range(3):
            task = asyncio.create_task(look())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            del task
            gc.collect()
            counts.append(sum(isinstance(each, asyncio.Future) for each in gc.get_objects()))
        return counts

    first, *others = asyncio.run(main())
    assert others == [first, first]
