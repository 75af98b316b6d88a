"""Pools on a Dask cluster of several machines: every device to one call at a time, every mask right."""

import ast
import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from itertools import pairwise

import anyaccel as aa
import pytest
from dask_nodes import DaskNodes, needs_dask
from lengths import length
from mixed_calls import ONE, TWO, check_mixed_calls, report
from waiting import until

MISSING = [name for name in ("amd", "nvidia", "tpu") if importlib.util.find_spec(f"anyaccel_{name}") is None]
needs_vendors = pytest.mark.skipif(bool(MISSING), reason=f"needs the plug-ins anyaccel-{{{','.join(MISSING)}}}")
pytestmark = [needs_dask, pytest.mark.xdist_group("dask"), pytest.mark.timeout(450)]

WAIT = 180
CALLS = length(200, 500)


@pytest.fixture(scope="module")
def nodes(acme_site, tmp_path_factory):
    """A cluster of two machines, for those tests that leave it as it is."""
    nodes = DaskNodes(tmp_path_factory.mktemp("two"), acme_site)
    try:
        nodes.add(ONE)
        nodes.add(TWO)
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def cluster(acme_site, tmp_path_factory):
    """A cluster without workers, for one test alone."""
    nodes = DaskNodes(tmp_path_factory.mktemp("own"), acme_site)
    try:
        yield nodes
    finally:
        nodes.end()


@pytest.fixture
def pool(new_pool):
    """Make pools on a cluster."""
    return lambda nodes, needs=None, **options: new_pool(needs, engine="dask", address=nodes.address, **options)


@needs_vendors
def test_calls_of_every_kind_at_once(nodes, pool):
    given, there = check_mixed_calls(pool(nodes), CALLS, WAIT)
    assert given == there, "every device was used"


@needs_vendors
def test_types_and_filters_lead_to_the_machines_that_have_them(nodes, pool):
    every = pool(nodes)
    for needs, types in {
        "H100:1": {"H100"},
        "amd:1": {"AMD-Instinct-MI300X-OAM"},
        "A100|MI300X:1": {"AMD-Instinct-MI300X-OAM"},
        "GPU:1,mem=100G": {"AMD-Instinct-MI300X-OAM"},
        "H100/2": {"H100"},
    }.items():
        futures = [every.options(needs=needs).submit(abs, 1) for _ in range(3)]
        assert [future.result(WAIT) for future in futures] == [1, 1, 1]
        assert {device.type for future in futures for device in future.allocation.devices} == types, needs
    first = aa.detect(ONE).devices[2].id
    assert futures[0].allocation.devices[0].id == first, "this very one"


@needs_vendors
def test_a_machine_with_several_types_serves_each(cluster, pool):
    cluster.add("sim:H100:1,A100:1")
    both = pool(cluster)
    futures = [both.options(needs=needs).submit(time.sleep, 0.1) for needs in ("H100", "A100", "A100", "H100")]
    types = [future.result(WAIT) or future.allocation.devices[0].type for future in futures]
    assert types == ["H100", "A100", "A100", "H100"]


@needs_vendors
def test_what_no_node_can_ever_serve_is_refused_with_what_they_have(nodes, pool):
    with pytest.raises(aa.NeverFitsError, match=r"A100:1: node w0 .*it has 4 H100") as caught:
        pool(nodes, "A100:1")
    assert "TPU-V4" in str(caught.value), "what each node has"
    with pytest.raises(aa.NeverFitsError, match=r"\(got 3\)"):
        pool(nodes, "TPU:3")
    with pytest.raises(aa.NeverFitsError):
        pool(nodes, "H100:1 TPU:1")  # each is there, on different nodes
    assert pool(nodes, "H100:5,else=cpu").submit(report, set()).result(WAIT)[1] == []


def test_a_gang_is_refused(nodes, pool):
    with pytest.raises(aa.UsageError, match="engine='dask' has no gangs"):
        pool(nodes).gang(2, abs, 1)


@pytest.mark.usefixtures("acme")
def test_a_call_does_not_wait_behind_another_where_a_device_is_free(cluster, pool, tmp_path):
    """Dask itself would send it to any worker that has such devices, free or not."""
    cluster.add("sim:A1:2")
    cluster.add("sim:A1:2")
    one = pool(cluster, "A1:2")
    first = one.actor(list)  # it stays for as long as the test
    first.ready.result(WAIT)
    for _ in range(6):
        assert one.submit(abs, -1).result(WAIT) == 1
    second = one.actor(list)
    second.ready.result(WAIT)
    waits = one.submit(abs, -1)
    later = one.options(needs="A1:1").submit(abs, -2)
    assert "Dask has not placed it yet" in str(waits.why())
    first.close()
    assert (waits.result(WAIT), later.result(WAIT)) == (1, 2)


@pytest.mark.usefixtures("acme")
def test_pools_of_several_programs_take_turns(cluster, pool, tmp_path):
    cluster.add("sim:A1:1")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time, anyaccel as aa\n"
        "if __name__ == '__main__':\n"
        "    with aa.Pool('A1:1', engine='dask', address=sys.argv[1]) as pool:\n"
        "        hold = lambda: (time.monotonic(), time.sleep(0.02), time.monotonic())\n"
        "        calls = [pool.submit(hold) for _ in range(5)]\n"
        "        print([(start, end) for start, _, end in (call.result(60) for call in calls)])\n"
    )
    command = [sys.executable, "-W", "error", str(program), cluster.address]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    times = [pair for each in running for pair in ast.literal_eval(each.communicate(timeout=WAIT)[0])]
    assert len(times) == 15
    ordered = sorted(times)
    assert all(before[1] <= after[0] for before, after in pairwise(ordered))


@pytest.mark.usefixtures("acme")
def test_what_was_on_a_worker_that_dies(cluster, pool, tmp_path):
    workers = [cluster.add("sim:A1:4") for _ in range(2)]
    go_on, begun = tmp_path / "go on", tmp_path / "begun"
    begun.mkdir()

    def run(number):
        (begun / f"{number}-{time.monotonic_ns()}").touch()
        until(go_on.exists, "the end of the test")
        return aa.current().devices[0].type

    one = pool(cluster, "A1:1")
    again = one.options(retries=2)
    actor = one.options(needs="A1:2").actor(list)
    actor.ready.result(WAIT)
    calls = [each.submit(run, number) for number, each in enumerate((one, again) * 3)]
    until(lambda: all(future.running() for future in calls) and len(list(begun.iterdir())) == 6, "all")
    home = actor._group.begun[0].member.started.node
    nodes = {member.call: member.started.node for member in one._core.members if hasattr(member, "call")}
    here = [nodes[future._call] == home for future in calls]
    assert sum(here) == 2, "the other four are on the other machine"
    cluster.kill(workers[int(home[1])])
    with pytest.raises(aa.BrokenWorkerError, match="died"):
        actor.copy().result(WAIT)
    for number, (future, lost) in enumerate(zip(calls, here, strict=True)):
        if lost and number % 2 == 0:
            with pytest.raises(aa.BrokenWorkerError, match=r"on the node w\d \([0-9.:]+\) ended .* died"):
                future.result(WAIT)
    go_on.touch()
    for number, (future, lost) in enumerate(zip(calls, here, strict=True)):
        if not (lost and number % 2 == 0):
            assert future.result(WAIT) == "Acme-One"
        starts = [path for path in begun.iterdir() if path.name.startswith(f"{number}-")]
        assert len(starts) == 1 + (lost and number % 2), "Dask ran nothing again by itself"
    assert one.submit(run, 9).result(WAIT) == "Acme-One", "the rest goes on"


@pytest.mark.usefixtures("acme")
def test_a_machine_that_joins_serves_what_waits(cluster, pool, tmp_path):
    cluster.add("sim:A1:1")
    one = pool(cluster, "A1:1")
    lives = one.actor(list)
    lives.ready.result(WAIT)
    waits = one.submit(abs, -1)
    until(lambda: "Dask has not placed it yet" in str(waits.why()), "the call to wait")
    joined = cluster.add("sim:A1:1,Acme-Whole:1")
    assert waits.result(WAIT) == 1
    whole = one.options(needs="Acme-Whole:1")
    assert whole.submit(abs, -2).result(WAIT) == 2
    cluster.kill(joined)
    waits = whole.submit(abs, -3)
    until(lambda: "no node of Dask can serve it now, so it waits until one joins" in str(waits.why()), "the death")
    cluster.add("sim:Acme-Whole:1")
    assert waits.result(WAIT) == 3


@pytest.mark.usefixtures("acme")
def test_a_worker_is_there_for_tasks_of_dask_too(cluster):
    """What the preload tells Dask, before there was any pool."""
    from distributed import Client

    cluster.add("sim:A1:2", "--preload", "anyaccel_dask.node")
    with Client(cluster.address, set_as_default=False) as client:
        (worker,) = client.scheduler_info()["workers"].values()
        assert worker["resources"] == {"APU": 2, "Acme-One": 2}
        assert client.submit(pow, 2, 5, resources={"APU": 2}).result(WAIT) == 32
        with aa.Pool("A1:1", engine="dask", address=cluster.address) as pool:
            assert pool.submit(abs, -1).result(WAIT) == 1


@pytest.mark.usefixtures("acme")
def test_leases_are_seen_by_others_on_the_machine(cluster, pool, monkeypatch):
    cluster.add("sim:A1:2")
    future = pool(cluster, "A1:1").submit(time.sleep, 30)
    until(future.running, "the call")
    monkeypatch.setenv("ANYACCEL_STATE_DIR", str(cluster.states["w0"]))
    (lease,) = aa.leases(aa.detect("sim:A1:2"))
    assert lease.device == future.allocation.devices[0].id
    assert "sleep" in lease.note
    assert future.cancel()
    until(lambda: not aa.leases(aa.detect("sim:A1:2")), "the end of the lease")


PROGRAM = """
import os, sys, time, anyaccel as aa
def late(path):
    open(path, "w").write(str(os.getpid()))
    time.sleep(100)
if __name__ == "__main__":
    pool = aa.Pool("A1:1", engine="dask", address=sys.argv[1], grace=0.5)
    pool.submit(late, sys.argv[2]).result()
"""


@pytest.mark.usefixtures("acme")
def test_a_program_that_is_killed_leaves_no_call_behind(cluster, tmp_path):
    cluster.add("sim:A1:1")
    (tmp_path / "program.py").write_text(PROGRAM)
    path = tmp_path / "pid"
    program = subprocess.Popen([sys.executable, str(tmp_path / "program.py"), cluster.address, str(path)])
    try:
        pid = int(until(lambda: path.exists() and path.read_text(), "the call"))
    finally:
        program.kill()
        program.wait()
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of the call")
    with aa.Pool("A1:1", engine="dask", address=cluster.address) as pool:
        assert pool.submit(abs, -1).result(WAIT) == 1


OWN = """
import os, anyaccel as aa
seen = lambda: os.environ["ACME_VISIBLE"]
with aa.Pool("A1:1", engine="dask") as one, aa.Pool("A1:2", engine="dask") as two:
    print(one.submit(seen).result(60), two.submit(seen).result(60).count(","))
with aa.Pool(engine="dask") as pool:
    print(list(pool.map(abs, [-1, -2])))
left = aa.Pool("A1:1", engine="dask")
print(left.submit(seen).result(60))
"""


def test_without_an_address_it_is_this_machine_and_nothing_is_left(acme, tmp_path):
    """A script without the usual guard, with warnings as errors; a pool is left to the end of the program."""
    environ = {**os.environ, "ANYACCEL_MACHINE": "sim:A1:4", "DASK_TEMPORARY_DIRECTORY": str(tmp_path)}
    (tmp_path / "own.py").write_text(OWN)
    command = [sys.executable, "-X", "dev", "-W", "error", str(tmp_path / "own.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=WAIT, check=False)
    # asyncio names each callback that took 0.1 s, as many do on a loaded machine.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Executing <")]
    assert (done.returncode, said) == (0, [])
    first, second, last = done.stdout.splitlines()
    assert first.endswith(" 1")
    assert second == "[1, 2]"
    assert last == first.split()[0]


def test_the_client_that_there_is_is_used_and_left_alone(nodes):
    from distributed import Client

    with Client(nodes.address) as client:
        with aa.Pool(engine="dask") as pool:
            assert pool.submit(pow, 2, 5).result(WAIT) == 32
        assert client.submit(pow, 2, 5).result(WAIT) == 32


def test_an_address_without_a_scheduler():
    import dask

    soon = dask.config.set({"distributed.comm.timeouts.connect": "1s"})
    with soon, pytest.raises(aa.UsageError, match=r"there is no Dask scheduler at 'tcp://127\.0\.0\.1:9'"):
        aa.Pool(engine="dask", address="tcp://127.0.0.1:9")


@pytest.mark.usefixtures("acme")
def test_a_scheduler_that_has_gone_is_named(cluster, pool):
    cluster.add("sim:A1:1")
    one = pool(cluster, "A1:1")
    one._core.cluster._client.close()  # as Dask does when it cannot connect again
    with pytest.raises(aa.WorkerStartError, match=r"the Dask scheduler at tcp://.* has gone") as caught:
        one.options(needs="APU:1")
    assert caught.value.hint == "make a new pool once it is there again"


def test_an_asynchronous_client_is_refused_with_the_way_out(nodes):
    from distributed import Client

    async def use():
        async with Client(nodes.address, asynchronous=True):
            with pytest.raises(aa.UsageError, match="is asynchronous") as caught:
                aa.Pool(engine="dask")
            assert "asyncio.to_thread" in caught.value.hint
            pool = await asyncio.to_thread(aa.Pool, engine="dask", address=nodes.address)
            assert await pool.submit(pow, 2, 5) == 32
            await asyncio.to_thread(pool.shutdown)

    asyncio.run(use())


def kept(dask_scheduler):
    """What the scheduler keeps of pools."""
    dispatcher = dask_scheduler.plugins["anyaccel"]
    topics = [name for name in dask_scheduler.get_events() if name.startswith("anyaccel ") and "nodes" not in name]
    return sorted(dispatcher._pools), sorted(dispatcher._places), topics


@pytest.mark.usefixtures("acme")
def test_the_scheduler_keeps_nothing_of_pools_that_have_ended(cluster, pool):
    from distributed import Client

    cluster.add("sim:A1:1")
    with Client(cluster.address, set_as_default=False) as client:
        with pool(cluster, "A1:1") as one:
            assert one.submit(time.sleep, 0.5).result(WAIT) is None  # so long that its pool hears of it
            pools, places, topics = client.run_on_scheduler(kept)
            assert len(pools) == len(places) == len(topics) == 1
        until(lambda: not any(client.run_on_scheduler(kept)), "the end of the pool")


def forget_the_absent(dask_scheduler):
    """Let the dispatcher take all clients that are away for dead."""
    dispatcher = dask_scheduler.plugins["anyaccel"]
    dispatcher._away = dict.fromkeys(dispatcher._away, 0.0)
    return list(dispatcher._away)


@pytest.mark.usefixtures("acme")
def test_the_scheduler_forgets_pools_of_programs_that_have_died(cluster, pool):
    from distributed import Client

    cluster.add("sim:A1:1")
    with Client(cluster.address, set_as_default=False) as client:
        dies = pool(cluster, "A1:1")
        dies._core.cluster._client.close()
        until(lambda: client.run_on_scheduler(forget_the_absent), "the scheduler to know that the client is away")
        with pool(cluster, "A1:1") as one:
            assert one.submit(abs, -1).result(WAIT) == 1
            assert len(client.run_on_scheduler(kept)[0]) == 1
