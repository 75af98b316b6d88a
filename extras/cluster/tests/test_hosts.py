"""Hosts of calls and actors on a node of a cluster."""

import pickle

from anyaccel.pool import Options, PoolSettings, broker_of, dumps
from anyaccel.pool.messages import MessageKind
from anyaccel_cluster import ActorHost, NodeAdapter, PoolSpec, close_host, host, make_order, run_call
from anyaccel_cluster.cluster import Plan
from waiting import until

POOL = "pool of this test"
SPEC = pickle.dumps(PoolSpec(pool=POOL, path=(), settings=PoolSettings(idle=0)))
ORDER = pickle.dumps(make_order("order", Options(), Plan()))


class Node(NodeAdapter):
    name = "here"

    def __init__(self, spec):
        pass

    @property
    def broker(self):
        return broker_of("sim:A1:1", None, shared=True)

    def options(self, order):
        return Options()

    def expected(self, options):
        return None


def call():
    return run_call(SPEC, Node, ORDER, None, dumps((abs, (-1,), {})), ended=lambda: False, begun=lambda _: None)


def test_a_host_with_an_actor_is_not_closed_when_a_call_ends(acme):
    actor = ActorHost(SPEC, Node, ORDER)
    assert actor.call("", None, dumps((list, (), {}, 1)).data).kind == MessageKind.RESULT
    assert call().kind == MessageKind.RESULT
    hosts = host._hosts
    hosts[POOL].used = 0  # as if the idle time had passed since the call
    host._close_if_idle(POOL, hosts[POOL])
    assert POOL in hosts
    assert actor.call("append", None, dumps(("append", (1,), {})).data).kind == MessageKind.RESULT
    actor.stop(0)
    actor.ended()
    until(lambda: POOL not in hosts, "the end of the host, which has no user any more")
    close_host(POOL)
