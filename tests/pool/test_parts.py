"""The parts that pools are made of: pickles, memory, messages, the loop, progress."""

import gc
import io
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import anyaccel as aa
import pytest
from anyaccel.linux.process import describe_end
from anyaccel.pool import messages, reactor, results
from anyaccel.pool.engine import Logs
from anyaccel.pool.messages import LARGE, MOST_INLINE, MessageKind, Pickled, dumps, dumps_whole, loads, receive, send
from anyaccel.pool.reactor import Reactor
from anyaccel.pool.results import Progress, ProgressLine, find_display
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import length
from waiting import PATIENCE, until


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


@given(
    data=st.binary(max_size=100),
    sizes=st.lists(st.sampled_from([0, 1, 63, 64, 65, LARGE, MOST_INLINE, MOST_INLINE + 1]), max_size=4),
    descriptors=st.integers(0, 3),
)
@settings(max_examples=length(20, 60), deadline=None)
def test_messages_arrive_as_they_were_sent(data, sizes, descriptors):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        buffers = [memoryview(os.urandom(size)) for size in sizes]
        opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(descriptors)]
        send(ours, MessageKind.CALL, Pickled(data, buffers), opened)
        message = receive(theirs)
        assert (message.kind, bytes(message.data)) == (MessageKind.CALL, data)
        assert [bytes(buffer) for buffer in message.buffers] == [bytes(buffer) for buffer in buffers]
        assert len(message.descriptors) == descriptors
        assert all(not os.get_inheritable(fd) for fd in message.descriptors)
        for fd in (*opened, *message.descriptors):
            os.close(fd)


def test_messages_leave_no_descriptor_open():
    # In a process of its own: threads of earlier tests may still close theirs here.
    program = """
        import os, socket
        from anyaccel.pool.messages import Pickled
        from anyaccel.pool.messages import MOST_INLINE, MessageKind, receive, send
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = os.listdir("/proc/self/fd")
        for size in (0, MOST_INLINE, MOST_INLINE + 1):
            buffers = [memoryview(bytes(size))] * 2
            send(ours, MessageKind.CALL, Pickled(b"", buffers), [0, 1])
            message = receive(theirs)
            assert [len(buffer) for buffer in message.buffers] == [size, size]
            for fd in message.descriptors:
                os.close(fd)
        print(sorted(os.listdir("/proc/self/fd")) == sorted(before))
    """
    assert subprocess.check_output([sys.executable, "-c", textwrap.dedent(program)], text=True) == "True\n"


def test_the_end_of_a_channel(pair):
    ours, theirs = pair
    with pytest.raises(BlockingIOError):
        receive(theirs, wait=False)
    send(ours, MessageKind.RESULT, b"last words")
    send(theirs, MessageKind.CALL, b"never read")
    ours.close()
    with pytest.raises(ConnectionResetError):  # something was not read
        receive(theirs)
    assert bytes(receive(theirs).data) == b"last words"
    assert receive(theirs) is None
    with pytest.raises(BrokenPipeError):
        send(theirs, MessageKind.CALL, b"x")


@pytest.mark.parametrize("packet", [b"\x02", b"\x02\x01", b"\x02\x01" + struct.pack("=Q", 5)])
def test_a_packet_that_is_no_message(pair, packet):
    ours, theirs = pair
    ours.send(packet)
    with pytest.raises((ValueError, IndexError)):
        receive(theirs)


def test_shared_memory_that_could_shrink_under_us_is_refused():
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 100)
    small = messages.write_shared([b"abc"])
    try:
        with pytest.raises(ValueError, match="sealed"):
            messages.read_shared(unsealed, [100])
        with pytest.raises(ValueError, match="hold 128 bytes"):
            messages.read_shared(small, [100])
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(small, 0)
        assert [bytes(view) for view in messages.read_shared(small, [3])] == [b"abc"]
        assert [bytes(view) for view in messages.read_shared(small, [])] == []
    finally:
        os.close(unsealed)
        os.close(small)


def test_memory_is_unmapped_with_its_last_view():
    def mapped():
        with open("/proc/self/maps") as file:
            return sum("anyaccel" in line and line.split()[4] == inode for line in file)

    descriptor = messages.write_shared([bytes(1 << 20), bytes(10)])
    inode = str(os.fstat(descriptor).st_ino)  # what other tests have left is none of ours
    first, second = messages.read_shared(descriptor, [1 << 20, 10])
    os.close(descriptor)
    assert mapped() == 1
    del first
    gc.collect()
    second[0] = 7
    assert (mapped(), second[0]) == (1, 7)
    del second
    gc.collect()
    assert mapped() == 0


def test_what_a_script_defines_goes_by_value_and_the_rest_by_name():
    assert b"cloudpickle" not in dumps(os.path.join).data
    assert b"cloudpickle" in dumps(lambda: 1).data
    assert loads(dumps_whole((lambda x: x + 1, (1,))))[0](1) == 2
    assert loads(dumps("__main__").data) == "__main__"
    main = type("Main", (), {"__module__": "__main__"})
    assert b"cloudpickle" in dumps(main).data
    assert loads(dumps(main).data) is main  # in the process that it came from


def test_large_buffers_are_not_copied():
    data = bytearray(LARGE)
    pickled = dumps([pickle.PickleBuffer(data), pickle.PickleBuffer(bytearray(LARGE - 1))])
    assert [len(buffer) for buffer in pickled.buffers] == [LARGE]
    assert pickled.size == len(pickled.data) + LARGE
    frozen = pickled.copy()
    data[0] = 9
    assert (pickled.buffers[0][0], frozen.buffers[0][0]) == (9, 0)


def test_the_loop_survives_what_it_calls(caplog):
    loop = Reactor()
    done = threading.Event()
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(lambda: (_ for _ in ()).throw(SystemExit(3)))
    loop.call_soon(done.set)
    assert done.wait(PATIENCE)
    assert [record.message for record in caplog.records] == ["a handler of the reactor failed"] * 2
    assert not loop.inside


def test_a_descriptor_that_cannot_be_watched_again_keeps_its_handler():
    loop, called, refused = Reactor(), threading.Event(), threading.Event()
    read, write = os.pipe()

    def watch():
        loop.watch(read, lambda: (os.read(read, 1), called.set()))
        try:
            loop.watch(read, refused.clear)
        except FileExistsError:
            refused.set()

    loop.call_soon(watch)
    assert refused.wait(PATIENCE)
    os.write(write, b"x")
    assert called.wait(PATIENCE)
    os.close(read)
    os.close(write)


def test_timers_ring_in_order_and_not_when_cancelled(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(reactor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    loop, rung = Reactor(), []
    timers = [loop.call_later(number, lambda number=number: rung.append(number)) for number in (3, 1, 2)]
    timers[2].cancel()
    for _ in range(3000):  # those that are cancelled are thrown out
        loop.call_later(1000, rung.clear).cancel()
    arranged = threading.Event()
    loop.call_soon(arranged.set)
    assert arranged.wait(PATIENCE)
    assert len(loop._timers) < 2500
    assert not rung
    clock[0] = 10.0
    loop.call_soon(lambda: None)
    until(lambda: rung == [1, 3], "both")


def test_endings_in_words():
    words = [describe_end(status) for status in (None, 0, 3, -9, -64, -40)]
    assert words == [
        "ended",
        "ended with exit status 0",
        "ended with exit status 3",
        "was killed by SIGKILL",
        "was killed by SIGRTMAX",
        "was killed by signal 40",
    ]


def test_names_of_logs(tmp_path):
    logs = Logs(str(tmp_path / "a" / "b"))
    assert [os.path.basename(logs.path_for(name)) for name in ("f", "C.<locals>.g", "x" * 200)] == [
        "000001-f.log",
        "000002-C._locals_.g.log",
        f"000003-{'x' * 80}.log",
    ]
    later, beside = Logs(logs.directory), Logs(logs.directory)  # a later run, and another pool of it
    assert [os.path.basename(each.path_for("g")) for each in (later, beside, later)] == [
        "000004-g.log",
        "000005-g.log",
        "000006-g.log",
    ]


def test_progress_in_words():
    assert str(Progress(done=0, failed=0, total=4, seconds=1)) == "0 of 4 done"
    assert str(Progress(done=2, failed=1, total=4, seconds=90)) == "2 of 4 done, 1 failed, 1m30s left"
    assert str(Progress(done=4, failed=0, total=4, seconds=3 * 3600)) == "4 of 4 done in 3h00m"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_of_progress_is_redrawn(monkeypatch):
    terminal = Terminal()
    clock = [0.0]
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: clock[0]))  # the loop has its own
    line = ProgressLine(terminal)
    for step in range(49):
        clock[0] = step / 20
        line(Progress(done=step, failed=0, total=48, seconds=step / 20))
    assert 16 <= terminal.getvalue().count("\r\x1b[K") <= 25
    assert terminal.getvalue().endswith("48 of 48 done in 2s\n")


@pytest.mark.parametrize("name", ["tqdm", None])
def test_progress_is_shown_on_a_terminal(monkeypatch, name):
    if name is not None:
        pytest.importorskip(name)
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    tell = find_display(4)
    for done in range(1, 5):
        tell(Progress(done=done, failed=int(done > 2), total=4, seconds=done))
    words = {"tqdm": "| 4/4 [", None: "4 of 4 done, 1 failed in 4s\n"}
    assert words[name] in terminal.getvalue()
    assert re.search("failed=1|1 failed", terminal.getvalue())


def test_progress_is_not_shown_in_a_log(monkeypatch):
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert find_display(4) is None


def invert(number):
    return 1 / number


def test_map_in_chunks_with_progress(pool, monkeypatch):
    told = []
    results = pool().map(invert, [1, 2, 4, 8, 16], chunksize=2, progress=told.append)
    assert list(results) == [1, 0.5, 0.25, 0.125, 0.0625]
    until(lambda: told and told[-1].done == 5, "all")
    failing = pool().map(invert, [1, 0, 2], progress=told.append)
    assert next(failing) == 1
    with pytest.raises(ZeroDivisionError):
        next(failing)
    until(lambda: told[-1].done == 3, "all")
    assert told[-1].failed >= 1
    told.clear()
    failing = pool().map(invert, [1, 2, 0, 4, 5], batch=3, progress=told.append)
    assert [next(failing), next(failing)] == [1, 0.5]
    until(lambda: told and told[-1].done == 5, "all")
    assert told[-1].failed == 1
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert list(pool().map(invert, [1, 2], progress=True)) == [1, 0.5]
    until(lambda: re.search("2/2|2 of 2|100%", terminal.getvalue()), "the line")
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    assert list(pool().map(invert, [1, 2], progress=True)) == [1, 0.5]
    assert log.getvalue() == ""
    with pytest.raises(ValueError, match=r"chunksize must be a whole number, 1 or more \(got 0\)"):
        pool().map(invert, [1], chunksize=0)
    assert list(pool().map(invert, [])) == []


def test_what_shows_progress_ends_when_there_are_no_calls_or_none_can_be_made(pool, monkeypatch):
    """Where it is left open, what follows is written into its line."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    one = pool()
    assert list(one.map(invert, [], progress=True)) == []
    one.shutdown()
    assert terminal.getvalue() == ""
    with pytest.raises(RuntimeError, match="after shutdown"):
        one.map(invert, [1, 2], progress=True)
    until(terminal.getvalue, "the line")
    assert re.fullmatch(r"\r\x1b\[K2 of 2 done, 2 failed in \w+\n", terminal.getvalue())


@pytest.mark.parametrize("batch", [1, 2, None])
@pytest.mark.parametrize("unordered", [False, True])
def test_a_progress_callback_that_raises_ends_no_map(pool, batch, unordered, caplog):
    told = []

    def fail(progress):
        told.append(progress)
        raise SystemExit("no progress") if unordered else ValueError("no progress")

    one = pool()
    results = (one.map_unordered if unordered else one.map)(abs, [-1, -2, -3, -4], batch=batch, progress=fail)
    assert sorted(results) == [1, 2, 3, 4]
    assert len(told) == 1, "called again"
    assert [record.getMessage() for record in caplog.records] == [
        "the progress callback failed and is not called again"
    ]


@pytest.mark.parametrize("batch", [1, None])
def test_a_progress_callback_may_shut_the_pool_down(pool, batch):
    one = pool(max_workers=1)
    told = []

    def shut(progress):
        told.append(progress)
        one.shutdown(cancel_futures=True)

    results = one.map(abs, range(1000), batch=batch, progress=shut)
    with pytest.raises(CancelledError):
        list(results)
    until(lambda: told[-1].done == 1000, "the report of the cancelled calls")
    assert told[-1].failed  # how many have run before depends on the machine


class Closing:
    """Whatever ``__await__`` returns can be awaited; only what an ``async def`` returns is a coroutine."""

    def __init__(self, path):
        self.path = path

    def __await__(self):
        self.path.touch()
        return iter(())


class Endless:
    def __init__(self, path):
        self.path = path
        self.taken = 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        self.taken += 1
        (self.path / str(self.taken)).touch()
        return self.taken

    def aclose(self):
        return Closing(self.path / "closed")


def test_a_stream_left_early_awaits_the_end_of_its_iterator(pool, tmp_path):
    one = pool()
    stream = one.options(ahead=1).stream(Endless, tmp_path)
    assert next(stream) == 1
    until((tmp_path / "2").exists, "the item ahead")
    until(stream._futures[0].done, "its arrival")  # else the process is stopped, not asked to end
    stream.close()
    until((tmp_path / "closed").exists, "the end")


def test_a_map_with_an_invalid_timeout_submits_nothing(pool, tmp_path):
    one = pool()
    actors = one.actors(Scales, 1)
    for call in (
        lambda: one.map(os.mkdir, [tmp_path / "a"], timeout="soon"),
        lambda: one.map_unordered(os.mkdir, [tmp_path / "b"], timeout="soon"),
        lambda: actors.map("mark", [tmp_path / "c"], timeout="soon"),
    ):
        with pytest.raises(aa.UsageError, match="timeout"):
            call()
    actors.close()
    one.shutdown()
    assert not [name for name in "abc" if (tmp_path / name).exists()]


class Scales:
    def weigh(self, number):
        os._exit(number)

    def mark(self, path):
        path.mkdir()


def halves(number):
    yield number / 2


async def later_halves(number):
    yield number / 2


def test_a_batch_goes_by_the_name_of_what_it_calls(pool):
    one = pool()
    with pytest.raises(aa.BrokenWorkerError, match="that ran _exit ended with exit status 3"):
        list(one.map(os._exit, [3, 4], batch=2))
    with pytest.raises(aa.BrokenWorkerError, match=r"that ran Scales\.weigh ended with exit status 5"):
        list(one.actors(Scales, 1).map("weigh", [5, 6], batch=2))


@pytest.mark.parametrize("results", ["pickle", "plain"])
@pytest.mark.parametrize("function", [halves, later_halves])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_function_that_yields_is_for_a_stream(pool, results, function, batch):
    with pytest.raises(TypeError, match=f"call it with pool.stream\\({function.__name__}, ...\\)"):
        list(pool(results=results).map(function, [2, 4], batch=batch))


def negated_later_if_odd(number):
    async def negate():
        return -number

    return negate() if number % 2 else number


async def halves_later(number):
    return halves(number)


def halves_or_later(number):
    return halves_later(number) if number == 2 else halves(number)


class Halver:
    async def halves(self, number):
        return halves(number)


@pytest.mark.parametrize("function", [halves_later, halves_or_later])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_generator_among_coroutines_is_refused(pool, function, batch):
    results = pool().map(function, [2, 4], batch=batch)
    with pytest.raises(TypeError, match=r"call it with pool.stream\(halves, ...\)"):
        list(results)


def test_a_generator_of_an_actor_is_refused_in_its_place(pool):
    actors = pool().actors(Halver, 1)
    with pytest.raises(TypeError, match=r"a method of an actor has one result: return a list"):
        list(actors.map("halves", [2, 4], batch=2))


def test_calls_of_a_batch_may_return_values_or_coroutines(pool):
    assert list(pool().map(negated_later_if_odd, [0, 1, 2, 3], batch=4)) == [0, -1, 2, -3]


def test_a_map_that_is_not_wanted_any_more_is_cancelled(pool):
    one = pool("A1:1", machine="sim:A1:1", grace=0.1)
    results = one.map(time.sleep, [0, 1000, 1000])
    assert next(results) is None
    results.close()
    assert one.submit(pow, 2, 2).result() == 4
