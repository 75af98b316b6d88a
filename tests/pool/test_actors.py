"""Actors: an object in a process of its own, its calls in order, its devices held until the process is gone."""

import asyncio
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import anyaccel as aa
import psutil
import pytest
from processes import gone
from waiting import PATIENCE, until


class Counter:
    def __init__(self, start=0, *, path=None):
        self.value = start
        self.path = path

    def add(self, number):
        self.value += number
        return self.value

    def device(self):
        return os.environ["ACME_VISIBLE"]

    def wait_for(self, path):
        while not path.exists():
            time.sleep(0.002)

    def fail(self):
        raise LookupError(self.value)

    def end(self, how):
        os._exit(how) if how >= 0 else os.kill(os.getpid(), -how)

    def close(self):
        return "its own"

    def hold(self, begun, path):
        """Let no further thread start, and wait."""
        threading.stack_size(1 << 47)
        begun.touch()
        self.wait_for(path)

    def fail_without_descriptors(self):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        raise LookupError("x" * 100_000)  # too long for a packet, and shared memory needs a descriptor

    def spawn(self):
        return subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 1000"], start_new_session=True).pid


def test_calls_run_in_order_on_one_object(pool):
    counter = pool("A1:1").actor(Counter, 10)
    futures = [counter.add(number) for number in range(100)]
    assert [future.result() for future in futures] == [10 + sum(range(n + 1)) for n in range(100)]
    assert not gone(counter.ready.result())


def test_an_exception_of_a_method_leaves_the_actor_alive(pool):
    counter = pool().actor(Counter, 5)
    with pytest.raises(LookupError, match="5") as caught:
        counter.fail().result()
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(AttributeError, match="'Counter' object has no attribute 'nonsense'"):
        counter.nonsense().result()
    assert counter.add(1).result() == 6


def test_a_method_that_yields_names_the_way_out(pool):
    class Speaker:
        def speak(self):
            yield 1

    with pytest.raises(TypeError, match=r"speak yields its results one by one; a method .* return a list"):
        pool().actor(Speaker).speak().result()


def test_names_that_the_handle_uses_itself(pool):
    assert pool().actor(Counter).call("close").result() == "its own"


def test_a_construction_that_fails_says_so_to_every_call(pool):
    one = pool("A1:1", machine="sim:A1:1")
    counter = one.actor(Counter, nonsense=1)
    for future in (counter.ready, counter.add(1), counter.add(2)):
        with pytest.raises((TypeError, aa.BrokenWorkerError), match="unexpected keyword argument 'nonsense'"):
            future.result()
    assert one.submit(pow, 2, 2).result() == 4  # the device has come back


@pytest.mark.parametrize(("how", "words"), [(7, "ended with exit status 7"), (-9, "was killed by SIGKILL")])
def test_the_death_of_an_actor_is_reported_with_its_status(pool, tmp_path, how, words):
    one = pool("A1:1", machine="sim:A1:1")
    counter = one.actor(Counter)
    waiting = one.submit(pow, 2, 2)
    futures = [counter.end(how), counter.add(1)]
    for future in futures:
        with pytest.raises(aa.BrokenWorkerError, match=words) as caught:
            future.result()
        assert caught.value.exit_status == how
    assert waiting.result() == 4
    with pytest.raises(aa.BrokenWorkerError, match=f"the actor Counter has gone: .*{words}"):
        counter.add(1).result()


def test_an_actor_that_is_stopped_while_it_gets_calls_holds_up_no_other_worker(pool):
    most = 64
    crowd = pool().options(max_concurrency=most).actor(Crowd, most)
    pid = crowd.ready.result()
    os.kill(pid, signal.SIGSTOP)
    futures = [crowd.meet("x" * 50_000) for _ in range(most)]
    assert pool().submit(abs, -1).result(PATIENCE) == 1
    os.kill(pid, signal.SIGCONT)
    assert {future.result(PATIENCE) for future in futures} == {50_000}


def test_a_method_for_which_no_thread_can_start_fails_alone(pool, tmp_path):
    counter = pool().options(max_concurrency=2).actor(Counter)
    holding = counter.hold(tmp_path / "begun", tmp_path / "go")
    until((tmp_path / "begun").exists, "the method")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        counter.add(1).result()
    (tmp_path / "go").touch()
    holding.result()


def test_an_actor_that_cannot_answer_ends_rather_than_keep_its_callers_waiting(pool):
    counter = pool().options(max_concurrency=2).actor(Counter)
    with pytest.raises(aa.BrokenWorkerError, match="ended with exit status 1 before it answered"):
        counter.fail_without_descriptors().result(PATIENCE)


class SilentError(Exception):
    def __str__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("most", [1, 2])
def test_an_exception_whose_description_is_interrupted_ends_the_actor_and_keeps_no_caller_waiting(pool, most):
    class Silent:
        def fail(self):
            raise SilentError

    with pytest.raises(aa.BrokenWorkerError, match="ended with exit status 1 before it answered"):
        pool().options(max_concurrency=most).actor(Silent).fail().result(PATIENCE)


def test_a_group_that_is_killed_after_its_last_actor_died_has_gone(pool):
    group = pool().actors(Counter, 1)
    with pytest.raises(aa.BrokenWorkerError, match="status 3"):
        group.end(3).result()
    until(lambda: not group._group.actors, "its death")
    group.kill()
    until(lambda: "gone" in repr(group), "the end of the group")
    with pytest.raises(aa.BrokenWorkerError, match="the actor Counter has gone: it was killed"):
        group.add(1).result()


def test_the_device_is_held_until_everything_has_gone(pool):
    one = pool("A1:1", machine="sim:A1:1", grace=0.2)
    counter = one.actor(Counter)
    child = counter.spawn().result()
    waiting = one.submit(pow, 2, 2)
    counter.close()
    assert waiting.result() == 4
    assert gone(child)


def test_closing_lets_calls_end_and_takes_no_more(pool, tmp_path):
    counter = pool("A1:1").actor(Counter)
    futures = [counter.wait_for(tmp_path / "go"), counter.add(1)]
    counter.close()
    with pytest.raises(RuntimeError, match="the actor Counter was closed"):
        counter.add(1)
    (tmp_path / "go").touch()
    assert [future.result() for future in futures] == [None, 1]
    until(lambda: gone(counter.ready.result()), "its end")
    until(lambda: "gone" in repr(counter), "the news")


def test_killing_ends_at_once(pool, tmp_path):
    one = pool("A1:1", machine="sim:A1:1")
    counter = one.actor(Counter)
    waiting = counter.wait_for(tmp_path / "never")
    until(waiting.running, "the call")
    assert not waiting.cancel()  # a method that runs may have changed the object already
    counter.kill()
    with pytest.raises(aa.BrokenWorkerError, match="was killed by SIGKILL"):
        waiting.result()
    early = one.actor(Counter)
    blocked = one.actor(Counter)
    blocked.kill()
    with pytest.raises((aa.BrokenWorkerError, CancelledError)):
        blocked.ready.result()
    with pytest.raises(aa.BrokenWorkerError, match="it was killed before it had been made"):
        blocked.add(1).result()
    assert early.add(1).result() == 1


def test_a_waiting_method_can_be_cancelled(pool, tmp_path):
    counter = pool().actor(Counter)
    blocking = counter.wait_for(tmp_path / "go")
    cancelled, kept = counter.add(100), counter.add(1)
    assert cancelled.cancel()
    (tmp_path / "go").touch()
    assert kept.result() == 1
    blocking.result()


def test_a_method_that_takes_too_long_ends_the_actor(pool, tmp_path):
    counter = pool(timeout=0.1, grace=0.2).actor(Counter)
    with pytest.raises(aa.TaskTimeoutError, match=r"Counter\.wait_for took longer than its timeout of 0\.1 s"):
        counter.wait_for(tmp_path / "never").result()
    with pytest.raises(aa.BrokenWorkerError):
        counter.add(1).result()


def test_an_actor_without_a_reference_gives_its_device_back(pool):
    one = pool("A1:1", machine="sim:A1:1")
    counter = one.actor(Counter)
    assert counter.add(1).result() == 1
    waiting = one.submit(pow, 2, 2)
    del counter
    gc.collect()
    assert waiting.result() == 4


def test_the_pool_takes_its_actors_along(pool):
    one = pool("A1:0.5")
    counters = [one.actor(Counter, i) for i in range(3)]
    last = [counter.add(1) for counter in counters]
    one.shutdown()
    assert [future.result(timeout=0) for future in last] == [1, 2, 3]
    assert all(gone(counter.ready.result()) for counter in counters)


def test_actors_do_not_keep_calls_without_devices_from_running(pool):
    one = pool()
    actors = [one.actor(Counter) for _ in range(6)]
    assert [actor.add(1).result() for actor in actors] == [1] * 6
    assert list(one.map(pow, range(3), range(3))) == [1, 1, 4]


def test_shutdown_can_cancel_methods_that_were_not_sent_to_the_actor(pool, tmp_path):
    one = pool()
    counter = one.actor(Counter)
    runs = counter.wait_for(tmp_path / "go")
    until(runs.running, "the method")
    waiting = [counter.add("x" * 5000) for _ in range(3)]  # too long to be pipelined
    one.shutdown(wait=False, cancel_futures=True)
    until(lambda: all(future.cancelled() for future in waiting), "the end of the others")
    assert not runs.done()
    (tmp_path / "go").touch()
    one.shutdown()
    assert runs.result() is None


def test_an_actor_cannot_be_sent_elsewhere(pool):
    counter = pool().actor(Counter)
    with pytest.raises(TypeError, match="cannot be sent to another"):
        pickle.dumps(counter)


def test_an_actor_is_told_to_end_in_time_to_clean_up(pool, tmp_path):
    class Careful(Counter):
        def work(self):
            try:
                (tmp_path / "begun").touch()
                time.sleep(1000)
            finally:
                (tmp_path / "clean").touch()

    one = pool("A1:1", grace=10)
    careful = one.actor(Careful)
    careful.work()
    until((tmp_path / "begun").exists, "the call")
    os.kill(careful.ready.result(), signal.SIGTERM)
    until((tmp_path / "clean").exists, "cleaning up")


class Crowd:
    """Its calls end when all of them have begun."""

    def __init__(self, number):
        self.barrier = threading.Barrier(number)

    def meet(self, text):
        self.barrier.wait(PATIENCE)
        return len(text)


class Sizes(Counter):
    def size(self, data):
        return len(data)


def test_large_arguments_of_queued_methods_take_few_descriptors(pool, tmp_path):
    actor = pool().actor(Sizes)
    actor.ready.result()
    before = len(os.listdir("/proc/self/fd"))
    actor.wait_for(tmp_path / "go")
    sizes = [actor.size(bytes(70_000)) for _ in range(300)]
    assert len(os.listdir("/proc/self/fd")) - before < 150
    (tmp_path / "go").touch()
    assert {each.result(PATIENCE) for each in sizes} == {70_000}


class Together:
    def __init__(self):
        self.waiting = 0

    async def wait(self):
        self.waiting += 1
        await asyncio.sleep(1000)

    async def interrupt(self):
        raise KeyboardInterrupt("by the call")

    async def leave_behind(self, error):
        async def fail():
            raise error

        self.task = asyncio.create_task(fail())

    async def exit(self, status):
        sys.exit(status)

    async def echo(self, value):
        return value

    def count(self):
        return self.waiting

    def leave(self, status):
        sys.exit(status)


def test_an_interrupt_in_a_coroutine_ends_neither_the_actor_nor_its_loop(pool):
    together = pool().actor(Together)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt, match="by the call"):
            together.interrupt().result()
        assert together.echo(7).result() == 7


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_a_task_that_a_call_has_left_behind_does_not_end_the_loop(pool, error):
    together = pool().actor(Together)
    for _ in range(2):
        together.leave_behind(error).result(PATIENCE)
        assert [together.echo(number).result(PATIENCE) for number in (7, 8)] == [7, 8]


def test_an_actor_that_a_coroutine_exits_has_its_status(pool):
    together = pool().actor(Together)
    with pytest.raises(aa.BrokenWorkerError, match="ended with exit status 5 before it answered"):
        together.exit(5).result()


def test_coroutines_of_an_actor_that_ends_are_told_of_its_end(pool):
    """That closes their loop, which cancels them: but their calls were not cancelled."""
    together = pool().options(max_concurrency=4).actor(Together)
    waiting = [together.wait() for _ in range(3)]
    until(lambda: together.count().result() == 3, "all of them")
    together.leave(3)
    for future in waiting:
        with pytest.raises(aa.BrokenWorkerError, match="ended with exit status 3 before it answered"):
            future.result()


def test_calls_made_before_close_run_although_their_notes_come_later(pool, tmp_path):
    """The callbacks hold the thread that serves pools, so that the actor is ready before it hears of the calls."""
    one = pool("APU:0.25")
    ready, go_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    for number in (0, 1):
        future = one.submit(wait_for, tmp_path / str(number))

        def hold(_, number=number):
            ready[number].set()
            go_on[number].wait(PATIENCE)

        future.add_done_callback(hold)
    actor = one.actor(Slow, tmp_path / "2")
    until(lambda: len(list(tmp_path.glob("begun-*"))) == 3, "the start of all")
    (tmp_path / "0").touch()
    assert ready[0].wait(PATIENCE)
    for number in (1, 2):  # their answers wait now, in this order
        (tmp_path / str(number)).touch()
        pid = int(next(tmp_path.glob(f"begun-{number}-*")).name.rsplit("-", 1)[1])
        until(lambda pid=pid: is_idle(tmp_path, pid), "its answer")
    go_on[0].set()
    assert ready[1].wait(PATIENCE)
    futures = [actor.add() for _ in range(3)]
    actor.close()
    go_on[1].set()
    assert [future.result(PATIENCE) for future in futures] == [1, 2, 3]


def wait_for(path):
    path.with_name(f"begun-{path.name}-{os.getpid()}").touch()
    while not path.exists():
        time.sleep(0.002)
    path.with_name(f"over-{os.getpid()}").touch()


class Slow(Counter):
    def __init__(self, path):
        super().__init__()
        wait_for(path)

    def add(self, number=1):
        return super().add(number)


def is_idle(directory, pid):
    """Return whether a worker waits, or has exited, behind the end of its call."""
    if not (directory / f"over-{pid}").exists():
        return False
    try:
        return psutil.Process(pid).status() in {psutil.STATUS_SLEEPING, psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:
        return True
