"""Waiting for an answer: for some time, or until it calls back."""

import threading
from concurrent.futures import Future

import pytest
from anyaccel.pool.call import Call, Options
from waiting import PATIENCE, until


def test_a_result_may_be_waited_for_for_some_time_only(pool, tmp_path):
    one = pool()
    assert one.submit(pow, 2, 3).result(PATIENCE) == 8
    slow = one.submit(until, (tmp_path / "go").exists, "the word to go on")
    until(slow.running, "the call to run")
    with pytest.raises(TimeoutError):
        slow.result(0.1)
    (tmp_path / "go").touch()
    assert slow.result(PATIENCE) is True
    failed = one.submit(int, "x")
    assert isinstance(failed.exception(PATIENCE), ValueError)


def test_answers_arrive_whether_or_not_a_caller_waits(pool):
    one = pool()
    for _ in range(30):
        assert one.submit(pow, 2, 3).result() == 8
        called = threading.Event()
        one.submit(pow, 2, 3).add_done_callback(lambda _, called=called: called.set())
        assert called.wait(PATIENCE)


def test_a_future_is_made_as_its_base_class_makes_it():
    bare, ours = vars(Future()), vars(Call("x", Options(), print).future)
    del bare["_condition"]
    assert {name: ours[name] for name in bare} == bare
