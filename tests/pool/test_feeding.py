"""Calls that wait while their worker runs another one: none waits in vain, and none is run twice."""

import concurrent.futures
import os
import signal
import time

import anyaccel as aa
import pytest
from waiting import until

QUICK = 40


def note(path, number):
    """Say which call ran where, in one write that no other one cuts in half."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{number}\n".encode())
    os.close(descriptor)
    return os.getpid()


def block(begun, end):
    """Say that we run, and go on until we may end."""
    begun.touch()
    while not end.exists():
        time.sleep(0.002)
    return os.getpid()


def die(begun, end):
    """Kill our process once we may."""
    block(begun, end)
    os.kill(os.getpid(), signal.SIGKILL)


def noted(path):
    return [int(line) for line in path.read_text().split()]


@pytest.fixture(params=["cpu", "device", "gate"])
def kept(request, pool):
    """A pool of one process that is kept; with devices, their number or the number of processes sets the limit."""
    if request.param == "cpu":
        return pool(max_workers=1)
    limits = {"max_workers": 1} if request.param == "gate" else {"machine": "sim:A1:1"}
    return pool("A1:1", max_calls=0, **limits)


@pytest.fixture
def stands(tmp_path):
    """Have a call run of which others stand in line behind: the ones before it, itself, and the ones behind it."""

    def stands(kept, function):
        ran, begun, end = tmp_path / "ran", tmp_path / "begun", tmp_path / "end"
        before = [kept.submit(note, ran, number) for number in range(QUICK)]
        middle = kept.submit(function, begun, end)
        behind = [kept.submit(note, ran, number) for number in range(QUICK, 2 * QUICK)]
        until(begun.exists, "the call")
        return ran, end, before, middle, behind

    return stands


def test_a_call_that_is_cancelled_in_line_is_not_run_and_affects_no_other(kept, stands):
    ran, end, before, middle, behind = stands(kept, block)
    assert all(future.cancel() for future in behind[:3])
    end.touch()
    pids = {middle.result(), *(future.result() for future in (*before, *behind[3:]))}
    assert len(pids) == 1
    assert noted(ran) == [*range(QUICK), *range(QUICK + 3, 2 * QUICK)]


def test_what_a_dying_worker_never_began_with_is_run_once_by_another(kept, stands):
    ran, end, before, middle, behind = stands(kept, die)
    end.touch()
    with pytest.raises(aa.BrokenWorkerError, match="was killed by SIGKILL"):
        middle.result()
    first = {future.result() for future in before}
    second = {future.result() for future in behind}
    assert len(first | second) == len(first) + len(second) == 2
    assert noted(ran) == [*range(2 * QUICK)]


def test_shutdown_cancels_what_stands_in_line_and_lets_the_rest_end(kept, stands):
    ran, end, before, middle, behind = stands(kept, block)
    kept.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in behind)
    assert not middle.done()
    end.touch()
    assert middle.result() == before[0].result()
    assert noted(ran) == [*range(QUICK)]


def test_calls_that_fall_back_to_the_cpu_have_no_more_processes_than_processors(pool, tmp_path):
    most = len(os.sched_getaffinity(0))
    one = pool("A1:4,else=cpu", max_calls=0)
    (tmp_path / "begun").mkdir()
    futures = [one.submit(block, tmp_path / "begun" / str(number), tmp_path / "end") for number in range(2 * most + 2)]
    until(lambda: len(list((tmp_path / "begun").iterdir())) >= most, "as many as there are processors")
    (tmp_path / "end").touch()
    assert len({future.result() for future in futures}) == most


def test_a_timeout_of_the_first_does_not_cost_those_behind_it(pool, tmp_path):
    one = pool(max_workers=1)
    limited = one.options(timeout=0.3)
    before = [one.submit(note, tmp_path / "ran", number) for number in range(QUICK)]
    middle = limited.submit(time.sleep, 1000)
    behind = [one.submit(note, tmp_path / "ran", number) for number in range(QUICK, 2 * QUICK)]
    with pytest.raises(aa.TaskTimeoutError):
        middle.result()
    assert len({future.result() for future in (*before, *behind)}) == 2
    assert noted(tmp_path / "ran") == [*range(2 * QUICK)]


@pytest.mark.parametrize("options", [{}, {"needs": "A1:1", "max_calls": 0}])
def test_a_free_process_runs_what_stands_behind_a_long_call(pool, tmp_path, options):
    two = pool(max_workers=2).options(**options)
    for _ in range(5):
        begun, end = tmp_path / "begun", tmp_path / "end"
        before = [two.submit(os.getpid) for _ in range(QUICK)]
        long = two.submit(block, begun, end)
        behind = [two.submit(os.getpid) for _ in range(QUICK)]
        for future in (*before, *behind):
            future.result()  # it would hang if one of them stood behind the long one
        assert not long.done()
        end.touch()
        long.result()
        begun.unlink()
        end.unlink()


def test_short_calls_of_a_map_travel_together(pool):
    """What a message brings is loaded once: a list that all its calls append to."""
    seen = []

    def count(number):
        seen.append(number)
        return number, len(seen)

    found = list(pool(max_workers=2).map(count, range(2000)))
    assert [number for number, _ in found] == [*range(2000)]
    assert max(place for _, place in found) > 1


def test_the_last_calls_of_a_map_run_at_the_same_time_however_short_the_first_were(pool, tmp_path):
    met = tmp_path / "met"
    met.mkdir()

    def meet(number):
        if number >= 500:
            (met / str(number)).touch()
            until(lambda: len(list(met.iterdir())) == 2, "the other one")
        return number

    assert list(pool(max_workers=2).map(meet, range(502))) == [*range(502)]


@pytest.mark.parametrize("way", ["map", "map_unordered"])
def test_all_calls_of_a_map_run_though_the_pool_takes_no_more(pool, way):
    one = pool(max_workers=2)
    results = getattr(one, way)(abs, range(3000))
    one.shutdown()
    assert sorted(results) == [*range(3000)]


def test_a_call_that_fails_has_its_place_among_short_ones(pool):
    results = pool(max_workers=2).map(lambda number: 1 // (number - 1500), range(3000))
    assert [next(results) for _ in range(1500)] == [1 // (number - 1500) for number in range(1500)]
    with pytest.raises(ZeroDivisionError):
        next(results)


class Notes:
    """An actor of which quick calls stand behind a long one."""

    def note(self, path, number):
        return note(path, number)

    def block(self, begun, end):
        return block(begun, end)

    def die(self, begun, end):
        die(begun, end)


@pytest.fixture
def stands_behind_method(pool, tmp_path):
    """The same for the methods of actors; others of them are busy until a file is there."""

    def stands(make, method):
        ran, begun, end = tmp_path / "ran", tmp_path / "begun", tmp_path / "end"
        actor = make(pool("A1:1", machine="sim:A1:2"))
        before = [actor.note(ran, number) for number in range(QUICK)]
        middle = actor.call(method, begun, end)
        behind = [actor.note(ran, number) for number in range(QUICK, 2 * QUICK)]
        until(begun.exists, "the call")
        concurrent.futures.wait(before)  # then it is known here, too, that it runs
        return actor, ran, end, before, middle, behind

    return stands


def test_a_method_that_is_cancelled_in_line_is_not_run(pool, stands_behind_method):
    _, ran, end, before, middle, behind = stands_behind_method(lambda pool: pool.actor(Notes), "block")
    assert not middle.cancel()
    kept = [number for number, future in enumerate(behind, QUICK) if not future.cancel()]  # sent already
    assert len(kept) < QUICK
    end.touch()
    assert len({future.result() for future in (*before, middle) if not future.cancelled()}) == 1
    until(lambda: noted(ran) == [*range(QUICK), *kept], "those that were sent")


def test_methods_that_stand_in_line_fail_with_their_actor(stands_behind_method):
    _, ran, end, before, middle, behind = stands_behind_method(lambda pool: pool.actor(Notes), "die")
    end.touch()
    for future in (middle, *behind):
        with pytest.raises(aa.BrokenWorkerError, match="was killed by SIGKILL"):
            future.result()
    assert noted(ran) == [*range(QUICK)]
    assert len({future.result() for future in before}) == 1


def test_who_has_nothing_to_do_takes_what_stands_behind_a_long_method(stands_behind_method):
    _, ran, end, _, middle, behind = stands_behind_method(lambda pool: pool.actors(Notes, 2), "block")
    pids = {future.result() for future in behind}
    assert not middle.done()
    end.touch()
    assert middle.result() not in pids
    assert sorted(noted(ran)) == [*range(2 * QUICK)]


def test_what_an_actor_never_began_with_is_run_by_others(stands_behind_method):
    actors, ran, end, _, middle, behind = stands_behind_method(lambda pool: pool.actors(Notes, 1), "die")
    end.touch()
    with pytest.raises(aa.BrokenWorkerError, match="was killed by SIGKILL"):
        middle.result()
    assert len({future.result() for future in behind}) == 1
    assert noted(ran) == [*range(2 * QUICK)]
    assert actors.ready.done()


def test_methods_run_in_order_whichever_thread_waits_for_them(pool, tmp_path):
    actor = pool().actor(Notes)
    futures = [actor.note(tmp_path / "ran", number) for number in range(2000)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda future: future.result(), reversed(futures)))) == 1
    assert noted(tmp_path / "ran") == [*range(2000)]
