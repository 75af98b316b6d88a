"""Calls that are cancelled at an awkward moment."""

import threading
import time

from anyaccel.pool import spawning
from anyaccel.pool.dispatcher import WorkerProcess
from anyaccel.pool.messages import MessageKind
from waiting import PATIENCE, until


def test_a_call_that_is_cancelled_while_its_worker_is_being_made(pool, monkeypatch):
    spawn = spawning.spawn
    one = pool("A1:1", machine="sim:A1:1")
    running = one.submit(time.sleep, 1000)  # what follows is launched once this has ended
    until(running.running, "the first call")
    future = one.submit(pow, 2, 2)

    def cancel_and_spawn(*arguments, **options):
        monkeypatch.setattr(spawning, "spawn", spawn)
        future.cancel()
        return spawn(*arguments, **options)

    monkeypatch.setattr(spawning, "spawn", cancel_and_spawn)
    running.cancel()
    until(future.cancelled, "the second call")
    assert one.submit(pow, 2, 3).result(PATIENCE) == 8


class Echo:
    def say(self, word):
        return word


def test_a_method_that_is_cancelled_while_it_is_handed_over_leaves_its_actor_alive(pool, monkeypatch):
    echo = pool().actor(Echo)
    echo.ready.result()
    send_call = WorkerProcess.send_call

    def cancel_and_send(member, call, **options):
        if call.kind == MessageKind.METHOD:
            monkeypatch.setattr(WorkerProcess, "send_call", send_call)
            other = threading.Thread(target=call.future.cancel)
            other.start()
            until(call.future.cancelled, "the cancellation")
            other.join()
        send_call(member, call, **options)

    monkeypatch.setattr(WorkerProcess, "send_call", cancel_and_send)
    first = echo.say("first")
    until(first.cancelled, "the cancellation")
    assert echo.say("second").result(PATIENCE) == "second"
