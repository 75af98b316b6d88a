"""What Ray's documentation shows of devices, with our interface; the programs of ``examples/`` say the same."""

import os
import time

import anyaccel as aa
import pytest
from waiting import until


def visible():
    return os.environ["ACME_VISIBLE"]


def hold(path):
    while not path.exists():
        time.sleep(0.002)
    return visible()


class Actor:
    def visible(self):
        return visible()


def indexes(pool, *futures):
    """Positions of the devices that calls hold or held."""
    order = [device.id for device in pool._core.inventory.devices]
    return [[order.index(device.id) for device in future.allocation.devices] for future in futures]


def test_two_tasks_on_two_devices(pool, tmp_path):
    one = pool("A1:1", machine="sim:A1:2")
    futures = [one.submit(hold, tmp_path / "go") for _ in range(2)]
    until(lambda: all(future.running() for future in futures), "both")
    assert indexes(one, *futures) == [[0], [1]]
    (tmp_path / "go").touch()
    assert len({future.result() for future in futures}) == 2


def test_an_actor_takes_the_first_device_and_a_task_the_second(pool):
    one = pool("A1:1", machine="sim:A1:2")
    actor = one.actor(Actor)
    first = actor.visible()
    task = one.submit(visible)
    assert first.result() != task.result()
    assert indexes(one, first, task) == [[0], [1]]


def test_four_quarters_at_once(pool, tmp_path):
    one = pool("A1:0.25", machine="sim:A1:1")
    futures = [one.submit(hold, tmp_path / "go") for _ in range(5)]
    until(lambda: sum(future.running() for future in futures) == 4, "four")
    assert not futures[4].running()
    (tmp_path / "go").touch()
    assert len({future.result() for future in futures}) == 1


def test_three_halves_are_packed_0_0_1(pool):
    one = pool("A1:0.5", machine="sim:A1:2")
    actors = [one.actor(Actor) for _ in range(3)]
    futures = [actor.visible() for actor in actors]
    first, second, third = [future.result() for future in futures]
    assert first == second != third
    assert indexes(one, *futures) == [[0], [0], [1]]


def test_a_task_after_a_leaking_one_gets_a_clean_device(pool, tmp_path):
    """Memory of a device is held by a process: here a lock that the process never lets go of."""

    def leak(path):
        import builtins
        import fcntl

        builtins.leaked = [*getattr(builtins, "leaked", []), os.open(path, os.O_RDWR | os.O_CREAT)]
        fcntl.flock(builtins.leaked[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if a process has it still
        return os.getpid()

    path = tmp_path / "memory of the device"
    late = pool(machine="sim:A1:1").options(needs="A1:1")  # also where the need is said late
    assert len({late.submit(leak, path).result() for _ in range(5)}) == 5
    with pytest.raises(BlockingIOError):
        [late.options(max_calls=0).submit(leak, path).result() for _ in range(2)]


def test_none_hides_all_devices(pool, monkeypatch):
    monkeypatch.setenv("ACME_VISIBLE", "0,1")
    assert pool(machine="sim:A1:2").submit(visible).result() == ""
    assert aa.current() is None
