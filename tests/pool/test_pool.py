"""Pool: calls run in processes that see exactly their devices, and their outcome comes back."""

import asyncio
import concurrent.futures
import gc
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import anyaccel as aa
import pytest
from lengths import length
from processes import gone
from waiting import PATIENCE, until


def begun():
    return time.monotonic_ns(), os.getpid()


def square(x):
    return x * x


def seen():
    held = aa.current()
    return os.environ["ACME_VISIBLE"], [share.units for share in held.shares], os.getpid()


def raise_(error):
    raise error


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.002)
    return os.getpid()


class OddError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class ReadOnlyError(Exception):
    """Refuses attributes, as a frozen dataclass does."""

    def __setattr__(self, name, value):
        raise AttributeError(f"{name} is read-only")


class Answer:
    pass


def answer(_):
    return Answer()


@pytest.mark.parametrize("batch", [None, 2])
def test_a_map_keeps_no_result_that_was_taken(pool, batch):
    seen = []
    for each in pool().map(answer, range(10), batch=batch):
        seen.append(weakref.ref(each))
        del each
        gc.collect()
        assert not any(reference() for reference in seen)


def test_a_map_may_have_all_the_time_of_the_world(pool):
    assert list(pool().map(square, range(3), timeout=float("inf"))) == [0, 1, 4]
    assert list(pool().map_unordered(square, [2], timeout=1e300)) == [4]


def test_results_come_back_in_order(pool):
    assert list(pool().map(square, range(20))) == [x * x for x in range(20)]
    assert pool().submit(pow, 2, exp=5).result() == 32


def test_a_call_sees_exactly_its_devices(pool):
    gpu = pool("A1:1")
    mask, units, pid = gpu.submit(seen).result()
    assert units == [10_000]
    assert mask in {device.id for device in gpu._core.inventory.devices}
    both, units, other = gpu.options(needs="A1:2").submit(seen).result()
    assert len(both.split(",")) == 2
    assert pid != other != os.getpid()
    assert gpu.options(needs="A1:0.25").submit(seen).result()[1] == [2500]


def caps_are_loaded():
    return "anyaccel.launcher.caps" in sys.modules


def test_only_a_worker_with_a_part_of_a_device_imports_what_caps_frameworks(pool):
    """Each fresh process would import it anew, which takes a seventh of a fresh call."""
    gpu = pool("A1:1", cap=True)
    assert not gpu.submit(caps_are_loaded).result()
    assert gpu.options(needs="A1:0.5").submit(caps_are_loaded).result()


def test_a_pool_shows_what_its_workers_run_and_hold(pool, tmp_path):
    gpu = pool("A1:1")
    assert repr(gpu) == "<Pool A1:1: 0 workers>"
    running = gpu.submit(wait_for, tmp_path / "go")
    until(lambda: running.running() and running.allocation, "the call")
    (device,) = running.allocation.devices
    assert repr(gpu) == "<Pool A1:1: 1 worker>"
    shown = gpu._repr_html_()
    assert f"<td>wait_for</td><td>0</td><td>{device.name} {device.id}</td>" in shown
    child = os.fork()
    if not child:
        os._exit(0 if "of another process" in repr(gpu) and "wait_for" not in gpu._repr_html_() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (tmp_path / "go").touch()
    running.result()
    gpu.shutdown()
    assert repr(gpu) == "<Pool A1:1: shut down>"
    assert "<td>" not in gpu._repr_html_()
    assert repr(pool()) == "<Pool CPU: 0 workers>"


def test_calls_without_needs_see_no_device(pool, monkeypatch):
    monkeypatch.setenv("ACME_VISIBLE", "0,1")
    assert pool().submit(os.getenv, "ACME_VISIBLE").result() == ""
    assert pool().submit(lambda: aa.current().devices).result() == ()
    assert pool(unallocated="inherit").submit(os.getenv, "ACME_VISIBLE").result() == "0,1"


def test_masks_name_indexes_on_demand(pool):
    assert pool("A1:2", mask="index").submit(os.getenv, "ACME_VISIBLE").result() == "0,1"


def test_the_environment_and_directory_are_those_of_the_moment(pool, monkeypatch, tmp_path):
    one = pool("A1:1")
    one.submit(square, 1).result()
    monkeypatch.setenv("NEW", "1")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    found = one.submit(lambda: (os.environ.get("NEW"), os.environ.get("HOME"), os.getcwd(), sys.path[0])).result()
    assert found == ("1", None, str(tmp_path), str(tmp_path / "lib"))
    # What execs later inherits it, too.
    assert one.submit(subprocess.check_output, ["sh", "-c", "echo $NEW$ACME_VISIBLE"]).result().startswith(b"1acme-")


def test_needs_that_make_no_sense_are_refused_at_once(pool):
    with pytest.raises(aa.NeverFitsError):
        pool("A1:3")
    with pytest.raises(aa.UnknownNameError, match="unknown name"):
        pool().options(needs="A2")
    with pytest.raises(aa.UsageError, match=r"max_calls must be a whole number.*got -1"):
        pool(max_calls=-1)
    with pytest.raises(aa.UsageError, match=r"timeout must be a number of seconds \(more than 0\).*got 0"):
        pool().options(timeout=0)
    with pytest.raises(aa.UsageError, match=r"grace must be a duration such as.*got 'x'"):
        pool(grace="x")
    with pytest.raises(ValueError, match="max_workers must be greater than 0"):
        pool(max_workers=0)
    with pytest.raises(aa.MachineError):
        pool(machine="sim:nonsense").submit(square, 1)


def test_the_cpu_takes_what_no_device_ever_can(pool):
    assert pool("A1:4,else=cpu").submit(lambda: aa.current().cpu).result() is True
    assert pool("A1:1,else=cpu").submit(lambda: aa.current().cpu).result() is False


def test_declared_devices_count(pool):
    held = pool("FPGA:2", declare={"FPGA": 2}).submit(aa.current).result()
    assert [device.id for device in held.devices] == ["declared-FPGA-0", "declared-FPGA-1"]


def test_each_call_with_devices_has_a_process_of_its_own(pool):
    pids = [pool("A1:1").submit(os.getpid).result() for _ in range(3)]
    late = [pool().options(needs="A1:1").submit(os.getpid).result() for _ in range(3)]
    assert len({*pids, *late}) == 6


def test_processes_are_used_again_on_demand(pool):
    unlimited = pool("A1:1", max_calls=0, max_workers=1)
    assert len({unlimited.submit(os.getpid).result() for _ in range(5)}) == 1
    twice = pool("A1:1", max_calls=2, max_workers=1)
    pids = [twice.submit(os.getpid).result() for _ in range(6)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 2]
    assert len({pool(max_workers=1).submit(os.getpid).result() for _ in range(3)}) == 3  # a pool's own
    cpu = pool(max_workers=1)
    assert len({cpu.submit(os.getpid).result() for _ in range(3)}) == 1
    assert len({cpu.options(max_calls=1).submit(os.getpid).result() for _ in range(3)}) == 3


def test_an_unused_process_gives_its_devices_to_other_requests(pool):
    keeps = pool("A1:2", max_calls=0)
    pid = keeps.submit(os.getpid).result()
    assert pool("A1:1").submit(square, 2).result() == 4  # another pool's
    assert gone(pid)
    kept = keeps.submit(os.getpid).result()
    assert keeps.options(needs="A1:0.5").submit(square, 2).result() == 4  # its own
    assert gone(kept)


def test_an_unused_process_gives_its_devices_back_after_a_while(pool):
    keeps = pool("A1:2", max_calls=0, idle=0.05)
    pid = keeps.submit(os.getpid).result()
    until(lambda: gone(pid), "its end")
    until(lambda: not keeps._core.members, "its devices")


def test_two_pools_never_hold_one_device(pool, tmp_path):
    one, two = pool("A1:1"), pool("A1:1")
    running = [one.submit(wait_for, tmp_path / "go"), two.submit(wait_for, tmp_path / "go")]
    until(lambda: all(future.running() for future in running), "both")
    ids = {future.allocation.devices[0].id for future in running}
    assert len(ids) == 2
    third = one.submit(square, 3)
    assert third.allocation is None
    assert "taken" in third.why().message or third.why().reasons
    (tmp_path / "go").touch()
    assert third.result() == 9


def test_first_come_first_served_also_among_processes_that_are_kept(pool, tmp_path):
    keeps = pool("A1:1", max_calls=0, machine="sim:A1:1")
    order = []

    def noting(future, name):
        future.add_done_callback(lambda _: order.append(name))
        return future

    first = noting(keeps.submit(wait_for, tmp_path / "go"), "a1")
    second = noting(keeps.submit(square, 1), "a2")
    half = noting(keeps.options(needs="A1:0.5").submit(square, 1), "half")
    other = noting(pool("A1:1", machine="sim:A1:1").submit(square, 1), "other")
    last = noting(keeps.submit(square, 1), "a3")
    (tmp_path / "go").touch()
    concurrent.futures.wait([first, second, half, other, last])
    until(lambda: len(order) == 5, "all")
    assert order == ["a1", "a2", "half", "other", "a3"]


@pytest.mark.parametrize("shared", [True, False])
def test_bursts_over_kept_processes_keep_their_order_and_their_processes(pool, shared):
    kept = pool("A1:1", machine="sim:A1:1", max_calls=0, shared=shared)
    pids = set()
    for _ in range(8):  # each begins with an unused process, and the queue for its device is made meanwhile
        futures = [kept.submit(begun) for _ in range(60)]
        times, ran_in = zip(*[future.result() for future in futures], strict=True)
        assert list(times) == sorted(times)
        pids |= set(ran_in)
    assert len(pids) < 60  # of 480: hardly ever is a process given up just before it is needed


def test_the_number_of_processes_is_kept(pool, tmp_path):
    limited = pool("A1:0.1", max_workers=3)
    futures = [limited.submit(wait_for, tmp_path / "go") for _ in range(9)]
    until(lambda: sum(future.running() for future in futures) == 3, "three")
    assert len(limited._core.members) == 3
    (tmp_path / "go").touch()
    assert len({future.result() for future in futures}) == 9


def test_a_thousand_calls(pool):
    cpu = pool()
    assert sum(cpu.map(square, range(1000))) == sum(x * x for x in range(1000))
    kept = pool("A1:0.5", max_calls=0)
    assert sum(kept.map(square, range(1000))) == sum(x * x for x in range(1000))


def test_many_processes(pool, tmp_path):
    devices = length(1, 4)
    many = pool("A1:0.0625", machine=f"sim:A1:{devices}")
    futures = [many.submit(wait_for, tmp_path / "go") for _ in range(16 * devices)]
    until(lambda: all(future.running() for future in futures), "all")
    (tmp_path / "go").touch()
    assert len({future.result() for future in futures}) == 16 * devices


def test_submit_from_many_threads(pool):
    kept = pool("A1:0.25", max_calls=0)
    results = []

    def work(base):
        results.extend(kept.submit(square, base + i).result() for i in range(25))

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted((100 * n + i) ** 2 for n in range(8) for i in range(25))


def test_an_exception_comes_back_with_its_traceback(pool):
    with pytest.raises(KeyError, match="lost") as caught:
        pool("A1:1").submit(raise_, KeyError("lost")).result()
    text = str(caught.value.__cause__)
    assert "in raise_" in text
    assert "raise error" in text
    assert "workers/worker.py" not in text


def test_an_exception_that_cannot_travel_leaves_its_text(pool):
    with pytest.raises(aa.RemoteError, match="OddError: a and b") as caught:
        pool().submit(lambda: raise_(OddError("a", "b"))).result()
    assert "in raise_" in str(caught.value.__cause__)
    assert "missing 1 required positional argument: 'two'" in caught.value.hint
    assert "pass all arguments of __init__ to super().__init__()" in caught.value.hint


def test_an_exception_of_a_class_that_is_not_here_leaves_its_text_too(pool):
    def raise_own():
        class OwnError(Exception):
            def __reduce__(self):
                return made_here, (os.getpid(),)

        raise OwnError("of the worker")

    with pytest.raises(aa.RemoteError, match=r"^OwnError: of the worker\n") as caught:
        pool().submit(raise_own).result()
    assert "cannot be unpickled here: ImportError: not a module of this process" in caught.value.hint


def made_here(process):
    if process != os.getpid():
        raise ImportError("not a module of this process")
    return ValueError(process)


@pytest.mark.parametrize("plain", [False, True])
def test_an_exception_that_refuses_attributes_or_a_description_fails_its_call_alone(pool, plain):
    def fail(which):
        if which == "unprintable":
            raise SyntaxError("no position", ("file", "no line", object(), "text"))
        raise ReadOnlyError(which)

    results = "plain" if plain else "pickle"
    calls = pool("A1:1", max_calls=0, max_workers=1, results=results)
    process = calls.submit(os.getpid).result(PATIENCE)
    error = calls.submit(fail, "a").exception(PATIENCE)
    assert "a" in str(error)
    assert isinstance(error, aa.RemoteError if plain else ReadOnlyError)
    assert "raise ReadOnlyError(which)" in str(error.__cause__)
    assert "no position" in str(calls.submit(fail, "unprintable").exception(PATIENCE))
    with pytest.raises(aa.RemoteError if plain else ReadOnlyError):
        list(calls.map(fail, "a"))
    assert calls.submit(os.getpid).result(PATIENCE) == process
    assert "a" in str(calls.gang(1, fail, "a").exception(PATIENCE))


def test_what_cannot_be_pickled_fails_and_nothing_else_does(pool):
    cpu = pool()
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        cpu.submit(square, lock).result()
    with pytest.raises(TypeError, match="pickle"):
        cpu.submit(threading.Lock).result()
    with pytest.raises(pickle.PicklingError, match="recursion"):
        cpu.submit(nested, 100_000).result()
    assert cpu.submit(square, 3).result() == 9


def test_what_cannot_be_pickled_is_named(pool):
    cpu, lock = pool(), threading.Lock()
    calls = {
        "the arguments of square": lambda: cpu.submit(square, lock),
        "the variable lock": lambda: cpu.submit(lambda: lock),
        "the global LOCK": lambda: cpu.submit(use_lock, 3),
    }
    for name, submit in calls.items():
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object") as caught:
            submit().result()
        assert caught.value.__notes__[-1:] == [f"what cannot be sent: {name}"]


LOCK = threading.Lock()


def use_lock(number):
    with LOCK:
        return abs(number)


def test_what_belongs_to_its_process_says_so_where_it_is_sent(pool):
    """A function takes along the globals that it uses, a method its object."""
    cpu = pool()
    with pytest.raises(TypeError, match=r"a pool belongs to .* make another one inside of the call"):
        cpu.submit(lambda: cpu.submit(square, 3)).result()
    with pytest.raises(TypeError, match=r"a pool belongs to the process that made it"):
        cpu.submit(repr, cpu.options(needs=None)).result()
    with pytest.raises(TypeError, match=r"a future belongs to .* pass its result\(\)"):
        cpu.submit(square, cpu.submit(square, 3)).result()
    with pytest.raises(TypeError, match=r"pass a list of them"):
        cpu.submit(sum, cpu.map(square, [3])).result()
    assert cpu.submit(square, 3).result() == 9


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def test_a_result_that_cannot_be_unpickled_here(pool):
    class Sly:
        def __reduce__(self):
            return os.kill, (0, "no signal")

    with pytest.raises(aa.RemoteError, match="cannot be unpickled here: TypeError"):
        pool().submit(Sly).result()


def test_a_module_that_the_worker_cannot_import(pool, tmp_path, monkeypatch):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "far_away.py").write_text("def f(): return 1")
    cpu = pool(max_workers=1)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path / "far"))
        import far_away
    try:
        with pytest.raises(ModuleNotFoundError) as caught:
            cpu.submit(far_away.f).result()
        assert "register_pickle_by_value" in caught.value.__notes__[0]
    finally:
        del sys.modules["far_away"]


def test_large_arrays_travel_beside_the_pickle(pool):
    data = bytes(range(256)) * 4096
    assert pool().submit(bytes.upper, data).result() == data.upper()
    view = pool().submit(lambda array: (len(array.data), array), Buffer(bytearray(data))).result()
    assert view[0] == len(data)
    assert bytes(view[1].data) == data
    view[1].data[0] = 7  # ours alone


class Buffer:
    """As arrays are: memory that pickles out of band."""

    def __init__(self, data):
        self.data = data

    def __reduce_ex__(self, protocol):
        return Buffer, (pickle.PickleBuffer(self.data),)


def test_what_becomes_of_an_argument_after_submit_does_not_matter(pool, tmp_path):
    one = pool("A1:1", machine="sim:A1:1")
    blocker = one.submit(wait_for, tmp_path / "go")
    data = bytearray(b"a" * 100_000)
    waiting = one.submit(lambda buffer: bytes(buffer.data[:3]), Buffer(data))
    data[:3] = b"xyz"
    (tmp_path / "go").touch()
    blocker.result()
    assert waiting.result() == b"aaa"


def test_a_large_result(pool):
    size = length(1 << 26, 1 << 30)
    data = pool("A1:1").submit(lambda: Buffer(bytearray(size))).result().data
    assert len(data) == size
    del data


def test_initializer_and_preload(pool):
    def prepare(value):
        os.environ["PREPARED"] = value

    ready = pool("A1:1", initializer=prepare, initargs=("yes",), preload=["colorsys"])
    assert ready.submit(lambda: (os.environ["PREPARED"], "colorsys" in sys.modules)).result() == ("yes", True)
    assert pool("A1:1").submit(lambda: "colorsys" in sys.modules).result() is False


def test_an_initializer_that_fails_breaks_the_pool(pool):
    broken = pool("A1:1", initializer=raise_, initargs=(OSError("no licence"),))
    with pytest.raises(concurrent.futures.BrokenExecutor, match="OSError: no licence") as caught:
        broken.submit(square, 1).result()
    assert "in raise_" in str(caught.value.__cause__.__cause__)
    until(lambda: broken._core.broken, "it")
    with pytest.raises(aa.BrokenPoolError):
        broken.submit(square, 1)


def test_a_sandbox_stands_before_all_user_code(pool, tmp_path):
    def confine():
        assert "ACME_VISIBLE" in os.environ
        assert os.getsid(0) == os.getpid()
        (tmp_path / "confined").touch()

    class Arrives:
        def __reduce__(self):
            return os.stat, (str(tmp_path / "confined"),)

    assert pool("A1:1", sandbox=confine).submit(lambda stat: stat.st_size, Arrives()).result() == 0
    with pytest.raises(aa.BrokenPoolError, match="PermissionError"):
        pool("A1:1", sandbox=lambda: raise_(PermissionError("no"))).submit((tmp_path / "ran").touch).result()
    assert not (tmp_path / "ran").exists()


def test_output_goes_where_ours_goes(pool, capfd):
    def speak():
        print("to stdout")
        print("to stderr", file=sys.stderr)
        os.system("echo from a child")

    pool("A1:1").submit(speak).result()
    out, err = capfd.readouterr()
    assert out == "to stdout\nfrom a child\n"
    assert err == "to stderr\n"


def test_output_goes_into_a_file_for_each_call(pool, tmp_path, capfd):
    logged = pool(max_workers=1, logs=tmp_path / "logs")
    futures = [logged.submit(print, f"call {i}") for i in range(3)]
    concurrent.futures.wait(futures)
    assert [Path(future.log).read_text() for future in futures] == ["call 0\n", "call 1\n", "call 2\n"]
    assert sorted(os.listdir(tmp_path / "logs")) == ["000001-print.log", "000002-print.log", "000003-print.log"]
    assert capfd.readouterr().out == ""


def test_a_waiting_call_can_be_cancelled(pool, tmp_path):
    one = pool("A1:1", machine="sim:A1:1")
    blocker = one.submit(wait_for, tmp_path / "go")
    waiting = [one.submit(square, i) for i in range(3)]
    assert waiting[0].cancel()
    assert waiting[0].cancelled()
    assert waiting[0].cancel()
    (tmp_path / "go").touch()
    assert [blocker.result() > 0, waiting[1].result(), waiting[2].result()] == [True, 1, 4]
    assert not waiting[1].cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting[0].result()


def test_a_running_call_can_be_cancelled_with_all_that_it_started(pool, tmp_path):
    def spread(path):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sleep 1000 & sleep 1000"])
        path.write_text(f"{os.getpid()} {child.pid}")
        time.sleep(1000)

    one = pool("A1:1", machine="sim:A1:1", grace=0.2)
    running = one.submit(spread, tmp_path / "pids")
    pids = until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split(), "the call")
    assert running.running()
    assert running.cancel()
    assert concurrent.futures.wait([running], timeout=60).done == {running}
    assert one.submit(square, 2).result() == 4  # the device has come back
    assert all(gone(int(pid)) for pid in pids)


@pytest.mark.parametrize("seconds", [90 * 86_400, math.inf])
def test_times_may_be_longer_than_the_kernel_waits_at_once(pool, seconds):
    one = pool("A1:1", max_calls=0, shared=False, timeout=seconds, grace=seconds, idle=seconds)
    running = one.submit(time.sleep, 1000)
    until(running.running, "the call")
    assert running.cancel()  # its process is asked to end, and has so long
    assert one.submit(square, 2).result(PATIENCE) == 4
    assert one.submit(square, 3).result(90 * 86_400) == 9


@pytest.mark.parametrize("name", ["grace", "idle", "timeout"])
def test_a_time_that_is_no_number_is_refused(pool, name):
    with pytest.raises(aa.UsageError, match=rf"{name} must be a number of seconds.* \(got nan\)"):
        pool(**{name: math.nan})


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [("mask", "idx", aa.UsageError), ("unallocated", "show", aa.UsageError), ("sandbox", 3, TypeError),
     ("max_workers", 1.5, ValueError), ("max_workers", "2", ValueError)],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused(pool, option, value, error):
    with pytest.raises(error, match=rf"^{option} must be .* \(got {value!r}\)"):
        pool(**{option: value})


class Interrupts:
    """Cannot be unpickled, as if Ctrl-C were pressed in the middle of it."""

    def __reduce__(self):
        return exec, ("raise KeyboardInterrupt",)


def test_a_result_that_interrupts_its_reader_costs_its_call_alone(pool):
    one = pool(max_workers=1)
    with pytest.raises(aa.RemoteError, match="cannot be unpickled here: KeyboardInterrupt"):
        one.submit(Interrupts).result()
    assert one.submit(square, 3).result() == 9


def test_a_wait_for_a_result_may_be_over_already_or_last_for_ever(pool, tmp_path):
    one = pool(max_workers=1, grace=0.2)
    running = one.submit(wait_for, tmp_path / "go")
    for late in (-1, -0.5, 0, float("-inf")):
        with pytest.raises(TimeoutError):
            running.result(late)
        with pytest.raises(TimeoutError):
            running.exception(late)
    (tmp_path / "go").touch()
    assert running.result(float("inf")) != os.getpid()


def test_asyncio(pool):
    one = pool("A1:1", machine="sim:A1:1", grace=0.2)

    async def main():
        assert await asyncio.wrap_future(one.submit(square, 4)) == 16
        assert await asyncio.get_running_loop().run_in_executor(one, square, 5) == 25
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(one.submit(time.sleep, 1000)), 0.1)
        assert await asyncio.wrap_future(one.submit(square, 6)) == 36

    asyncio.run(main())


def test_a_call_that_takes_too_long_is_ended(pool):
    one = pool("A1:1", machine="sim:A1:1", timeout=0.1, grace=0.2)
    with pytest.raises(aa.TaskTimeoutError, match=r"sleep took longer than its timeout of 0\.1 s"):
        one.submit(time.sleep, 1000).result()
    with pytest.raises(TimeoutError):
        one.submit(stubborn).result()
    assert one.options(timeout=None).submit(square, 3).result() == 9


def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def test_finally_runs_in_the_time_of_grace(pool, tmp_path):
    def careful():
        try:
            (tmp_path / "begun").touch()
            time.sleep(1000)
        finally:
            (tmp_path / "clean").touch()

    one = pool("A1:1", grace=PATIENCE)
    for seconds in (0.2, 2, 20):  # so that it has begun by then
        with pytest.raises(aa.TaskTimeoutError):
            one.options(timeout=seconds).submit(careful).result()
        if (tmp_path / "begun").exists():
            break
    until((tmp_path / "clean").exists, "cleaning up")


def test_shutdown_waits_for_all_calls(pool):
    one = pool("A1:1", machine="sim:A1:1")
    futures = [one.submit(square, i) for i in range(4)]
    one.shutdown()
    assert [future.result(timeout=0) for future in futures] == [0, 1, 4, 9]
    assert not one._core.members
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        one.submit(square, 1)


def test_shutdown_cancels_on_demand(pool, tmp_path):
    one = pool("A1:1", machine="sim:A1:1")
    running = one.submit(wait_for, tmp_path / "go")
    until(running.running, "it")
    waiting = [one.submit(square, i) for i in range(4)]
    one.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in waiting)
    (tmp_path / "go").touch()
    assert running.result() > 0


def test_a_pool_without_a_reference_ends_after_its_calls(pool):
    forgotten = aa.Pool("A1:1", machine="sim:A1:2")
    core, future = forgotten._core, forgotten.options(timeout=60).submit(square, 3)
    del forgotten
    assert future.result() == 9
    until(core.drained.done, "its end")


def test_a_fork_of_the_caller_has_no_pool(pool):
    one = pool("A1:1")
    one.submit(square, 1).result()
    pid = os.fork()
    if pid == 0:
        try:
            one.shutdown()
            one.submit(square, 1)
        except RuntimeError as error:
            os._exit(7 if "make a new one here" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert one.submit(square, 2).result() == 4


def test_a_pool_inside_a_worker_divides_what_the_worker_holds(pool):
    def inner():
        with aa.Pool("A1:1") as nested:
            ids = {nested.submit(lambda: aa.current().devices[0].id).result() for _ in range(2)}
            try:
                nested.options(needs="A1:2")
            except aa.NeverFitsError:
                return ids
        return None

    one = pool("A1:1")
    future = one.submit(inner)
    assert future.result() == {future.allocation.devices[0].id}


def test_no_descriptor_is_left_open(script):
    # In a process of its own: threads of earlier tests may still close theirs here.
    program = script(
        """
        import os, pickle, time
        import anyaccel as aa

        class Buffer:
            def __init__(self, data):
                self.data = data

            def __reduce_ex__(self, _):
                return Buffer, (pickle.PickleBuffer(self.data),)

        def opened():
            return len(os.listdir("/proc/self/fd"))

        def use(**options):
            with aa.Pool(machine="sim:A1:2", grace=1, **options) as pool:
                list(pool.map(abs, range(6)))
                pool.submit(lambda: Buffer(bytearray(1 << 20))).result()

        use(needs="A1:0.5", max_calls=0)
        counts = [opened()]
        while len(counts) < 10 or (len({*counts[-10:]}) > 1 and len(counts) < 200):  # until the first one is gone
            time.sleep(0.03)
            counts.append(opened())
        before = counts[-1]
        for _ in range(3):
            use(needs="A1:1")
        deadline = time.monotonic() + 60
        # Who has had to wait for a device keeps one idle watch; three pools would leave more.
        while opened() > before + 1 and time.monotonic() < deadline:
            time.sleep(0.03)
        print(opened() <= before + 1)
        """
    )
    told, errors = program.communicate(timeout=100)
    assert told == "True\n", errors


def test_a_gang_that_is_not_taken_leaves_no_port_open(pool):
    closed = pool()
    closed.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        closed.gang(1, os.getpid)
    gc.collect()  # a socket that was not closed is an error of this test


@pytest.mark.parametrize("cancel", [False, True])
def test_a_callback_may_shut_its_pool_down(pool, tmp_path, cancel):
    one = pool(max_workers=1)
    future = one.submit(wait_for, tmp_path / "go")
    future.add_done_callback(lambda _: one.shutdown(wait=True, cancel_futures=cancel))
    later = one.submit(abs, -1)
    threading.Timer(0.1, (tmp_path / "go").touch).start()
    assert future.result()  # in this thread, which takes the answer and so calls back
    one.shutdown()
    assert later.done()
    assert not one._core.members
