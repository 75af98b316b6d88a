"""Calls that are cancelled at an awkward moment."""

import time

from anyaccel.pool.forkserver import client
from processes import until


def test_a_call_that_is_cancelled_while_its_worker_is_being_made(pool, monkeypatch):
    spawn = client.spawn
    one = pool("A1:1", machine="sim:A1:1")
    running = one.submit(time.sleep, 1000)  # what follows is launched once this has ended
    until(running.running, "the first call")
    future = one.submit(pow, 2, 2)

    def cancel_and_spawn(*arguments, **options):
        monkeypatch.setattr(client, "spawn", spawn)
        future.cancel()
        return spawn(*arguments, **options)

    monkeypatch.setattr(client, "spawn", cancel_and_spawn)
    running.cancel()
    until(future.cancelled, "the second call")
    assert one.submit(pow, 2, 3).result(60) == 8
