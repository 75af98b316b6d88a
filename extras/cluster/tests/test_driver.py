"""The pool's side of a cluster, by itself: the cluster is one of ours, which does what the test says."""

import pickle
import time
from concurrent.futures import CancelledError, Future, wait

import pytest
from anyaccel.errors import (
    BrokenWorkerError,
    NeverFitsError,
    TaskTimeoutError,
    UnknownNameError,
    WorkerError,
    WorkerStartError,
)
from anyaccel.pool.actor import ActorGroup
from anyaccel.pool.call import Options
from anyaccel.pool.engine import PoolSettings
from anyaccel.pool.messages import MessageKind, dumps
from anyaccel.scheduler import parse_request
from anyaccel_cluster.cluster import Answer, Cluster, Plan, Started, make_failure
from anyaccel_cluster.driver import Driver, RemoteActor
from waiting import PATIENCE, until

pytestmark = pytest.mark.timeout(240)
MANY = 3000


class Host:
    """The host of an actor: it answers every call with the name of its method."""

    def started(self):
        return answered(Started("here", None))

    def call(self, method, log, data, *buffers):
        return answered(Answer(MessageKind.RESULT, dumps(method).data))

    def ended(self):
        return Future()


class OurCluster(Cluster[Plan]):
    title = "Ours"
    connected = True

    def __init__(self):
        super().__init__()
        self.calls = []
        self.gone = False
        self.make_host = Host

    def remove_call(self, key, *, left):
        pass

    def find_plan(self, request):
        return Plan(request=request, terms=("",))

    def place(self, order, plan, *, actor):
        return None

    def run(self, place, order, key, log, body):
        if self.gone:
            raise ConnectionError("it has gone")
        self.calls.append(Future())
        return self.calls[-1]

    def host(self, place, order, key):
        return self.make_host()


def answered(value):
    future = Future()
    future.set_result(value)
    return future


def driver_on(cluster, **settings):
    return Driver(cluster, PoolSettings(**settings))


def test_calls_that_wait_fail_when_the_cluster_has_gone_however_many_they_are():
    cluster = OurCluster()
    driver = driver_on(cluster, max_workers=1)
    futures = [driver.submit(Options(), abs, (-1,), {}) for _ in range(MANY)]
    cluster.gone = True
    cluster.calls[0].set_exception(ConnectionError("it has gone"))
    assert not wait(futures, PATIENCE).not_done
    driver.shutdown(wait=True)


def test_a_cluster_is_closed_once_and_before_shutdown_returns():
    cluster, closed = OurCluster(), []

    def close():
        closed.append(1)
        time.sleep(0.2)
        closed.append(2)

    cluster.close = close
    driver = driver_on(cluster)
    future = driver.submit(Options(), abs, (-1,), {})
    cluster.calls[0].set_result(pickle.dumps(Answer(MessageKind.RESULT, dumps(1).data)))
    assert future.result(PATIENCE) == 1
    driver.shutdown(wait=True)
    assert closed == [1, 2]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (None, "Ours has not placed it yet"),
        (NeverFitsError("gone", verdict=None), "no node of Ours can serve it now, so it waits until one joins"),
        (UnknownNameError("gone"), "no node of Ours can serve it now, so it waits until one joins"),
        (WorkerStartError("gone"), "Ours has not placed it yet"),
    ],
)
def test_a_call_that_waits_says_so_if_the_nodes_that_could_serve_it_have_gone(fault, reason):
    cluster = OurCluster()
    driver = driver_on(cluster)
    request = parse_request("GPU:1")
    future = driver.submit(Options(needs=request), abs, (-1,), {})

    def find_plan(_):
        if fault is not None:
            raise fault

    cluster.find_plan = find_plan
    cluster.refresh()
    assert str(future.why()) == f"GPU:1 does not fit now: {reason}."
    cluster.calls[0].set_result(pickle.dumps(Answer(MessageKind.RESULT, dumps(1).data)))
    assert future.result(PATIENCE) == 1
    driver.shutdown(wait=True)


def test_an_answer_that_cannot_be_read_ends_its_call():
    cluster = OurCluster()
    driver = driver_on(cluster)
    future = driver.submit(Options(), abs, (-1,), {})
    cluster.calls[0].set_result(Answer(MessageKind.RESULT, b""))  # not pickled
    with pytest.raises(WorkerStartError, match=r"abs has no result: .* cannot be read") as caught:
        future.result(PATIENCE)
    assert caught.value.hint == "install the same version of anyaccel on every node"
    driver.shutdown(wait=True)


@pytest.mark.parametrize("report", ["started", "call", "ended"])
def test_a_report_about_an_actor_that_cannot_be_read_ends_it(report):
    cluster, host = OurCluster(), DyingHost()
    cluster.make_host = lambda: host
    setattr(host, report, lambda *_: answered("nonsense"))
    driver = driver_on(cluster)
    group = ActorGroup(driver, "Echo", Options())
    group.begin((dict, (), {}, 1))
    ended = group.ready if report != "ended" else group.call("method", (), {})
    with pytest.raises(WorkerError, match="cannot be read"):  # or of an actor that has gone, if it was earlier
        ended.result(PATIENCE)
    driver.shutdown(wait=True)


def test_a_method_that_is_cancelled_while_it_is_handed_over_leaves_its_actor_alive(monkeypatch):
    driver = driver_on(OurCluster())
    group = ActorGroup(driver, "Echo", Options())
    group.begin((dict, (), {}, 1))
    group.ready.result(PATIENCE)
    run = RemoteActor.run

    def cancel_and_run(actor, call):
        monkeypatch.setattr(RemoteActor, "run", run)
        call.future.cancel()
        run(actor, call)

    monkeypatch.setattr(RemoteActor, "run", cancel_and_run)
    with pytest.raises(CancelledError):
        group.call("first", (), {}).result(PATIENCE)
    assert group.call("second", (), {}).result(PATIENCE) == "second"


class DyingHost(Host):
    """A host whose reports come in the order of the test: answers to methods, and the end of the process."""

    def __init__(self):
        self.answers = {}
        self.end = Future()

    def call(self, method, log, data, *buffers):
        if not method:  # the construction
            return super().call(method, log, data, *buffers)
        self.answers[method] = Future()
        return self.answers[method]

    def ended(self):
        return self.end

    def kill(self):
        pass


@pytest.mark.parametrize("order", [("late", "lost", "end"), ("end", "late", "lost"), ("lost", "end", "late")], ids=str)
def test_a_method_that_was_too_late_is_told_so_in_whatever_order_the_reports_of_the_end_come(order):
    cluster, host = OurCluster(), DyingHost()
    cluster.make_host = lambda: host
    driver = driver_on(cluster)
    group = ActorGroup(driver, "Echo", Options(concurrency=2))
    group.begin((dict, (), {}, 2))
    group.ready.result(PATIENCE)
    late, lost = group.call("late", (), {}), group.call("lost", (), {})
    until(lambda: len(host.answers) == 2, "both calls")
    death = BrokenWorkerError("the worker was killed by SIGTERM")
    reports = {
        "late": (host.answers["late"], TaskTimeoutError("late took longer than its timeout of 1 s")),
        "lost": (host.answers["lost"], death),
        "end": (host.end, death),
    }
    for name in order:
        future, error = reports[name]
        future.set_result(make_failure(error))
    with pytest.raises(TaskTimeoutError):
        late.result(PATIENCE)
    with pytest.raises(BrokenWorkerError, match="SIGTERM"):
        lost.result(PATIENCE)
    with pytest.raises((RuntimeError, BrokenWorkerError)):
        group.call("later", (), {}).result(PATIENCE)
