"""A fork of the caller: what it does with its copies of futures and actors does nothing to those of its parent."""

import os
import time

import anyaccel as aa
import pytest
from waiting import PATIENCE


class Counter:
    def __init__(self):
        self.value = 0

    def add(self):
        self.value += 1
        return self.value


def wait_for(path):
    while not path.exists():
        time.sleep(0.002)
    return "done"


def counted():
    yield from range(100)


def in_fork(function):
    """What a function comes to in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = repr(function())
        except BaseException as error:  # noqa: BLE001 - it must not run the tests that are left
            found = f"{type(error).__name__}: {error}"
        os.write(writing, found.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return found


@pytest.mark.parametrize("needs", [None, "A1:1"])
def test_a_fork_can_neither_cancel_a_call_nor_take_its_answer(pool, tmp_path, needs):
    one = pool(needs)
    future = one.submit(wait_for, tmp_path / "go")
    results = one.map(wait_for, [tmp_path / "go"] * 2)
    assert in_fork(future.cancel) == "False"
    assert "RuntimeError: the answer to wait_for goes to the process that this one was forked from" in in_fork(
        future.result
    )
    assert "RuntimeError" in in_fork(future.exception)
    assert in_fork(results.close) == "None"
    (tmp_path / "go").touch()
    assert future.result(PATIENCE) == "done"
    assert list(results) == ["done"] * 2
    assert in_fork(future.result) == "'done'"


@pytest.mark.parametrize("make", ["actor", "actors"])
def test_a_fork_can_neither_end_an_actor_nor_call_it(pool, make):
    one = pool("A1:1")
    counter = one.actor(Counter) if make == "actor" else one.actors(Counter, 1)
    assert counter.add().result() == 1
    assert "RuntimeError: this pool belongs to the process that this one was forked from" in in_fork(counter.add)
    for end in (counter.close, counter.kill):
        assert in_fork(end) == "None"
    with counter:
        assert in_fork(lambda: counter.__exit__(None, None, None)) == "None"
        assert counter.add().result(PATIENCE) == 2


def test_a_fork_can_neither_end_a_stream_nor_take_its_items(pool):
    stream = pool().options(ahead=2).stream(counted)
    assert next(stream) == 0
    assert in_fork(stream.close) == "None"
    in_fork(lambda: list(stream))
    assert list(stream) == [*range(1, 100)]


def test_an_actor_that_a_fork_forgets_writes_into_none_of_its_files(pool, tmp_path):
    """The descriptor by which the parent's thread is woken has a number that may be that of another file there."""
    counter = [pool().actor(Counter)]
    assert counter[0].add().result() == 1

    def forget():
        files = [os.open(tmp_path / f"file{number}", os.O_WRONLY | os.O_CREAT) for number in range(64)]
        counter.clear()
        return [os.fstat(file).st_size for file in files if os.fstat(file).st_size]

    assert in_fork(forget) == "[]"
    assert counter[0].add().result(PATIENCE) == 2


def test_a_fork_has_pools_of_its_own(pool):
    assert pool().submit(abs, -1).result() == 1

    def own():
        with aa.Pool("A1:1", machine="sim:A1:2") as made:
            return made.submit(abs, -2).result()

    assert in_fork(own) == "2"


LATE = """
import sys

main = sys.modules["__main__"]
main.begun.set()
main.forking.wait()
"""
FORK_IN_BETWEEN = """
import importlib, os, threading, warnings
import anyaccel as aa
from anyaccel.linux import fork as forks

warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # since 3.12, of each fork below
forks.FORK_SECONDS = -1  # however slow the machine is
begun, forking = threading.Event(), threading.Event()
called, over = threading.Event(), threading.Event()

class Answer:
    def __reduce__(self):
        return importlib.import_module, ("late",)

def call(_):
    called.set()
    over.wait()

def fork(child):
    pid = os.fork()
    if not pid:
        try:
            child()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def main():
    with aa.Pool("A1:1", machine="sim:A1:2", max_calls=0) as pool:
        first = pool.submit(abs, -1)
        first.add_done_callback(call)
        called.wait()
        print(fork(first.done))
        over.set()
        second = pool.submit(Answer)
        begun.wait()
        os.register_at_fork(before=forking.set)
        print(fork(lambda: importlib.import_module("late")))
        print(second.result().__name__)

main()
"""


def test_a_fork_waits_for_an_import_by_an_answer_and_not_for_a_callback(script, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    assert script(FORK_IN_BETWEEN).communicate() == ("0\n0\nlate\n", "")
