"""What a pool does on every engine: the same calls, the same devices, the same errors."""

import os
import signal
import sys
import threading
import time

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


def seen():
    held = aa.current()
    return os.environ["ACME_VISIBLE"], [share.device.id for share in held.shares], [s.units for s in held.shares]


def prepare(name, value):
    os.environ[name] = value


def raise_(error):
    raise error


def once(path, then):
    """Do something the first time; say how often we were called."""
    with open(path, "a") as file:
        file.write("x")
    calls = os.path.getsize(path)
    if calls == 1:
        then()
    return calls


class Counter:
    def __init__(self, start=0):
        if start < 0:
            raise ValueError("start must be 0 or more")
        self.count = start

    def add(self, number=1):
        self.count += number
        return self.count

    def fail(self):
        raise LookupError("nothing here")

    def leave(self, status):
        os._exit(status)

    def seen(self):
        return seen()

    def sleep(self, seconds):
        time.sleep(seconds)

    def wait_for(self, path):
        until(path.exists, "the word to go on")


def test_results_come_back_in_order(pool):
    cpu = pool()
    assert list(cpu.map(square, range(20))) == [x * x for x in range(20)]
    assert list(cpu.map(square, range(20), chunksize=7)) == [x * x for x in range(20)]
    assert cpu.submit(pow, 2, exp=5).result(WAIT) == 32


def test_a_call_sees_exactly_its_devices(pool):
    future = pool("A1:1").submit(seen)
    mask, ids, units = future.result(WAIT)
    assert [mask] == ids == [device.id for device in future.allocation.devices]
    assert units == [10_000]
    mask, ids, _ = pool("A1:2").submit(seen).result(WAIT)
    assert mask.split(",") == ids
    assert len(ids) == 2


def test_calls_without_needs_see_no_device(pool):
    assert pool().submit(os.getenv, "ACME_VISIBLE").result(WAIT) == ""
    assert pool().submit(lambda: aa.current().devices).result(WAIT) == ()


def test_shares_of_a_device(pool, tmp_path):
    quarter, by_memory = pool("A1:0.25"), pool("A1:4GiB")
    here = tmp_path / "here"
    here.mkdir()

    def meet(name):
        (here / name).touch()
        until(lambda: len(list(here.iterdir())) == 4, "the others")
        return seen()

    found = [future.result(WAIT) for future in [(quarter, by_memory)[n % 2].submit(meet, str(n)) for n in range(4)]]
    assert all(units == [2500] for _, _, units in found)
    assert len({mask for mask, _, _ in found}) == 1, "four quarters are one device"


def test_masks_name_indexes_on_demand(pool):
    assert pool("A1:2", mask="index").submit(os.getenv, "ACME_VISIBLE").result(WAIT) in {"0,1", "1,2", "2,3"}


def test_alternatives_and_other_names(pool):
    for needs in ("Acme-Whole|Acme-One:1", "acme:1", "APU:1", "apu:1", "ACME", "A1:1,mem=16G"):
        assert len(pool(needs).submit(seen).result(WAIT)[1]) == 1


@pytest.mark.parametrize(
    ("needs", "error"),
    [
        ("A1:5", aa.NeverFitsError),
        ("A1:3", aa.NeverFitsError),  # the vendor's rule
        ("Acme-Whole:1", aa.NeverFitsError),
        ("A1:1,mem=99T", aa.NeverFitsError),
        ("A1:1,driver=1+", aa.NeverFitsError),  # a simulation has no driver
        ("A1:1,id=acme", aa.NeverFitsError),
        ("A7:1", aa.UnknownNameError),
        ("A1:1.5", aa.RequestError),
    ],
)
def test_needs_that_make_no_sense_are_refused_at_once(pool, needs, error):
    with pytest.raises(error):
        pool(needs)
    with pytest.raises(error):
        pool().options(needs=needs)


def test_the_cpu_takes_what_no_device_ever_can(pool):
    future = pool("Acme-Whole:1,else=cpu").submit(os.getenv, "ACME_VISIBLE")
    assert future.result(WAIT) == ""
    assert future.allocation.cpu


def test_an_exception_comes_back_with_its_traceback(pool):
    with pytest.raises(KeyError, match="lost") as caught:
        pool("A1:1").submit(raise_, KeyError("lost")).result(WAIT)
    assert "in raise_" in str(caught.value.__cause__)


def test_what_cannot_be_pickled_fails_and_nothing_else_does(pool):
    one = pool()
    with pytest.raises(TypeError):
        one.submit(square, sys._getframe()).result(WAIT)
    with pytest.raises(Exception, match="pickle"):
        one.submit(sys._getframe).result(WAIT)
    assert one.submit(square, 3).result(WAIT) == 9


def test_large_values_travel(pool):
    data = bytearray(os.urandom(1 << 20) * 4)
    future = pool().submit(bytes.upper, bytes(data))
    assert future.result(WAIT) == bytes(data).upper()


def test_the_death_of_a_worker_is_reported_with_its_status(pool):
    one = pool("A1:1")
    with pytest.raises(aa.BrokenWorkerError, match="exit status 3") as caught:
        one.submit(os._exit, 3).result(WAIT)
    assert caught.value.exit_status == 3
    with pytest.raises(aa.BrokenWorkerError, match="SIGKILL") as caught:
        one.submit(lambda: os.kill(os.getpid(), signal.SIGKILL)).result(WAIT)
    assert caught.value.exit_status == -signal.SIGKILL
    assert one.submit(square, 3).result(WAIT) == 9


@pytest.mark.parametrize("needs", [None, "A1:1"])
def test_a_call_is_run_again_when_its_worker_has_died(pool, tmp_path, needs):
    one = pool(needs, retries=1)
    assert one.submit(once, tmp_path / "dies", lambda: os._exit(3)).result(WAIT) == 2
    with pytest.raises(aa.BrokenWorkerError, match="exit status 3"):
        one.options(retries=0).submit(once, tmp_path / "stays", lambda: os._exit(3)).result(WAIT)
    with pytest.raises(aa.BrokenWorkerError, match="exit status 4"):
        one.submit(os._exit, 4).result(WAIT)


def test_a_call_that_raises_or_takes_too_long_is_not_run_again(pool, tmp_path):
    one = pool(retries=3)
    with pytest.raises(KeyError):
        one.submit(once, tmp_path / "raises", lambda: raise_(KeyError(1))).result(WAIT)
    for seconds in (0.3, 3, 30):  # so that it has begun by then
        sleeps = tmp_path / f"sleeps-{seconds}"
        with pytest.raises(aa.TaskTimeoutError):
            one.options(timeout=seconds).submit(once, sleeps, lambda: time.sleep(1000)).result(WAIT)
        if sleeps.exists() and sleeps.read_text():
            break
    assert (tmp_path / "raises").read_text() == sleeps.read_text() == "x"


def test_a_call_that_takes_too_long_is_ended(pool):
    with pytest.raises(aa.TaskTimeoutError, match=r"0\.3 s"):
        pool("A1:1", timeout=0.3).submit(time.sleep, 60).result(WAIT)


def test_a_running_call_can_be_cancelled(pool, tmp_path):
    def run():
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    one = pool("A1:4")
    future = one.submit(run)
    until(future.running, "the call")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "its process")
    assert len(future.allocation.devices) == 4
    waits = one.submit(square, 4)
    assert future.cancel()
    assert future.cancelled()
    assert waits.result(WAIT) == 16, "its devices went back"
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not os.path.exists(f"/proc/{pid}"), "its end")


def test_a_waiting_call_can_be_cancelled(pool):
    one = pool("A1:4")
    runs = one.submit(time.sleep, 60)
    until(runs.running, "the first")
    waits = one.submit(square, 4)
    assert not waits.running()
    assert waits.allocation is None
    assert waits.why() is not None
    assert waits.cancel()
    assert waits.cancelled()
    assert runs.cancel()


def test_an_initializer_prepares_each_worker(pool):
    one = pool(initializer=prepare, initargs=("PREPARED", "yes"))
    assert one.submit(os.getenv, "PREPARED").result(WAIT) == "yes"


def test_an_initializer_that_fails_breaks_the_pool(pool):
    broken = pool(initializer=raise_, initargs=(LookupError("no licence"),))
    with pytest.raises(aa.BrokenPoolError, match="no licence"):
        broken.submit(square, 1).result(WAIT)
    until(lambda: broken._core.broken, "it")
    with pytest.raises(aa.BrokenPoolError):
        broken.submit(square, 1)


class Runs:
    """Its pickle runs code wherever it is unpickled."""

    def __reduce__(self):
        return exec, ("import sys; sys.modules['attacked'] = sys",)


def test_plain_results_run_nothing_here(pool):
    plain = pool(results="plain", initializer=prepare, initargs=("PREPARED", "yes"))
    with pytest.raises(aa.RemoteError, match=r"it holds .*Runs"):
        plain.submit(Runs).result(WAIT)
    with pytest.raises(aa.RemoteError, match=r"it holds .*Runs"):
        plain.actor(type("Maker", (), {"make": lambda _: Runs()})).make().result(WAIT)
    with pytest.raises(LookupError, match="a text"):
        plain.submit(raise_, LookupError("a text")).result(WAIT)
    assert plain.submit(square, 3).result(WAIT) == 9
    assert "attacked" not in sys.modules
    broken = pool(results="plain", initializer=raise_, initargs=(LookupError("no licence"),))
    with pytest.raises(aa.BrokenPoolError, match="LookupError: no licence"):
        broken.submit(square, 1).result(WAIT)


def test_a_sandbox_stands_before_all_user_code(pool):
    assert pool(sandbox=lambda: os.environ.update(CONFINED="1")).submit(os.getenv, "CONFINED").result(WAIT) == "1"


def test_output_goes_into_a_file_for_each_call(pool, tmp_path):
    one = pool(logs=tmp_path / "logs")
    futures = [one.submit(print, "hello", number, flush=True) for number in range(3)]
    for number, future in enumerate(futures):
        future.result(WAIT)
        with open(future.log) as file:
            assert file.read() == f"hello {number}\n"
    assert len({future.log for future in futures}) == 3


def test_each_call_with_devices_has_a_process_of_its_own_unless_asked_otherwise(pool):
    one = pool("A1:4")
    assert len({one.submit(os.getpid).result(WAIT) for _ in range(3)}) == 3
    kept = one.options(max_calls=0)
    assert len({kept.submit(os.getpid).result(WAIT) for _ in range(3)}) == 1
    assert one.options(needs="A1:1").submit(seen).result(WAIT)[1], "a process that is kept gives way"


def test_the_number_of_processes_is_kept(pool, tmp_path):
    here = tmp_path / "here"
    here.mkdir()

    def run():
        path = here / f"{os.getpid()}-{time.monotonic_ns()}"
        path.touch()
        time.sleep(0.1)
        found = len(list(here.iterdir()))
        path.unlink()
        return found

    limited = pool("A1:0.1", max_workers=2)
    assert max(future.result(WAIT) for future in [limited.submit(run) for _ in range(6)]) <= 2


def begin(path, go_on):
    path.touch()
    until(go_on.exists, "the word to go on")
    return path.name


def test_shutdown_can_cancel_what_has_not_begun_and_nothing_else(pool, tmp_path):
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    begun.mkdir()
    pair = pool("A1:2")
    futures = [pair.submit(begin, begun / str(number), go_on) for number in range(5)]
    until(lambda: sum(future.running() for future in futures) == 2, "two that run")
    pair.shutdown(wait=False, cancel_futures=True)
    until(lambda: sum(future.cancelled() for future in futures) == 3, "the end of the others")
    time.sleep(0.5)  # as long as it takes to end one that runs by mistake
    go_on.touch()
    pair.shutdown()
    names = {path.name for path in begun.iterdir()}
    assert len(names) == 2
    for number, future in enumerate(futures):
        assert future.cancelled() == (str(number) not in names)
        assert future.cancelled() or future.result(WAIT) == str(number)


def test_shutdown_can_cancel_an_actor_that_waits_and_none_that_lives(pool, tmp_path):
    holder = pool("A1:4")
    lives = holder.actor(Counter)
    lives.ready.result(WAIT)
    waiting = pool("A1:4")
    waits = waiting.actor(Counter)
    waiting.shutdown(cancel_futures=True)
    assert waits.ready.cancelled()
    runs = lives.wait_for(tmp_path / "go-on")
    until(runs.running, "its beginning")
    threading.Timer(0.5, (tmp_path / "go-on").touch).start()
    holder.shutdown(cancel_futures=True)
    assert runs.result(0) is None


def test_what_goes_on_then_can_still_be_cancelled(pool, tmp_path):
    one = pool("A1:1")
    future = one.submit(begin, tmp_path / "begun", tmp_path / "never")
    until(future.running, "its beginning")
    one.shutdown(wait=False, cancel_futures=True)
    assert not future.done()
    assert future.cancel()
    one.shutdown()


def test_shutdown_waits_for_all_calls_and_takes_no_more(pool):
    with pool("A1:1") as one:
        futures = [one.submit(square, n) for n in range(6)]
    assert [future.result(0) for future in futures] == [n * n for n in range(6)]
    with pytest.raises(RuntimeError, match="after shutdown"):
        one.submit(square, 1)


def test_without_leases_for_others(pool):
    one = pool("A1:2", shared=False)
    assert [len(one.submit(seen).result(WAIT)[1]) for _ in range(3)] == [2, 2, 2]


def test_the_methods_of_an_actor_run_in_order_on_one_object(pool):
    one = pool("A1:1")
    actor = one.actor(Counter, 10)
    assert [future.result(WAIT) for future in [actor.add(n) for n in range(5)]] == [10, 11, 13, 16, 20]
    assert actor.ready.result(WAIT) > 0
    mask, ids, _ = actor.seen().result(WAIT)
    assert [mask] == ids == [device.id for device in actor.ready.allocation.devices]
    with pytest.raises(LookupError, match="nothing here") as caught:
        actor.fail().result(WAIT)
    assert "in fail" in str(caught.value.__cause__)
    assert actor.add().result(WAIT) == 21


def test_an_actor_without_needs_sees_no_device(pool):
    assert pool().actor(Counter).seen().result(WAIT)[0] == ""


def test_a_construction_that_fails_says_so_to_every_call(pool):
    actor = pool("A1:1").actor(Counter, -1)
    with pytest.raises(ValueError, match="0 or more"):
        actor.ready.result(WAIT)
    with pytest.raises(aa.BrokenWorkerError, match="could not be made: ValueError"):
        actor.add().result(WAIT)


def test_the_death_of_an_actor_is_reported_with_its_status(pool):
    actor = pool("A1:1").actor(Counter)
    with pytest.raises(aa.BrokenWorkerError, match="exit status 4") as caught:
        actor.leave(4).result(WAIT)
    assert caught.value.exit_status == 4
    with pytest.raises(aa.BrokenWorkerError, match=r"Counter has gone: .* exit status 4"):
        actor.add().result(WAIT)


def test_killing_an_actor_gives_its_devices_back(pool):
    one = pool("A1:4")
    actor = one.actor(Counter)
    actor.ready.result(WAIT)
    runs = actor.sleep(60)
    waits = one.submit(square, 3)
    actor.kill()
    with pytest.raises(aa.BrokenWorkerError, match="SIGKILL"):
        runs.result(WAIT)
    assert waits.result(WAIT) == 9
    with pytest.raises((aa.BrokenWorkerError, RuntimeError)):
        actor.add().result(WAIT)


def test_closing_an_actor_lets_calls_end_and_takes_no_more(pool):
    one = pool("A1:4")
    actor = one.actor(Counter)
    futures = [actor.add() for _ in range(3)]
    actor.close()
    assert [future.result(WAIT) for future in futures] == [1, 2, 3]
    with pytest.raises((RuntimeError, aa.BrokenWorkerError), match="closed"):
        actor.add().result(WAIT)
    assert one.submit(square, 3).result(WAIT) == 9, "its devices went back"


def test_a_waiting_method_can_be_cancelled(pool, tmp_path):
    actor = pool().actor(Counter)
    actor.ready.result(WAIT)
    runs, waits = actor.wait_for(tmp_path / "go-on"), actor.add(100)
    assert waits.cancel()
    (tmp_path / "go-on").touch()
    assert runs.result(WAIT) is None
    assert actor.add().result(WAIT) == 1


def test_a_method_that_takes_too_long_ends_the_actor(pool):
    actor = pool(timeout=0.3).actor(Counter)
    with pytest.raises(aa.TaskTimeoutError):
        actor.sleep(60).result(WAIT)
    with pytest.raises((RuntimeError, aa.BrokenWorkerError)):
        until(lambda: actor.add().result(WAIT) < 0, "its end")


def test_an_actor_without_a_reference_gives_its_devices_back(pool):
    one = pool("A1:4")
    actor = one.actor(Counter)
    assert actor.add().result(WAIT) == 1
    del actor
    assert one.submit(square, 3).result(WAIT) == 9


def test_the_pool_takes_its_actors_along(pool):
    with pool("A1:1") as one:
        actor = one.actor(Counter)
        assert actor.add().result(WAIT) == 1
    with pytest.raises((RuntimeError, aa.BrokenWorkerError)):
        actor.add().result(WAIT)


@pytest.mark.parametrize("retries", [-1, True, 1.5, "2"])
def test_retries_that_make_no_sense(pool, retries):
    with pytest.raises(aa.UsageError, match="retries must be a whole number"):
        pool(retries=retries)
