"""Waiting for an answer in one's own thread: awake or asleep, with the loop out of the way, and not for longer."""

import socket
import threading
import time
from concurrent.futures import Future

import pytest
from anyaccel.pool import channel as spinning
from anyaccel.pool.call import Call, Options
from anyaccel.pool.channel import Kind, Spin, send
from waiting import PATIENCE, until


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


class Clock:
    """A clock that goes on by a step at every look."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def monotonic(self):
        self.now += self.step
        return self.now


def looks(monkeypatch, outcomes):
    """Let spinning see these outcomes in turn, each a message or None for a look in vain; returns how it looked."""
    seen = []

    def receive(_, *, wait):
        seen.append("sleep" if wait else "look")
        found = outcomes.pop(0)
        if found is None:
            raise BlockingIOError
        return found

    monkeypatch.setattr(spinning, "receive", receive)
    return seen


def test_who_was_answered_quickly_stays_awake_for_the_next_answer(monkeypatch, pair):
    monkeypatch.setattr(spinning, "time", Clock(spinning.SPIN_SECONDS / 10))
    seen = looks(monkeypatch, ["a", None, None, "b", "c"])
    spin = Spin()
    assert [spin.receive(pair[0]) for _ in range(3)] == ["a", "b", "c"]
    assert seen == ["sleep", "look", "look", "look", "look"]


def test_who_waited_for_long_sleeps_the_next_time(monkeypatch, pair):
    clock = Clock(spinning.SPIN_SECONDS * 2)
    monkeypatch.setattr(spinning, "time", clock)
    seen = looks(monkeypatch, ["a", "b"])
    spin = Spin()
    assert [spin.receive(pair[0]) for _ in range(2)] == ["a", "b"]
    assert seen == ["sleep", "sleep"]


def test_who_stayed_awake_in_vain_sleeps_for_a_while_though_answers_are_quick(monkeypatch, pair):
    clock = Clock(spinning.SPIN_SECONDS / 2.5)
    monkeypatch.setattr(spinning, "time", clock)
    seen = looks(monkeypatch, ["a", None, None, "b", *["c"] * spinning.SLEEPS, "d"])
    spin = Spin()
    for _ in range(spinning.SLEEPS + 3):
        spin.receive(pair[0])
    assert seen == ["sleep", "look", "look", "sleep", *["sleep"] * spinning.SLEEPS, "look"]


def test_only_one_thread_stays_awake(monkeypatch, pair):
    seen = looks(monkeypatch, ["a", "b"])
    spin = Spin()
    spin.receive(pair[0])
    with spinning._awake:
        spin.receive(pair[0])
    assert seen == ["sleep", "sleep"]


def test_waiting_ends_when_the_time_is_up(pair):
    ours, theirs = pair
    spin = Spin()
    start = time.monotonic()
    with pytest.raises(BlockingIOError):
        spin.receive(ours, 0.05)
    assert time.monotonic() - start >= 0.05
    send(theirs, Kind.RESULT, b"now")
    assert bytes(spin.receive(ours, 10).data) == b"now"


def test_a_result_may_be_waited_for_for_some_time_only(pool, tmp_path):
    one = pool()
    assert one.submit(pow, 2, 3).result(60) == 8
    slow = one.submit(until, (tmp_path / "go").exists, "the word to go on")
    until(slow.running, "the call to run")
    with pytest.raises(TimeoutError):
        slow.result(0.1)
    (tmp_path / "go").touch()
    assert slow.result(60) is True
    failed = one.submit(int, "x")
    assert isinstance(failed.exception(60), ValueError)


def test_answers_arrive_whether_or_not_somebody_waits(pool):
    one = pool()
    for _ in range(30):
        assert one.submit(pow, 2, 3).result() == 8
        called = threading.Event()
        one.submit(pow, 2, 3).add_done_callback(lambda _, called=called: called.set())
        assert called.wait(PATIENCE)


def test_a_future_is_made_as_its_base_class_makes_it():
    bare, ours = vars(Future()), vars(Call("x", Options.of(), print).future)
    del bare["_condition"]
    assert {name: ours[name] for name in bare} == bare
