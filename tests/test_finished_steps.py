"""Steps are finished, however many interrupts come meanwhile."""

import os
import signal

import pytest
from anyaccel._interrupts import finish_step


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("interrupts", [1, 2, 5])
def test_a_step_is_called_again_after_each_interrupt_until_its_end(interrupts):
    calls = []

    def step():
        calls.append(len(calls))
        if len(calls) <= interrupts:
            interrupt()
        calls.append("ended")

    with pytest.raises(KeyboardInterrupt):
        finish_step(step)
    assert calls.count("ended") == 1
    assert len(calls) == interrupts + 2


def test_the_result_is_that_of_the_step_and_an_error_is_raised_after_a_second_call():
    assert finish_step(lambda: 7) == 7
    calls = []

    def step():
        calls.append(0)
        if len(calls) == 1:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        finish_step(step)
    assert len(calls) == 2
