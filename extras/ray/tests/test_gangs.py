"""Gangs: one call on each of several nodes at once."""

import time

import anyaccel as aa
import pytest
from engine_gangs import WAIT, ended, fail_at, meet, place
from waiting import until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray's own
]


@pytest.fixture(scope="module")
def nodes(ray_nodes):
    """Two more nodes, with two devices each."""
    added = [ray_nodes.add("sim:A1:2", cpus=1) for _ in range(2)]
    yield ray_nodes
    for node in added:
        ray_nodes.kill(node)


@pytest.fixture
def begun(tmp_path):
    """Where calls say that they have begun."""
    path = tmp_path / "begun"
    path.mkdir()
    return path


@pytest.mark.parametrize(("needs", "count"), [("A1:2", 2), (None, 0)])
def test_each_has_a_node_of_its_own_and_they_meet(nodes, pool, needs, count):
    results = pool(needs).gang(3, meet).result(WAIT)
    assert results[0][0] == ["1 of 3", "2 of 3"]
    assert len({state for _, (state, _) in results}) == 3, "each node has a state directory of its own"
    assert [len(devices) for _, (_, devices) in results] == [count] * 3


def test_when_one_fails_the_others_are_ended(nodes, pool, begun):
    pool = pool("A1:1")
    gang = pool.gang(3, fail_at, 1, begun)
    with pytest.raises(LookupError, match="nothing here") as caught:
        gang.result(WAIT)
    assert caught.value.__notes__ == ["It is rank 1 of a gang of 3; the others were ended."]
    assert [member.cancelled() for member in gang.members] == [True, False, True]
    until(lambda: ended(begun), "the end of the others")
    assert len(pool.gang(3, place).result(WAIT)) == 3, "what was reserved is free again"


def test_a_gang_that_runs_can_be_cancelled(nodes, pool, begun):
    gang = pool("A1:1").gang(2, fail_at, 5, begun)
    until(lambda: len(list(begun.iterdir())) == 2, "both")
    assert gang.cancel()
    assert gang.cancelled()
    until(lambda: ended(begun), "their end")


def test_a_gang_waits_for_all_its_devices_and_can_be_cancelled(nodes, pool, begun):
    pool = pool("A1:2")
    first = pool.gang(3, fail_at, 5, begun)
    until(lambda: len(list(begun.iterdir())) == 3, "the first")
    waits, follows = pool.gang(3, place), pool.gang(2, place)
    assert "Ray has not placed it" in waits.members[0].why().reasons[0].message
    assert waits.cancel()
    time.sleep(1)
    assert not follows.running()
    assert first.cancel()
    assert [variables[0] for variables, _ in follows.result(WAIT)] == ["0", "1"]


def test_shutdown_can_cancel_a_gang_that_waits_and_none_that_runs(nodes, pool, begun):
    busy, idle = pool("A1:2"), pool("A1:2")
    runs = busy.gang(3, fail_at, 5, begun)
    until(lambda: all(member.running() for member in runs.members), "the first")
    waits = idle.gang(2, place)
    idle.shutdown(cancel_futures=True)
    assert waits.cancelled()
    busy.shutdown(wait=False, cancel_futures=True)
    time.sleep(0.5)
    assert not runs.done()
    assert runs.cancel()


def test_a_pool_that_is_closed_waits_for_its_gangs(nodes, pool):
    pool = pool("A1:1")
    gang = pool.gang(3, time.sleep, 0.5)
    pool.shutdown()
    assert gang.done()
    assert gang.result() == [None] * 3


def test_more_nodes_than_there_are_are_refused(nodes, pool):
    with pytest.raises(
        aa.NeverFitsError, match=r"^a gang of 4 needs as many nodes that can serve A1:2, and the cluster has 3$"
    ):
        pool("A1:2").gang(4, place)
    with pytest.raises(aa.NeverFitsError, match=r"^a gang of 2 .* serve A1:4, and the cluster has 1$"):
        pool("A1:4").gang(2, place)
    with pytest.raises(aa.UsageError, match="max_workers must be None"):
        pool("A1:1", max_workers=4).gang(2, place)


def test_when_a_node_dies_the_others_are_ended(nodes, pool, begun):
    dying = nodes.add("sim:A1:3", cpus=1)
    pool = pool("A1:1")
    gang = pool.gang(4, fail_at, 5, begun)
    until(lambda: len(list(begun.iterdir())) == 4, "all")
    nodes.kill(dying)
    with pytest.raises(aa.BrokenWorkerError, match="since the node or Ray's process there has died"):
        gang.result(WAIT)
    until(lambda: ended(begun), "the end of all")
