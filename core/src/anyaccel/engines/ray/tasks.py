"""What Ray runs on a node: our task, our actor, and a look at what is there."""

from __future__ import annotations

import contextlib
import pickle
import signal
import threading
from collections.abc import Iterator
from functools import partial

from anyaccel.engines.ray.node import RayNode, node_inventory
from anyaccel.engines.ray.notices import leave, remove, spared
from anyaccel.engines.remote.actor_host import ActorHost
from anyaccel.engines.remote.host import host_of, loaded, pickled
from anyaccel.engines.remote.host import run as run_call
from anyaccel.engines.remote.messages import Started, failure
from anyaccel.model import Inventory
from anyaccel.pool.payload import loads


def run(spec: bytes, call: bytes, data: bytes, *buffers: bytes) -> bytes:
    """Run one call. Ray takes bytes as they are, which saves time.

    Args:
        spec: A pickled :class:`~anyaccel.engines.remote.messages.Spec`.
        call: Pickled: a pickled :class:`~anyaccel.engines.remote.messages.Order`; the key of the notice that the call
            leaves when it takes a while; and where its output goes, or None.
        data: What to call, pickled, with
        buffers: what it refers to.

    Returns:
        A pickled :class:`~anyaccel.engines.remote.messages.Answer`.
    """
    order, key, log = loads(call)
    noticed = False

    def begun(started: Started) -> None:
        nonlocal noticed
        leave(key, started)
        noticed = True

    def ended() -> bool:
        if not interrupted.is_set():
            return False
        interrupted.clear()
        return not spared(key)

    with _uninterrupted() as interrupted:
        try:
            host = host_of(spec, RayNode)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            answer = failure(error)
        else:
            answer = run_call(host, loaded(order), log, pickled(data, buffers), ended=ended, begun=begun)
        if noticed:
            remove(key)
    return pickle.dumps(answer)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[threading.Event]:
    """Take note when Ray cancels the task of this thread, instead of being interrupted at any line."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class RayActorHost(ActorHost):
    """The class of our actors of Ray."""

    def __init__(self, spec: bytes, order: bytes) -> None:
        super().__init__(partial(host_of, spec, RayNode), order)


def survey() -> Inventory:
    """What is on this node."""
    return node_inventory()
