"""Many calls and their results, on every engine: unordered, in batches, streamed, awaited, and shared among actors."""

import asyncio
import concurrent.futures
import os
import threading
import time
from functools import partial
from pathlib import Path

import anyaccel as aa
import pytest
from waiting import until

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray's own
]

WAIT = 60


def square(x):
    return x * x


def named(name, path=None):
    """Wait for a file where one is given."""
    if path is not None:
        until(path.exists, "the word to go on")
    return name


def inverted(x):
    return 1 / x, os.getpid()


def note(path, text=""):
    with open(path, "a") as file:
        file.write(f"{text}\n")


def counted(number, path):
    """Yield numbers, and note how many; and the end."""
    try:
        for each in range(number):
            note(path, each)
            yield each
    finally:
        note(path, "end")


def lines(path):
    return path.read_text().split() if path.exists() else []


def test_results_come_as_soon_as_they_are_there(pool, tmp_path):
    results = pool("A1:1").map_unordered(named, ["slow", "quick"], [tmp_path / "go", None])
    assert next(results) == "quick"
    (tmp_path / "go").touch()
    assert list(results) == ["slow"]


def test_the_standard_library_sees_what_is_done(pool):
    futures = [pool().submit(square, n) for n in range(4)]
    found = [future.result() for future in concurrent.futures.as_completed(futures, WAIT)]
    assert sorted(found) == [0, 1, 4, 9]


def test_a_batch_travels_together_and_each_call_has_its_own_outcome(pool):
    one = pool()
    assert list(one.map(square, range(10), batch=4)) == [n * n for n in range(10)]
    assert sorted(one.map_unordered(square, range(10), batch=4)) == [n * n for n in range(10)]
    fresh = one.options(max_calls=1)
    pids = [pid for _, pid in fresh.map(inverted, range(1, 9), batch=4)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [4, 4]
    results = one.map(inverted, [2, 4, 0, 8], batch=4)
    assert [next(results)[0], next(results)[0]] == [0.5, 0.25]
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert "in inverted" in str(caught.value.__cause__)
    assert list(results) == []


def test_batches_and_streams_of_plain_data(pool, tmp_path):
    one = pool(results="plain")
    results = one.map(inverted, [2, 0, 4], batch=3)
    assert next(results)[0] == 0.5
    with pytest.raises(ZeroDivisionError) as caught:
        next(results)
    assert "in inverted" in str(caught.value.__cause__)
    assert list(one.stream(counted, 3, tmp_path / "noted")) == [0, 1, 2]


def test_the_names_of_multiprocessing(pool):
    with pool() as one:
        assert one.starmap(pow, [(2, 3), (3, 2), [5, 1]]) == [8, 9, 5]
        assert one.starmap(pow, [(2, 3), (3, 2)], 2) == [8, 9]
        with pytest.raises(ZeroDivisionError):
            one.starmap(inverted, [(0,)])


def test_what_a_function_yields_comes_before_it_ends(pool, tmp_path):
    def speak():
        yield os.environ["ACME_VISIBLE"]
        until((tmp_path / "go").exists, "the word to go on")
        yield aa.current().devices[0].id

    one = pool("A1:4")
    stream = one.stream(speak)
    first = next(stream)
    (tmp_path / "go").touch()
    assert list(stream) == [first.split(",")[0]]
    assert one.submit(square, 2).result(WAIT) == 4, "its devices went back"


def test_a_stream_is_so_far_ahead_and_no_further(pool, tmp_path):
    noted = tmp_path / "noted"
    stream = pool().options(ahead=2).stream(counted, 100, noted)
    assert next(stream) == 0
    until(lambda: lines(noted) == ["0", "1", "2"], "what it may be ahead")
    assert next(stream) == 1
    until(lambda: lines(noted) == ["0", "1", "2", "3"], "one more")
    assert list(stream) == list(range(2, 100))
    assert lines(noted)[-1] == "end"


@pytest.mark.parametrize("way", ["close", "forget"])
def test_a_stream_that_ends_early_ends_the_function(pool, tmp_path, way):
    one, noted = pool("A1:4"), tmp_path / "noted"
    stream = one.options(ahead=2).stream(counted, 100, noted)
    assert next(stream) == 0
    until(lambda: len(lines(noted)) == 3, "its pause")
    if way == "close":
        stream.close()
    else:
        del stream
    assert one.submit(square, 2).result(WAIT) == 4, "its devices went back"
    assert lines(noted)[-1] == "end"


def test_a_stream_ends_a_function_that_runs(pool, tmp_path):
    def speak():
        yield 1
        try:
            note(tmp_path / "begun")
            time.sleep(60)
        finally:
            note(tmp_path / "cleaned")

    one = pool("A1:4")
    with one.stream(speak) as stream:
        assert next(stream) == 1
        until((tmp_path / "begun").exists, "its beginning")
    assert one.submit(square, 2).result(WAIT) == 4, "its devices went back"
    assert (tmp_path / "cleaned").exists()


def test_an_exception_ends_a_stream_in_its_place(pool):
    def speak():
        yield 1
        raise LookupError("no more")

    stream = pool().stream(speak)
    assert next(stream) == 1
    with pytest.raises(LookupError, match="no more") as caught:
        next(stream)
    assert "in speak" in str(caught.value.__cause__)
    assert list(stream) == []


def test_what_cannot_be_streamed_is_said_in_the_place_of_the_first_item(pool):
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        next(pool().stream(square, 2))
    with pytest.raises(ZeroDivisionError):
        next(pool().stream(inverted, 0))
    assert list(pool().stream(range, 3)) == [0, 1, 2]


def test_a_stream_whose_worker_dies_says_so(pool):
    def speak():
        yield 1
        os._exit(5)

    stream = pool().stream(speak)
    assert next(stream) == 1
    with pytest.raises(aa.BrokenWorkerError, match="exit status 5"):
        next(stream)


def test_what_yields_is_no_result(pool):
    with pytest.raises(TypeError, match=r"counted yields its results one by one; call it with pool\.stream"):
        pool().submit(counted, 3, "/dev/null").result(WAIT)


def raise_at_one(kind, number):
    if number == 1:
        raise kind("too soon")
    return number


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
def test_a_call_that_raises_what_ends_an_iteration_does_not_hide_the_results_behind_it(pool, kind):
    """As in generators; with the future itself, the exception is what the call raised."""
    one = pool()

    async def run():
        with pytest.raises((RuntimeError, StopAsyncIteration), match=kind.__name__ + "|too soon"):
            await asyncio.wait_for(one.submit(raise_at_one, kind, 1), WAIT)
        results = one.map(partial(raise_at_one, kind), range(3))
        assert await anext(results) == 0
        with pytest.raises(RuntimeError, match=f"a call raised {kind.__name__}") as caught:
            await anext(results)
        assert [result async for result in results] == []
        return caught.value.__cause__

    assert isinstance(asyncio.run(run()), kind)
    assert isinstance(one.submit(raise_at_one, kind, 1).exception(WAIT), kind)
    for results in (one.map(partial(raise_at_one, kind), range(3)), one.stream(raise_at_one, kind, 1)):
        with pytest.raises((RuntimeError, StopAsyncIteration), match=kind.__name__ + "|too soon"):
            list(results)


def test_coroutines_wait_for_calls(pool, tmp_path):
    one = pool()

    async def spoken(number):
        for each in range(number):
            await asyncio.sleep(0)
            yield each

    async def main():
        found = [await one.submit(square, 3)]
        found += await asyncio.gather(one.submit(square, 4), one.submit(square, 5))
        found += [x async for x in one.map(square, [6, 7])]
        found += [x async for x in one.map(square, [8, 9, 10], batch=2)]
        found += sorted([x async for x in one.map_unordered(square, [11, 12])])
        found += [x async for x in one.stream(counted, 3, tmp_path / "noted")]
        found += [x async for x in one.stream(spoken, 3)]
        return found

    assert asyncio.run(main()) == [x * x for x in range(3, 13)] + [0, 1, 2] * 2


def test_a_coroutine_that_is_cancelled_cancels_its_calls(pool, tmp_path):
    one = pool("A1:4")

    async def first_of(results):
        async for _ in results:
            raise AssertionError("there is none")

    async def main():
        future = one.submit(named, "", tmp_path / "never")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first_of(one.map_unordered(named, [""], [tmp_path / "never"])), 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(future), 0.1)
        assert future.cancelled()
        with pytest.raises(TimeoutError):
            await first_of(one.map(named, [""], [tmp_path / "never"], timeout=0.1))
        return await one.submit(square, 2)

    assert asyncio.run(main()) == 4


class Meeting:
    """Its methods come together, or never end."""

    def __init__(self, number):
        self._barrier = threading.Barrier(number)
        self._number = number
        self._here = 0
        self._all = asyncio.Event()
        self.most = self._now = 0

    def meet(self, name):
        self._barrier.wait(WAIT)
        return name

    async def join(self, name):
        self._here += 1
        if self._here == self._number:
            self._all.set()
        await self._all.wait()
        return name

    async def alone(self):
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(0.01)
        self._now -= 1
        return self.most

    def fail(self):
        raise LookupError(threading.current_thread().name)

    async def leave(self, status):
        os._exit(status)

    def exit(self, status):
        raise SystemExit(status)


def test_methods_run_at_the_same_time(pool):
    actor = pool().options(max_concurrency=3).actor(Meeting, 3)
    assert [each.result(WAIT) for each in [actor.meet(n) for n in range(6)]] == list(range(6))
    assert [each.result(WAIT) for each in [actor.join(n) for n in range(3)]] == list(range(3))
    # `join` has shown three at once. How many a busy machine brings together in ten milliseconds is chance.
    assert [each.result(WAIT) for each in [actor.alone() for _ in range(9)]][-1] <= 3
    with pytest.raises(LookupError) as caught:
        actor.fail().result(WAIT)
    assert "in fail" in str(caught.value.__cause__)


def test_methods_run_one_after_the_other_where_nothing_else_is_said(pool):
    actor = pool().actor(Meeting, 1)
    assert {each.result(WAIT) for each in [actor.alone() for _ in range(5)]} == {1}
    assert actor.join("here").result(WAIT) == "here"


@pytest.mark.parametrize("way", ["leave", "exit"])
def test_all_methods_that_run_fail_with_their_actor(pool, way):
    actor = pool("A1:1").options(max_concurrency=3).actor(Meeting, 3)
    futures = [actor.meet(1), actor.meet(2), actor.call(way, 7), actor.join(4)]
    for future in futures:
        with pytest.raises(aa.BrokenWorkerError, match="exit status 7"):
            future.result(WAIT)


class Worker:
    def __init__(self, *, path=None, fails=False):
        if fails:
            raise ValueError("no weights")
        self._path = path

    def square(self, x):
        return x * x

    def pid(self, path=None):
        if path is not None:
            until(path.exists, "the word to go on")
        return os.getpid()

    def devices(self):
        return [device.id for device in aa.current().devices]

    def invert(self, x):
        return 1 / x

    def die_once(self, x):
        if x == 3:
            note(self._path, "died")
            if len(lines(self._path)) == 1:
                os._exit(3)
        return x


def test_actors_share_calls(pool, tmp_path):
    with pool("A1:1").actors(Worker, 2) as workers:
        pids = workers.ready.result(WAIT)
        assert len(set(pids)) == 2
        blocked = workers.pid(tmp_path / "go")
        until(blocked.running, "its beginning")
        found = {workers.pid().result(WAIT) for _ in range(5)}
        assert not blocked.done()
        (tmp_path / "go").touch()
        assert {blocked.result(WAIT)} | found == set(pids), "no call waits for a busy actor"
        assert list(workers.map("square", range(20))) == [n * n for n in range(20)]
        assert sorted(workers.map_unordered("square", range(20), batch=6)) == [n * n for n in range(20)]
        results = workers.map("invert", [2, 0, 4], batch=3)
        assert next(results) == 0.5
        with pytest.raises(ZeroDivisionError):
            next(results)
        held = [workers.devices() for _ in range(2)]
        assert all(len(future.result(WAIT)) == 1 for future in held)
    with pytest.raises((RuntimeError, aa.BrokenWorkerError), match="closed"):
        workers.square(1).result(WAIT)


def test_an_actor_that_has_died_is_replaced(pool, tmp_path):
    one = pool("A1:1")
    workers = one.actors(Worker, 2, path=tmp_path / "fails")
    futures = [workers.die_once(n) for n in range(8)]
    for number, future in enumerate(futures):
        if number == 3:
            with pytest.raises(aa.BrokenWorkerError, match="exit status 3"):
                future.result(WAIT)
        else:
            assert future.result(WAIT) == number
    again = one.options(retries=1).actors(Worker, 2, path=tmp_path / "again")
    assert list(again.map("die_once", range(8))) == list(range(8))
    again.kill()
    with pytest.raises((RuntimeError, aa.BrokenWorkerError)):
        until(lambda: again.square(1).result(WAIT) < 0, "their end")


def test_actors_that_cannot_be_made_say_so_to_every_call(pool):
    workers = pool("A1:1").actors(Worker, 2, fails=True)
    with pytest.raises(ValueError, match="no weights"):
        workers.ready.result(WAIT)
    with pytest.raises(aa.BrokenWorkerError, match="could not be made: ValueError: no weights"):
        workers.square(2).result(WAIT)


def test_more_actors_than_devices_work_and_end(pool):
    with pool("A1:1") as one:
        workers = one.actors(Worker, 6)
        assert list(workers.map("square", range(12))) == [n * n for n in range(12)]
        last = [workers.square(n) for n in range(12)]
    assert [future.result(WAIT) for future in last] == [n * n for n in range(12)]


def test_a_warm_up_runs_once_in_each_worker_that_holds_devices(pool, tmp_path):
    noted = tmp_path / "noted"

    def warm():
        note(noted, f"{os.getpid()}:{os.environ['ACME_VISIBLE']}")

    one = pool("A1:1", warmup=warm)
    workers = one.actors(Worker, 2)
    pids = workers.ready.result(WAIT)
    assert sorted(int(line.partition(":")[0]) for line in lines(noted)) == sorted(pids)
    assert len({line.partition(":")[2] for line in lines(noted)}) == 2, "each with its own device"
    assert list(workers.map("square", range(5))) == [0, 1, 4, 9, 16]
    assert one.options(needs=None).submit(square, 2).result(WAIT) == 4
    assert len(lines(noted)) == 2


def test_a_warm_up_that_fails_names_the_device(pool):
    def warm():
        raise RuntimeError("no kernel for it")

    broken = pool("A1:1", warmup=warm)
    with pytest.raises(
        aa.BrokenPoolError, match=r"the warm-up on acme/\d \(acme-\S+\) failed: RuntimeError: no kernel for it"
    ) as caught:
        broken.submit(square, 1).result(WAIT)
    assert caught.value.__cause__ is None or "warm" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_concurrency": 0}, "max_concurrency must be a whole number, 1 or more"),
        ({"ahead": 0}, "ahead must be a whole number, 1 or more"),
    ],
)
def test_options_that_make_no_sense(pool, options, words):
    one = pool()
    with pytest.raises(aa.UsageError, match=words):
        one.options(**options)
    with pytest.raises(ValueError, match="batch must be a whole number, 1 or more"):
        one.map(square, [1], batch=0)
    with pytest.raises(aa.UsageError, match="n must be a whole number"):
        one.actors(Worker, 0)


class Speaker:
    def say(self, word):
        print(word)
        return len(os.listdir("/proc/self/fd"))


def test_what_methods_print_goes_to_their_logs(pool, tmp_path):
    actor = pool(logs=tmp_path / "logs").actor(Speaker)
    futures = [actor.say(word) for word in ("one", "two", "three")]
    counts = [future.result(WAIT) for future in futures]
    assert [Path(future.log).read_text() for future in futures] == ["one\n", "two\n", "three\n"]
    assert counts[0] == counts[-1], "no descriptor is left open"
