"""Gangs: one call on each of several machines at once, on every engine."""

import os
import socket
import time

import anyaccel as aa
import pytest
from ray_nodes import needs_ray
from waiting import until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # Ray's own
]

WAIT = 90
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(params=["local", pytest.param("ray", marks=needs_ray)])
def pool(request, pool_on):
    return lambda needs=None, **options: pool_on(request.param, needs, **options)


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


def place():
    return [os.environ[name] for name in PLACE], os.environ["ACME_VISIBLE"].split(",")


def meet(*arguments):
    """Exchange a word over the port that all were told; return what the others said, and where we are."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    held = os.environ["ANYACCEL_STATE_DIR"], aa.current().devices
    if rank:
        with until(lambda: reached(address), "rank 0") as made:
            made.sendall(f"{rank} of {count}".encode())
        return [], held
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        server.settimeout(WAIT)
        return sorted(received(server) for _ in range(count - 1)), held


def reached(address):
    try:
        return socket.create_connection(address)
    except ConnectionRefusedError:
        return None


def received(server):
    with server.accept()[0] as made:
        return made.makefile().read()


def fail_at(rank, directory):
    """Fail at one rank; at all others, wait to be ended."""
    (directory / os.environ["RANK"]).write_text(str(os.getpid()))
    if int(os.environ["RANK"]) == rank:
        until(lambda: len(list(directory.iterdir())) == int(os.environ["WORLD_SIZE"]), "the others")
        raise LookupError("nothing here")
    time.sleep(2 * WAIT)


def ended(directory):
    """Whether all that have begun have gone."""
    return not any(os.path.exists(f"/proc/{file.read_text()}") for file in directory.iterdir())


def test_a_gang_of_one(pool):
    gang = pool("A1:2").gang(1, place)
    [(variables, mask)] = gang.result(WAIT)
    assert variables == ["0", "1", "0", "1"]
    assert mask == [device.id for device in gang.members[0].allocation.devices]
    assert len(mask) == 2
    assert gang.done()
    assert not gang.cancel()


def test_a_gang_without_needs_sees_no_device(pool):
    assert pool().gang(1, place).result(WAIT) == [(["0", "1", "0", "1"], [""])]


def test_the_port_is_there_to_listen_at(pool):
    [(others, _)] = pool().gang(1, meet).result(WAIT)
    assert others == []


def test_variables_of_a_gang_are_gone_in_the_next_call(pool):
    kept = pool(max_calls=0)
    kept.gang(1, place).result(WAIT)
    assert kept.submit(os.getenv, "RANK").result(WAIT) is None


def test_an_exception_says_whose_it_is(pool):
    gang = pool("A1:1").gang(1, divmod, 1, 0)
    with pytest.raises(ZeroDivisionError) as caught:
        gang.result(WAIT)
    assert caught.value.__notes__ == ["It is rank 0 of a gang of 1; the others were ended."]


@pytest.mark.parametrize(
    ("options", "hosts", "said"),
    [
        ({}, 0, "hosts must be a whole number, 1 or more (got 0)"),
        ({}, True, "hosts must be a whole number, 1 or more (got True)"),
        ({}, "2", "hosts must be a whole number, 1 or more (got '2')"),
        ({"retries": 1}, 1, "a gang is not run again when a worker has died; retries must be 0 for it"),
    ],
)
def test_gangs_that_make_no_sense_are_refused(pool, options, hosts, said):
    with pytest.raises(aa.UsageError) as caught:
        pool("A1:1", **options).gang(hosts, place)
    assert str(caught.value) == said


def test_nothing_is_taken_after_shutdown(pool):
    closed = pool("A1:1")
    closed.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        closed.gang(1, place)


def test_this_machine_is_one(pool_on):
    with pytest.raises(aa.UsageError, match=r"hosts must be 1 with engine='local'.*engine='ray' has those"):
        pool_on("local", "A1:1").gang(2, place)


@needs_ray
@pytest.mark.parametrize(("needs", "count"), [("A1:2", 2), (None, 0)])
def test_each_has_a_node_of_its_own_and_they_meet(nodes, pool_on, needs, count):
    results = pool_on("ray", needs).gang(3, meet).result(WAIT)
    assert results[0][0] == ["1 of 3", "2 of 3"]
    assert len({state for _, (state, _) in results}) == 3, "each node has a state directory of its own"
    assert [len(devices) for _, (_, devices) in results] == [count] * 3


@needs_ray
def test_when_one_fails_the_others_are_ended(nodes, pool_on, begun):
    pool = pool_on("ray", "A1:1")
    gang = pool.gang(3, fail_at, 1, begun)
    with pytest.raises(LookupError, match="nothing here") as caught:
        gang.result(WAIT)
    assert caught.value.__notes__ == ["It is rank 1 of a gang of 3; the others were ended."]
    assert [member.cancelled() for member in gang.members] == [True, False, True]
    until(lambda: ended(begun), "the end of the others")
    assert len(pool.gang(3, place).result(WAIT)) == 3, "what was reserved is free again"


@needs_ray
def test_a_gang_that_runs_can_be_cancelled(nodes, pool_on, begun):
    gang = pool_on("ray", "A1:1").gang(2, fail_at, 5, begun)
    until(lambda: len(list(begun.iterdir())) == 2, "both")
    assert gang.cancel()
    assert gang.cancelled()
    until(lambda: ended(begun), "their end")


@needs_ray
def test_a_gang_waits_for_all_its_devices_and_can_be_cancelled(nodes, pool_on, begun):
    pool = pool_on("ray", "A1:2")
    first = pool.gang(3, fail_at, 5, begun)
    until(lambda: len(list(begun.iterdir())) == 3, "the first")
    waits, follows = pool.gang(3, place), pool.gang(2, place)
    assert "Ray has not placed it" in waits.members[0].why().reasons[0].message
    assert waits.cancel()
    time.sleep(1)
    assert not follows.running()
    assert first.cancel()
    assert [variables[0] for variables, _ in follows.result(WAIT)] == ["0", "1"]


@needs_ray
def test_shutdown_can_cancel_a_gang_that_waits_and_none_that_runs(nodes, pool_on, begun):
    busy, idle = pool_on("ray", "A1:2"), pool_on("ray", "A1:2")
    runs = busy.gang(3, fail_at, 5, begun)
    until(lambda: len(list(begun.iterdir())) == 3, "the first")
    waits = idle.gang(2, place)
    idle.shutdown(cancel_futures=True)
    assert waits.cancelled()
    busy.shutdown(wait=False, cancel_futures=True)
    time.sleep(0.5)
    assert not runs.done()
    assert runs.cancel()


@needs_ray
def test_a_pool_that_is_closed_waits_for_its_gangs(nodes, pool_on):
    pool = pool_on("ray", "A1:1")
    gang = pool.gang(3, time.sleep, 0.5)
    pool.shutdown()
    assert gang.done()
    assert gang.result() == [None] * 3


@needs_ray
def test_more_nodes_than_there_are_are_refused(nodes, pool_on):
    with pytest.raises(
        aa.NeverFitsError, match=r"^a gang of 4 needs as many nodes that can serve A1:2, and the cluster has 3$"
    ):
        pool_on("ray", "A1:2").gang(4, place)
    with pytest.raises(aa.NeverFitsError, match=r"^a gang of 2 .* serve A1:4, and the cluster has 1$"):
        pool_on("ray", "A1:4").gang(2, place)
    with pytest.raises(aa.UsageError, match="max_workers must be None"):
        pool_on("ray", "A1:1", max_workers=4).gang(2, place)


@needs_ray
def test_when_a_node_dies_the_others_are_ended(nodes, pool_on, begun):
    dying = nodes.add("sim:A1:3", cpus=1)
    pool = pool_on("ray", "A1:1")
    gang = pool.gang(4, fail_at, 5, begun)
    until(lambda: len(list(begun.iterdir())) == 4, "all")
    nodes.kill(dying)
    with pytest.raises(aa.BrokenWorkerError, match="since the node or Ray's process there has died"):
        gang.result(WAIT)
    until(lambda: ended(begun), "the end of all")
